/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A start on memory that somebody changed. The input is a list of changes to the spool and the CTL object that a clawd with a
 * few streams left. Whatever comes of it: nothing breaks, frames are well-formed, each reader's numbers go on without a
 * hole, every block is a stream's or free, and what is written afterwards arrives.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "barrier.h"
#include "memory.h"
#include "turn.h"

#define CHECK(truth) ((truth) ? (void)0 : abort())

enum { RING_BYTES = 65536, SPOOL_BLOCKS = 16, STREAMS = 4 };

static const struct claw_limits limits = {
	.spool_bytes = SPOOL_BLOCKS * CLAW_BLOCK_BYTES,
	.stream_bytes = 4 * CLAW_BLOCK_BYTES,
	.keep_ns = 100000000,
	.max_streams = STREAMS,
	.max_rings = 1,
	.max_connections = 1,
	.max_attachments = STREAMS,
};
static struct memory memory;
static int spool_fd;
static uint8_t *spool, *spool_left;
static struct claw_ctl *ctl_left;
static uint64_t head, head_left, seq, seq_left;

static void put(uint8_t kind, uint16_t handle, uint32_t count, const void *payload, uint32_t len)
{
	struct claw_record record = { .len = len, .kind = kind, .handle = handle, .ring_seq = ++seq, .count = count };
	record.written_ns = 1000 + seq;
	memcpy(memory.ring + (head & (RING_BYTES - 1)), &record, sizeof(record));
	memcpy(memory.ring + (head & (RING_BYTES - 1)) + sizeof(record), payload, len);
	head += claw_record_bytes(len);
	claw_store_release(&memory.data->head, head);
}

static void put_open(uint16_t handle, char name)
{
	uint8_t payload[sizeof(struct claw_open) + 1 + 2] = { 0 };
	memcpy(payload, &(struct claw_open){ .name_len = 1, .meta_len = 2 }, sizeof(struct claw_open));
	memcpy(payload + sizeof(struct claw_open), (char[]){ name, '{', '}' }, 3);
	put(CLAW_OPEN, handle, 0, payload, sizeof(payload));
}

/* What the clawd before left: a live stream of several blocks, a short one, one that ended, one that was cancelled */
static void leave(void)
{
	static const char text[1200] = "text";
	int error, event_fd = eventfd(0, EFD_CLOEXEC);
	memory = memory_make(RING_BYTES);
	spool_fd = memory_file("spool", limits.spool_bytes);
	spool = must(mmap(NULL, limits.spool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, spool_fd, 0));
	struct claw_core *core = claw_core_create(&limits, -1, &error);
	CHECK(core && claw_core_map_spool(core, spool_fd, limits.spool_bytes) == 0);
	CHECK(claw_ring_add(core, memory.data_fd, memory.ctl_fd, event_fd, RING_BYTES, 7, 9) == 0);
	for (uint16_t i = 0; i < STREAMS; i++)
		put_open(i, (char)('a' + i));
	for (int i = 0; i < 9; i++) {
		put(CLAW_TOKEN, 0, 1, text, sizeof(text));
		put(CLAW_TOKEN, (uint16_t)(1 + i % 3), 1, text, 9);
	}
	put(CLAW_GAP, 1, 5, "overflow", 8);
	put(CLAW_CLOSE, 2, 0, "stop", 4);
	claw_turn(core, 5000);
	CHECK(claw_cancel_stream(core, (const uint8_t *)"d", 1, 5000) == 0);
	CHECK(memory.ctl->ack_pos == head);
	claw_core_destroy(core);
	close(event_fd);
	spool_left = must(malloc(limits.spool_bytes));
	ctl_left = must(malloc(sizeof(*ctl_left)));
	memcpy(spool_left, spool, limits.spool_bytes);
	memcpy(ctl_left, memory.ctl, sizeof(*ctl_left));
	head_left = head;
	seq_left = seq;
}

static uint64_t take(const uint8_t **at, const uint8_t *end, size_t bytes)
{
	uint64_t value = 0;
	size_t left = (size_t)(end - *at);
	memcpy(&value, *at, bytes < left ? bytes : left);
	*at += bytes < left ? bytes : left;
	return value;
}

/* One change: a byte or a word, anywhere, in a header or in a record's; a block on another's place; or in CTL */
static void change(const uint8_t **at, const uint8_t *end)
{
	uint64_t kind = take(at, end, 1), block = take(at, end, 1) % SPOOL_BLOCKS;
	uint8_t *to = spool + block * CLAW_BLOCK_BYTES;
	size_t width = (size_t)1 << (kind >> 3 & 3);
	uint64_t offset, value;
	switch (kind & 7) {
	case 0:
		offset = take(at, end, 2) % (CLAW_BLOCK_BYTES - 8);
		break;
	case 1:
	case 2:
		offset = take(at, end, 1) % 136;
		break;
	case 3:
		offset = CLAW_BLOCK_HEADER + take(at, end, 1) % 64;
		break;
	case 4:
		memcpy(to, spool + take(at, end, 1) % SPOOL_BLOCKS * CLAW_BLOCK_BYTES, CLAW_BLOCK_BYTES);
		return;
	case 5: /* an end of what is committed there, moved */
		value = take(at, end, 1);
		memcpy(to, &(uint64_t){ ((struct claw_block *)to)->committed + 8 * value - 1024 }, 8);
		return;
	case 6: /* a clawd killed before it gave all back */
		memory.ctl->ack_pos = take(at, end, 2) * 32 % (head_left + 32);
		return;
	default:
		offset = take(at, end, 2) % 512;
		to = (uint8_t *)memory.ctl;
	}
	value = take(at, end, width);
	memcpy(to + offset, &value, width);
}

