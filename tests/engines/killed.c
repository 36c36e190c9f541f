/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine of the kill loop: killed RUNTIME_DIR PREFIX PROGRESS. What it writes, and how it says how far it came, is as
 * in tests/kills_text.py. Without a thread: when clawd is gone it tries once a step to go on with the next one.
 */
#include "clawd_ring.h"

#include <err.h>
#include <poll.h>
#include <stdlib.h>

enum {
	WIDTH = 4,
	RING_BYTES = 8192,
	STREAMS_MAX = 8192,
	STEP_US = 12000,
	TOKEN_MAX = 320,
};

static const uint32_t closed_bit = 1u << 31;
static const uint64_t patience_ns = 60000000000u;
static const char prose[] = "The ring is full; 环形缓冲区已满，请稍候。 Ёмкость 0123456789 🦞 naïve ∑";

struct answer {
	struct claw_stream stream;
	char name[CLAW_NAME_MAX];
	uint32_t index, hash, length, written;
	int is_open, is_closed; /* closed: and not yet known to be in the ring */
};

static struct claw_producer producer;
static struct answer answers[2 * WIDTH];
static volatile uint32_t *progress;

static uint32_t hashed(const char *name)
{
	uint32_t value = 0x811c9dc5u;

	while (*name)
		value = (value ^ (uint8_t)*name++) * 0x01000193u;
	return value;
}

static size_t make_token(const struct answer *answer, char *text)
{
	uint32_t size = sizeof(prose) - 1, number = answer->written;
	uint32_t at = (answer->hash % 1000 + 7 * number) % size;
	uint32_t len = 1 + number % 11;
	int head = snprintf(text, TOKEN_MAX, "%s %u ", answer->name, number);

	if (len > size - at)
		len = size - at;
	memcpy(text + head, prose + at, len);
	return (size_t)head + len;
}

static int has_room(int result, uint64_t bytes)
{
	return result == -EAGAIN && claw_wait_room(&producer, bytes, patience_ns) == 0;
}

static void check(int result, const char *what)
{
	if (result < 0)
		errx(1, "cannot %s: %s", what, claw_result_text(result));
}

static void begin(struct answer *answer, const char *prefix, uint32_t index)
{
	int len = snprintf(answer->name, sizeof(answer->name), "%s-%u", prefix, index);
	int result;

	answer->index = index;
	answer->hash = hashed(answer->name);
	answer->length = 20 + answer->hash % 130;
	answer->written = 0;
	progress[index] = 1; /* first: a kill may come at any moment after the OPEN is in the ring */
	do {
		result = claw_open_stream(&producer, answer->name, (size_t)len, NULL, 0, claw_now_ns(), &answer->stream);
	} while (has_room(result, producer.record_max));
	check(result, "open a stream");
	answer->is_open = 1;
}

static void step(struct answer *answer)
{
	char text[TOKEN_MAX];
	size_t len = make_token(answer, text);
	uint8_t flags = answer->written % 16 == 15 ? CLAW_URGENT : 0;
	int result;

	do {
		result = claw_write(&producer, answer->stream, text, len, flags, 1);
	} while (has_room(result, claw_text_bytes(&producer, text, len)));
	check(result, "write");
	if (++answer->written < answer->length)
		return;
	do {
		result = claw_close_stream(&producer, answer->stream, "stop", 4);
	} while (has_room(result, claw_record_bytes(4)));
	check(result, "close a stream");
	answer->is_open = 0;
	answer->is_closed = 1;
}

/* Nothing waits outside: all there is is in the ring, in this order */
static void publish(void)
{
	struct claw_backlog backlog = { 1, 0 };

	check(claw_look_backlog(&producer, &backlog), "look at what waits");
	if (backlog.accepted)
		return;
	for (struct answer *answer = answers; answer < answers + 2 * WIDTH; answer++) {
		if (answer->is_open)
			progress[answer->index] = 1 + answer->written;
		else if (answer->is_closed)
			progress[answer->index] = closed_bit | (1 + answer->written);
		answer->is_closed = 0;
	}
}

static void go_on(const char *directory)
{
	struct pollfd gone = { claw_poll_fd(&producer), POLLIN, 0 };
	struct claw_attached told;
	int result;

	check(gone.fd, "look for clawd");
	if (poll(&gone, 1, 0) == 1) {
		result = claw_reattach(&producer, directory, &told);
		if (result == -ESHUTDOWN)
			errx(1, "cannot go on: %s", told.text);
	}
	check(claw_flush(&producer), "flush");
}

/* A place for one more answer: its last one is in the ring as a whole */
static struct answer *find_place(void)
{
	int live = 0;
	struct answer *found = NULL;

	for (struct answer *answer = answers; answer < answers + 2 * WIDTH; answer++) {
		live += answer->is_open;
		if (!answer->is_open && !answer->is_closed)
			found = answer;
	}
	return live < WIDTH ? found : NULL;
}

static int is_live(void)
{
	for (struct answer *answer = answers; answer < answers + 2 * WIDTH; answer++)
		if (answer->is_open || answer->is_closed)
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	struct pollfd told = { 0, POLLIN, 0 };
	struct claw_attached answer;
	uint32_t begun = 0;
	int fd, result, over = 0;

	if (argc != 4)
		errx(2, "usage: killed RUNTIME_DIR PREFIX PROGRESS");
	fd = open(argv[3], O_RDWR | O_CLOEXEC);
	progress = (volatile uint32_t *)mmap(NULL, 4 * STREAMS_MAX, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd < 0 || progress == MAP_FAILED)
		err(1, "cannot map %s", argv[3]);
	while ((result = claw_attach(&producer, argv[1], argv[2], RING_BYTES, &answer)) < 0) {
		if (answer.status)
			errx(1, "cannot attach: %s", answer.text);
		usleep(10000); /* there is no clawd at this moment */
	}
	while (!over || is_live()) {
		struct answer *place;

		over = over || poll(&told, 1, 0) == 1;
		while (!over && begun < STREAMS_MAX && (place = find_place()))
			begin(place, argv[2], begun++);
		for (place = answers; place < answers + 2 * WIDTH; place++)
			if (place->is_open)
				step(place);
		go_on(argv[1]);
		publish();
		usleep(STEP_US);
	}
	claw_detach(&producer);
	return 0;
}
