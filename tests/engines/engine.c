/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An inference engine in C: engine RUNTIME_DIR PREFIX STREAMS TOKENS RING_BYTES OVERFLOW_BYTES
 *
 * Its model makes up TOKENS tokens for each of STREAMS answers, PREFIX-0 and so on, a token of every answer in each step.
 * Prints what became of each answer. clawd_ring.h comes first, or -D_GNU_SOURCE is needed.
 */
#include "clawd_ring.h"

#include <err.h>
#include <stdlib.h>

enum {
	STREAMS_MAX = 64,
	TOKEN_MAX = 6, /* bytes */
	URGENT_EVERY = 16, /* tokens: as a tool call that somebody waits for */
};

static const uint64_t patience_ns = 20000000000u;
static const char prose[] = "The ring is full; 环形缓冲区已满，请稍候。 Ёмкость 0123456789 🦞 naïve ∑";

struct answer {
	struct claw_stream stream;
	char name[CLAW_NAME_MAX];
	size_t at; /* in the prose */
	int is_over;
};

static struct claw_producer producer;
static struct answer answers[STREAMS_MAX];

/* The model: a token is some bytes, and may end inside a character */
static size_t make_token(struct answer *answer, int index, int step, const char **ret_text)
{
	size_t len = (size_t)(1 + (step * 7 + index * 3) % TOKEN_MAX);

	if (len > sizeof(prose) - 1 - answer->at)
		len = sizeof(prose) - 1 - answer->at;
	*ret_text = prose + answer->at;
	answer->at = (answer->at + len) % (sizeof(prose) - 1);
	return len;
}

/* After -EAGAIN: whether to try again. An engine that must not wait keeps its tokens for the next step instead */
static int has_room(int result, uint64_t bytes)
{
	return result == -EAGAIN && claw_wait_room(&producer, bytes, patience_ns) == 0;
}

static void check(int result, const char *what)
{
	if (result < 0 && result != -ECANCELED)
		errx(1, "cannot %s: %s", what, claw_result_text(result));
}

static void open_answer(struct answer *answer, const char *prefix, int index)
{
	int len = snprintf(answer->name, sizeof(answer->name), "%s-%d", prefix, index);
	int result;

	do {
		result = claw_open_stream(&producer, answer->name, (size_t)len, NULL, 0, claw_now_ns(), &answer->stream);
	} while (has_room(result, producer.record_max));
	check(result, "open a stream");
}

static void close_answer(struct answer *answer, const char *reason)
{
	int result;

	do {
		result = claw_close_stream(&producer, answer->stream, reason, strlen(reason));
	} while (has_room(result, claw_record_bytes(strlen(reason))));
	check(result, "close a stream");
	printf("%s %s\n", answer->name, reason);
	answer->is_over = 1;
}

/* One step of the engine: a token for each answer, in one call; returns how many answers are not over */
static int make_step(int count, int step)
{
	static struct claw_stream streams[STREAMS_MAX];
	static uint32_t lens[STREAMS_MAX];
	static char texts[STREAMS_MAX * TOKEN_MAX];
	uint64_t bytes = 0;
	size_t used = 0;
	uint32_t n = 0;
	int live = 0;
	int i, result;

	for (i = 0; i < count; i++) {
		struct answer *answer = &answers[i];
		const char *text;
		size_t len;
		int stopped;

		if (answer->is_over)
			continue;
		stopped = claw_stopped(&producer, answer->stream);
		check(stopped, "look at a stream");
		if (stopped) { /* a reader cancelled, or clawd refused it: no more work for this one */
			close_answer(answer, claw_stopped_text(stopped));
			continue;
		}
		live++;
		len = make_token(answer, i, step, &text);
		if (step % URGENT_EVERY == URGENT_EVERY - 1) {
			do {
				result = claw_write(&producer, answer->stream, text, len, CLAW_URGENT, 1);
			} while (has_room(result, claw_text_bytes(&producer, text, len)));
			check(result, "write");
			continue;
		}
		streams[n] = answer->stream;
		lens[n++] = (uint32_t)len;
		memcpy(texts + used, text, len);
		used += len;
		bytes += claw_text_bytes(&producer, text, len);
	}
	do {
		result = claw_write_many(&producer, streams, lens, texts, n, 0, 1);
	} while (has_room(result, bytes));
	check(result, "write a step");
	return live;
}

int main(int argc, char **argv)
{
	struct claw_attached answer;
	int count, tokens, step, result, i;

	if (argc != 7 || (count = atoi(argv[3])) < 1 || count > STREAMS_MAX)
		errx(2, "usage: engine RUNTIME_DIR PREFIX STREAMS TOKENS RING_BYTES OVERFLOW_BYTES");
	tokens = atoi(argv[4]);
	result = claw_attach(&producer, argv[1], "engine in C", strtoull(argv[5], NULL, 10), &answer);
	if (result < 0)
		errx(1, "cannot attach: %s", answer.status ? answer.text : claw_result_text(result));
	check(claw_set_overflow(&producer, strtoull(argv[6], NULL, 10)), "set the overflow");

	for (i = 0; i < count; i++)
		open_answer(&answers[i], argv[2], i);
	for (step = 0; step < tokens; step++)
		if (!make_step(count, step))
			break;
	for (i = 0; i < count; i++)
		if (!answers[i].is_over)
			close_answer(&answers[i], i % 2 ? "length" : "stop");
	/* what found no room in the ring would end with this process */
	while ((result = claw_flush(&producer)) > 0)
		if (claw_wait_room(&producer, claw_record_bytes(producer.record_max), patience_ns) < 0)
			errx(1, "cannot give back the ring: %d records found no room in it", result);
	check(result, "flush");
	claw_detach(&producer);
	return 0;
}
