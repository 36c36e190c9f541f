/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clawd killed after every instruction of taking records into the spool. What is committed there is whole records of the
 * right stream; what was given back to the producer is committed; an open stream's blocks follow on each other. And at
 * each of these moments the next clawd comes to the same as one that was never killed.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "barrier.h"
#include "memory.h"
#include "step.h"
#include "turn.h"
#include "restart.h"

enum { RING_BYTES = 32768, SPOOL_BLOCKS = 12, STREAM_BLOCKS = 3, WRITTEN_MAX = 64 };

struct written {
	uint64_t end; /* position after it */
	uint64_t seq;
	uint64_t stream; /* ring_seq of its OPEN */
	uint32_t count, len;
	uint8_t kind;
	uint8_t spooled[CLAW_RECORD_MAX]; /* as in the spool: without what OPEN is made of */
};

static struct {
	struct memory memory;
	struct claw_core *core;
	struct claw_ring *ring;
	uint8_t *spool;
	uint64_t head, seq;
	uint64_t open_seq[4]; /* by handle */
	char name[4];
	struct written written[WRITTEN_MAX];
	int count;
	struct claw_limits limits;
	struct expected expected[WRITTEN_MAX];
	int streams;
	int taken_before; /* records of earlier turns: they may be evicted */
	const char *what;
	long partly, done;
} at;

static void put(uint8_t kind, uint32_t handle, uint32_t count, const void *payload, uint32_t len, uint32_t skip)
{
	struct claw_record record = {
		.len = len,
		.kind = kind,
		.handle = (uint16_t)handle,
		.ring_seq = ++at.seq,
		.written_ns = 1000 + at.seq,
		.count = count,
	};
	uint8_t *to = at.memory.ring + (at.head & (RING_BYTES - 1));
	memcpy(to, &record, sizeof(record));
	memcpy(to + sizeof(record), payload, len);
	at.head += claw_record_bytes(len);
	if (kind == CLAW_OPEN)
		at.open_seq[handle] = at.seq;
	struct written *written = &at.written[at.count++];
	*written = (struct written){
		.end = at.head,
		.seq = at.seq,
		.stream = at.open_seq[handle],
		.count = count,
		.len = len - skip,
		.kind = kind,
	};
	memcpy(written->spooled, (const uint8_t *)payload + skip, len - skip);
}

static void put_open(uint32_t handle, char name)
{
	uint8_t payload[sizeof(struct claw_open) + 1 + 8] = { 0 };
	memcpy(payload, &(struct claw_open){ .name_len = 1, .meta_len = 8 }, sizeof(struct claw_open));
	payload[sizeof(struct claw_open)] = (uint8_t)name;
	memcpy(payload + sizeof(struct claw_open) + 1, "{\"m\": 1}", 8);
	put(CLAW_OPEN, handle, 0, payload, sizeof(payload), sizeof(struct claw_open) + 1);
	at.name[handle] = name;
}

static void put_token(uint32_t handle, uint32_t len)
{
	static uint8_t text[CLAW_RECORD_MAX];
	for (uint32_t i = 0; i < len; i++)
		text[i] = (uint8_t)('a' + (i + at.seq) % 23);
	put(CLAW_TOKEN, handle, 1, text, len, 0);
}

static int bad(const char *what, uint32_t block, uint64_t seq)
{
	fprintf(stderr, "%s: TORN: %s (block %u, record %lu)\n", at.what, what, block, (unsigned long)seq);
	return -1;
}

static const struct written *find(uint64_t seq)
{
	for (int i = 0; i < at.count; i++)
		if (at.written[i].seq == seq)
			return &at.written[i];
	return NULL;
}

/* A CLOSE is told from its place: it has no ring_seq of its own */
static const struct written *find_close(uint64_t stream)
{
	for (int i = 0; i < at.count; i++)
		if (at.written[i].kind == CLAW_CLOSE && at.written[i].stream == stream)
			return &at.written[i];
	return NULL;
}

