/* SPDX-License-Identifier: Apache-2.0 */
/* A producer killed after every instruction of every call that publishes: clawd sees all of the call or nothing of it. */
#include "clawd_ring.h"

#include <sys/eventfd.h>

#include "attached.h"
#include "look.h"
#include "step.h"

enum { RING_BYTES = 8192, SHORT = 40 };

/* The call under test, and the records that clawd may see: `before` of them without it, `after` with it */
static struct {
	struct memory memory;
	struct claw_producer producer;
	struct claw_stream streams[3];
	const char *what;
	uint64_t pos, seq; /* where clawd stands */
	struct seen expected[LOOK_MAX];
	int before, after;
	long invisible, whole;
	int result;
} at;

static char text[RING_BYTES];
static const uint32_t lens[3] = { 7, 100, 33 };

static void expect(uint8_t kind, uint32_t handle, uint32_t count, const void *payload, size_t len)
{
	struct seen *seen = &at.expected[at.after++];
	seen->header.kind = kind;
	seen->header.handle = (uint16_t)handle;
	seen->header.count = count;
	seen->header.len = (uint32_t)len;
	seen->header.ring_seq = at.seq + (uint64_t)at.after - 1;
	memcpy(seen->payload, payload, len);
}

static int differs(const struct seen *seen, const struct seen *expected)
{
	struct claw_record header = seen->header;
	header.written_ns = 0; /* the one thing that is not known before */
	return memcmp(&header, &expected->header, sizeof(header)) || !seen->header.written_ns ||
	       memcmp(seen->payload, expected->payload, header.len);
}

static int look(void *argument)
{
	static struct seen seen[LOOK_MAX];
	int count = look_at_ring(&at.memory, at.pos, at.seq, seen);
	(void)argument;

	if (count != at.before && count != at.after) {
		fprintf(stderr, "%s: TORN: clawd sees %d records, not %d or %d\n", at.what, count, at.before, at.after);
		return -1;
	}
	for (int i = 0; i < count; i++)
		if (differs(&seen[i], &at.expected[i])) {
			fprintf(stderr, "%s: TORN: record %d is not what was written\n", at.what, i);
			return -1;
		}
	if (count == at.before && at.after != at.before) {
		if (at.whole) {
			fprintf(stderr, "%s: published, and then not any more\n", at.what);
			return -1;
		}
		at.invisible++;
	} else {
		at.whole++;
	}
	return 0;
}

/* Two streams open and one token unread, `offset` bytes from the ring's start; old bytes everywhere else */
static void prepare(const char *what, uint64_t offset)
{
	uint64_t pos = 5 * (uint64_t)RING_BYTES + offset;
	int event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

	memset(&at, 0, sizeof(at));
	at.what = what;
	at.memory = memory_make(RING_BYTES);
	memset(at.memory.ring, 0xa5, RING_BYTES);
	attached_make(&at.producer, &at.memory, pos, 9, event_fd);
	for (int i = 0; i < 3; i++)
		claw_open_stream(&at.producer, "abc" + i, 1, NULL, 0, 0, &at.streams[i]);
	at.memory.ctl->ack_pos = at.pos = at.producer.head;
	at.memory.ctl->need_wake = 3; /* asleep: the call signals too */
	at.seq = at.producer.ring_seq;
	claw_write(&at.producer, at.streams[0], "unread", 6, 0, 1);
	expect(CLAW_TOKEN, at.streams[0].handle, 1, "unread", 6);
	at.before = at.after;
	at.memory.ctl->need_wake = 5;
}