static void check_frames(const struct claw_core *core, uint64_t *expected)
{
	static struct claw_part parts[CLAW_FRAME_MAX / sizeof(struct claw_segment)];
	const struct claw_outcome *outcome = claw_outcome(core);
	for (uint32_t f = 0; f < outcome->frame_count; f++) {
		const struct claw_frame *frame = &claw_frames(core)[f];
		uint32_t connection;
		int count = claw_frame_split(claw_out(core) + frame->offset, frame->len, parts,
					     sizeof(parts) / sizeof(*parts), &connection);
		CHECK(count > 0);
		for (int i = 0; i < count; i++) {
			uint64_t *due = &expected[parts[i].attachment];
			CHECK(parts[i].first_seq == *due || parts[i].first_seq == parts[i].end_seq);
			*due += parts[i].end_seq - parts[i].first_seq;
		}
	}
}

static void check_spool(const struct claw_core *core)
{
	uint8_t taken[SPOOL_BLOCKS] = { 0 };
	uint32_t used = 0, live = 0;
	for (uint32_t i = 0; i < core->streams.used; i++) {
		const struct claw_stream *stream = &core->streams.table[i];
		if (stream->state == CLAW_STREAM_FREE)
			continue;
		live += stream->state == CLAW_STREAM_LIVE;
		uint32_t blocks = 0;
		for (uint32_t at = stream->first_block; at != CLAW_NONE; at = core->spool.slots[at].next, blocks++)
			CHECK(at < SPOOL_BLOCKS && core->spool.slots[at].stream == i && !taken[at]++);
		CHECK(blocks == stream->block_count);
		used += blocks;
	}
	CHECK(used + core->spool.free_count == SPOOL_BLOCKS);
	for (uint32_t at = 0; at < SPOOL_BLOCKS; at++)
		CHECK(taken[at] || !claw_spool_block(&core->spool, at)->committed);
	CHECK(core->streams.count[CLAW_STREAM_LIVE] == live);
}

void fuzz_disturb(uint64_t random)
{
	(void)random;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const uint8_t *at = data, *end = data + size;
	struct claw_recovered found;
	uint64_t expected[STREAMS + 1] = { 0 }, charged = 0;
	int error;
	if (!spool)
		leave();
	memcpy(spool, spool_left, limits.spool_bytes);
	memcpy(memory.ctl, ctl_left, sizeof(*ctl_left));
	head = head_left;
	seq = seq_left;
	claw_store_release(&memory.data->head, head);
	while (at < end)
		change(&at, end);
	struct claw_core *core = claw_core_create(&limits, -1, &error);
	CHECK(core && claw_core_map_spool(core, spool_fd, limits.spool_bytes) == 0);
	CHECK(claw_core_recover(core, 6000, &found) == 0);
	check_spool(core);
	int ring = claw_ring_adopt(core, memory.data_fd, memory.ctl_fd, RING_BYTES, 7, 10, 6000);
	CHECK(ring == 0 || ring == -EBADMSG);
	claw_orphans_end(core, 0, "producer_lost", 6000);
	check_spool(core);
	uint32_t client = claw_connect(core);
	for (uint32_t i = 0; i < STREAMS; i++) {
		uint8_t name = (uint8_t)('a' + i);
		struct claw_attach attach = { .name = &name, .name_len = 1, .id = i + 1, .after = -1, .credit = 1 << 30 };
		claw_attach_stream(core, client, &attach, 6000);
	}
	if (ring == 0) {
		put(CLAW_TOKEN, 0, 1, "more", 4);
		put(CLAW_CLOSE, 1, 0, "stop", 4);
		put_open(5, 'e');
		put(CLAW_TOKEN, 5, 1, "new", 3);
	}
	for (int i = 0; i < 12; i++) {
		claw_turn(core, 7000);
		check_frames(core, expected);
		for (uint32_t f = 0; f < claw_outcome(core)->frame_count; f++) {
			const struct claw_frame *frame = &claw_frames(core)[f];
			claw_sent(core, claw_out(core) + frame->offset, frame->len, 7000);
			charged += frame->len + CLAW_FRAME_CHARGE;
		}
		struct claw_flow flow = { .kind = CLAW_FRAME_FLOW, .version = CLAW_FRAME_VERSION, .connection = client };
		flow.acked = charged;
		CHECK(claw_flow(core, client, (const uint8_t *)&flow, sizeof(flow)) == 0);
		check_spool(core);
	}
	claw_turn(core, 7000 + 2 * limits.keep_ns);
	claw_ring_leave(core, 0);
	claw_turn(core, 7000 + 3 * limits.keep_ns);
	check_spool(core);
	claw_core_destroy(core);
	return 0;
}