static int look_at_block(uint32_t index, uint8_t *found)
{
	const uint8_t *bytes = at.spool + index * CLAW_BLOCK_BYTES;
	struct claw_block block;
	memcpy(&block, bytes, sizeof(block));
	if (!block.committed)
		return 0;
	uint64_t committed = claw_block_bytes(block.committed), seqs = block.committed >> CLAW_BLOCK_SEQ_SHIFT;
	if (committed > CLAW_BLOCK_ROOM || block.magic != CLAW_MAGIC || block.layout != CLAW_LAYOUT ||
	    block.name_len != 1 || block.ring_id != 7)
		return bad("the block's header is not whole", index, 0);
	const struct written *open = find(block.open_seq);
	if (!open || open->kind != CLAW_OPEN)
		return bad("the block belongs to no stream", index, block.open_seq);
	uint64_t offset = 0;
	while (offset < committed) {
		struct claw_spooled record;
		if (committed - offset < sizeof(record))
			return bad("half a record is committed", index, 0);
		memcpy(&record, bytes + CLAW_BLOCK_HEADER + offset, sizeof(record));
		const struct written *written = record.kind == CLAW_CLOSE ? find_close(block.open_seq) :
									     find(record.ring_seq);
		if (!written || written->kind != record.kind || written->stream != block.open_seq ||
		    written->len != record.len || written->count != record.count || record.klass > CLAW_NORMAL)
			return bad("a record's header is not what was written", index, record.ring_seq);
		offset += claw_spooled_bytes(record.len);
		if (offset > committed)
			return bad("a record's payload is not committed", index, record.ring_seq);
		if (memcmp(bytes + CLAW_BLOCK_HEADER + offset - claw_spooled_bytes(record.len) + sizeof(record),
			   written->spooled, record.len))
			return bad("a record's payload is not what was written", index, record.ring_seq);
		found[written - at.written]++;
		seqs -= record.kind == CLAW_TOKEN ? 1 : record.kind == CLAW_GAP ? record.count : 0;
	}
	if (seqs)
		return bad("sequence numbers are committed that no record has", index, 0);
	return 0;
}

static int look(void *argument)
{
	uint8_t found[WRITTEN_MAX] = { 0 };
	uint64_t ack = claw_load_acquire(&at.memory.ctl->ack_pos);
	int known = ack == at.written[at.taken_before - 1].end;
	int all = 1;
	(void)argument;

	for (uint32_t i = 0; i < SPOOL_BLOCKS; i++)
		if (look_at_block(i, found))
			return -1;
	for (int i = 0; i < at.count; i++) {
		known |= at.written[i].end == ack;
		if (found[i] > 1)
			return bad("a record is there twice", CLAW_NONE, at.written[i].seq);
		if (i < at.taken_before)
			continue;
		if (at.written[i].end <= ack && !found[i])
			return bad("given back to the producer and not committed", CLAW_NONE, at.written[i].seq);
		/* in the ring's order, so that what is missing is a tail */
		if (found[i] && !all)
			return bad("committed before an earlier one", CLAW_NONE, at.written[i].seq);
		all &= found[i];
	}
	if (!known)
		return bad("ack_pos is inside a record", CLAW_NONE, ack);
	const char *complaint = restart(at.spool, SPOOL_BLOCKS * CLAW_BLOCK_BYTES, &at.memory, &at.limits, at.expected, at.streams);
	if (complaint) {
		fprintf(stderr, "%s: the next one goes wrong: %s (record %ld partly, %ld done)\n", at.what, complaint,
			at.partly, at.done);
		return -1;
	}
	if (all)
		at.done++;
	else
		at.partly++;
	return 0;
}

static void take(void *argument)
{
	(void)argument;
	if (claw_intake(at.core, at.ring, 5000) != 0)
		_exit(1);
}