static int publish(const char *what, uint64_t offset, void (*call)(void *))
{
	long points = step_and_kill(call, NULL, look);
	uint64_t signals = 0;

	if (points < 0)
		return points == -UNAVAILABLE ? UNAVAILABLE : 1;
	if (read(at.producer.event_fd, &signals, sizeof(signals)) < 0 || signals != 2) {
		fprintf(stderr, "%s: %lu signals, not one for each sleep\n", what, (unsigned long)signals);
		return 1;
	}
	if (!at.whole || (at.after != at.before && !at.invisible)) {
		fprintf(stderr, "%s at %lu: was not stepped through\n", what, (unsigned long)offset);
		return 1;
	}
	printf("%s: %ld invisible, %ld whole, 0 torn\ncounted: %ld kill points\n", what, at.invisible, at.whole, points);
	return 0;
}

static void call_open(void *argument)
{
	(void)argument;
	claw_open_stream(&at.producer, "name", 4, "{\"a\":1}", 7, 77, &at.streams[2]);
}

static void call_write(void *argument)
{
	(void)argument;
	claw_write(&at.producer, at.streams[1], text, SHORT, CLAW_URGENT, 3);
}

static void call_long_write(void *argument)
{
	(void)argument;
	claw_write(&at.producer, at.streams[1], text, 5000, 0, 1);
}

static void call_write_many(void *argument)
{
	(void)argument;
	claw_write_many(&at.producer, at.streams, lens, text, 3, 0, 2);
}

static void call_close(void *argument)
{
	(void)argument;
	claw_close_stream(&at.producer, at.streams[1], "length", 6);
}

int main(void)
{
	/* by value of struct claw_open: fixed here, so that a change of its layout is seen */
	uint8_t open_payload[16 + 4 + 7] = { 77, 0, 0, 0, 0, 0, 0, 0, 4, 0, 7 };
	const uint64_t offsets[] = { 0, RING_BYTES - 288 }; /* the second: header before the end of the ring, payload after it */
	int result = 0;

	for (size_t i = 0; i < sizeof(text); i++)
		text[i] = (char)('a' + i % 23);
	memcpy(open_payload + 16, "name{\"a\":1}", 11);

	for (size_t i = 0; !result && i < 2; i++) {
		uint64_t offset = offsets[i];
		prepare("open", offset);
		expect(CLAW_OPEN, at.producer.free_handles[at.producer.free_count - 1], 0, open_payload,
		       sizeof(open_payload));
		result = publish("open", offset, call_open);
		if (result)
			break;

		prepare("write", offset);
		expect(CLAW_TOKEN, at.streams[1].handle, 3, text, SHORT);
		at.expected[at.after - 1].header.flags = CLAW_URGENT;
		result = publish("write", offset, call_write);
		if (result)
			break;

		prepare("long write", offset);
		for (size_t from = 0; from < 5000; from += at.producer.record_max) {
			size_t piece = 5000 - from < at.producer.record_max ? 5000 - from : at.producer.record_max;
			expect(CLAW_TOKEN, at.streams[1].handle, from ? 0 : 1, text + from, piece);
		}
		result = publish("long write", offset, call_long_write);
		if (result)
			break;

		prepare("write_many", offset);
		for (int j = 0, from = 0; j < 3; from += (int)lens[j], j++)
			expect(CLAW_TOKEN, at.streams[j].handle, 2, text + from, lens[j]);
		result = publish("write_many", offset, call_write_many);
		if (result)
			break;

		prepare("close", offset);
		expect(CLAW_CLOSE, at.streams[1].handle, 0, "length", 6);
		result = publish("close", offset, call_close);
		if (result)
			break;

		/* No room: whatever it does, nothing may become visible and nothing unread may change */
		prepare("full", offset);
		while (claw_write(&at.producer, at.streams[2], text, 900, 0, 1) > 0)
			expect(CLAW_TOKEN, at.streams[2].handle, 1, text, 900);
		at.before = at.after;
		at.memory.ctl->need_wake = 7;
		uint64_t signals;
		if (read(at.producer.event_fd, &signals, sizeof(signals)) < 0 || write(at.producer.event_fd, &(uint64_t){ 1 }, 8) < 0)
			return 1;
		result = publish("full", offset, call_long_write);
	}
	return result;
}