/* What the producer wrote comes to, however often clawd is killed */
static void expect(void)
{
	at.streams = 0;
	for (int i = 0; i < at.count; i++) {
		const struct written *written = &at.written[i];
		if (written->kind == CLAW_OPEN) {
			at.expected[at.streams++] = (struct expected){ .open_seq = written->seq };
			continue;
		}
		struct expected *stream = at.expected;
		while (stream->open_seq != written->stream)
			stream++;
		stream->next_seq += written->kind == CLAW_TOKEN ? 1 : written->kind == CLAW_GAP ? written->count : 0;
		stream->ended |= written->kind == CLAW_CLOSE;
	}
}

static void publish(void)
{
	at.memory.data->head = at.head;
}

/* A core with one ring, whose streams "a" (handle 0) and "b" (handle 1) are open, with a token each */
static void prepare(const char *what)
{
	struct claw_limits limits = {
		.spool_bytes = SPOOL_BLOCKS * CLAW_BLOCK_BYTES,
		.stream_bytes = STREAM_BLOCKS * CLAW_BLOCK_BYTES,
		.keep_ns = 1000000000,
		.max_streams = 8,
		.max_rings = 1,
		.max_connections = 1,
		.max_attachments = 1,
	};
	int error = 0;
	int spool_fd = memory_file("spool", limits.spool_bytes);
	int event_fd = eventfd(0, EFD_CLOEXEC);

	memset(&at, 0, sizeof(at));
	at.what = what;
	at.limits = limits;
	at.memory = memory_make(RING_BYTES);
	at.spool = must(mmap(NULL, limits.spool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, spool_fd, 0));
	memset(at.memory.ring, 0xa5, RING_BYTES);
	for (uint32_t i = 0; i < SPOOL_BLOCKS; i++) /* all but the words that say that the blocks are free */
		memset(at.spool + i * CLAW_BLOCK_BYTES + 8, 0xa5, CLAW_BLOCK_BYTES - 8);
	at.core = must(claw_core_create(&limits, -1, &error));
	if (claw_core_map_spool(at.core, spool_fd, limits.spool_bytes) ||
	    claw_ring_add(at.core, at.memory.data_fd, at.memory.ctl_fd, event_fd, RING_BYTES, 7, 9) != 0)
		exit(1);
	at.ring = &at.core->rings[0];
	put_open(0, 'a');
	put_open(1, 'b');
	put_token(0, 5);
	put_token(1, 9);
}

static int commit(const char *what, int records)
{
	publish();
	at.taken_before = at.count - records;
	expect();
	long points = step_and_kill(take, NULL, look);
	if (points < 0)
		return points == -UNAVAILABLE ? UNAVAILABLE : 1;
	if (!at.partly || !at.done || at.memory.ctl->ack_pos != at.head) {
		fprintf(stderr, "%s: was not stepped through\n", what);
		return 1;
	}
	printf("%s: %ld partly, %ld whole, 0 torn\ncounted: %ld kill points\n", what, at.partly, at.done, points);
	return 0;
}

static void begin(const char *what)
{
	prepare(what);
	publish();
	take(NULL);
}

int main(void)
{
	begin("a token");
	put_token(0, 40);
	int result = commit("a token", 1);
	if (result)
		return result;

	begin("open, gap, close");
	put_open(2, 'c');
	put_token(2, 1);
	put(CLAW_GAP, 0, 3, "overflow", 8, 0);
	put(CLAW_CLOSE, 1, 0, "stop", 4, 0);
	result = commit("open, gap, close", 4);
	if (result)
		return result;

	begin("new blocks");
	for (int i = 0; i < 6; i++)
		put_token(i % 2, i < 2 ? CLAW_RECORD_MAX : 700);
	result = commit("new blocks", 6);
	if (result)
		return result;

	/* a third block's successor takes the place of the second: the stream has three at most */
	begin("a block used again");
	put_token(0, 3500);
	put_token(0, 3500);
	publish();
	take(NULL);
	put_token(0, 3500);
	result = commit("a block used again", 1);
	if (result)
		return result;

	/* the same handle, closed and opened again, within one turn */
	begin("a handle used again");
	put(CLAW_CLOSE, 0, 0, "length", 6, 0);
	put_open(0, 'd');
	put_token(0, 100);
	put_token(1, 3);
	return commit("a handle used again", 4);
}
