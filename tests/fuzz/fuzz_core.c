/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clawd's side of the core between a hostile producer and hostile clients. The input is a program of operations below:
 * bytes into the ring, heads, turns, attaches, flow messages. Whatever it says, frames are well-formed, each reader's
 * sequence goes on without a hole, windows hold, and the spool's chains are whole.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "barrier.h"
#include "memory.h"
#include "turn.h"

#define CHECK(truth) ((truth) ? (void)0 : abort())

enum { RING_BYTES = 4096, SPOOL_BLOCKS = 8, CLIENTS = 2, IDS = 64 };

enum operation {
	RAW, /* any bytes, published */
	RECORD, /* a record whose header is in order */
	ODD_RECORD, /* but for one field */
	OPEN, /* an OPEN in order, of one of four names */
	HEAD, /* moved by anything */
	TURN,
	ATTACH,
	GRANT, /* acks all and gives credit */
	FLOW, /* any flow message */
	CANCEL,
	DETACH,
	BLOCK,
	RECONNECT,
	LEAVE,
	OPERATIONS,
};

struct reading {
	uint32_t client;
	uint64_t expected;
	uint8_t known, ended;
};

static struct memory memory;
static int spool_fd, event_fd;
static uint8_t *spool_view;
static struct {
	const uint8_t *at, *end;
	struct claw_core *core;
	uint64_t now_ns, head, seq;
	uint32_t clients[CLIENTS];
	uint64_t charged[CLIENTS], acked[CLIENTS];
	struct reading readings[IDS];
	uint32_t ids;
} it;

static uint64_t take(size_t bytes)
{
	uint64_t value = 0;
	size_t left = (size_t)(it.end - it.at);
	memcpy(&value, it.at, bytes < left ? bytes : left);
	it.at += bytes < left ? bytes : left;
	return value;
}

static void write_ring(uint64_t pos, const void *bytes, size_t len)
{
	memcpy(memory.ring + (pos & (RING_BYTES - 1)), bytes, len);
}

static void publish(uint64_t bytes)
{
	it.head += bytes;
	claw_store_release(&memory.data->head, it.head);
}

static void put_record(struct claw_record *record, const void *payload)
{
	static uint8_t filler[CLAW_RECORD_MAX];
	size_t len = record->len <= RING_BYTES / 4 ? record->len : RING_BYTES / 4;
	write_ring(it.head, record, sizeof(*record));
	write_ring(it.head + sizeof(*record), payload ? payload : filler, len);
	it.seq++;
	publish(claw_record_bytes((uint32_t)len));
}

static void put_any(int odd)
{
	uint8_t payload[64] = { 0 };
	struct claw_record record = { .ring_seq = it.seq, .written_ns = it.now_ns - 1000 + it.seq % 1000 };
	record.kind = (uint8_t)(1 + take(1) % 4);
	record.handle = (uint16_t)(take(1) % 8);
	record.flags = (uint8_t)(take(1) & 1);
	record.count = (uint32_t)(take(1) % 5);
	record.len = (uint32_t)(take(2) % 1025);
	if (odd) {
		uint64_t field = take(1);
		uint64_t value = take(8);
		if (field % 2) /* any byte of the header */
			memcpy((uint8_t *)&record + value % (sizeof(record) - 7), &value, 1 + field % 8);
		else
			record.len = (uint32_t)value;
	}
	if (record.len <= sizeof(payload) && record.kind != CLAW_TOKEN)
		for (uint32_t i = 0; i < record.len; i++)
			payload[i] = (uint8_t)('a' + take(1) % 32);
	put_record(&record, record.len <= sizeof(payload) && record.kind != CLAW_TOKEN ? payload : NULL);
}

static void put_open(void)
{
	uint8_t payload[sizeof(struct claw_open) + 1 + 300] = { 0 };
	struct claw_open open = { .name_len = 1, .meta_len = (uint16_t)(take(1)) };
	memcpy(payload, &open, sizeof(open));
	payload[sizeof(open)] = (uint8_t)('a' + take(1) % 4);
	uint16_t handle = (uint16_t)(take(1) % 8);
	put_record(&(struct claw_record){
		.kind = CLAW_OPEN,
		.handle = handle,
		.len = (uint32_t)(sizeof(open) + 1 + open.meta_len),
		.ring_seq = it.seq,
		.written_ns = it.now_ns - 1000 + it.seq % 1000, /* each its own */
	}, payload);
}

/* What was sent as this token is what the spool has under its number */
static void check_token(const struct claw_spooled *token, uint32_t attachment, uint64_t token_seq, uint32_t client)
{
	const struct claw_streams *streams = &it.core->streams;
	uint32_t at = claw_attachment_find(&it.core->outbox, it.clients[client], attachment);
	CHECK(at != CLAW_NONE);
	uint32_t block = claw_stream_seek(streams, it.core->outbox.attachments[at].stream, token_seq);
	CHECK(block != CLAW_NONE);
	uint64_t seq = streams->spool->slots[block].first_seq;
	struct claw_spooled record;
	for (uint32_t offset = 0;; offset += claw_spooled_bytes(record.len)) {
		CHECK(offset < streams->spool->slots[block].used && seq <= token_seq);
		memcpy(&record, claw_spool_records(streams->spool, block) + offset, sizeof(record));
		if (record.kind == CLAW_TOKEN && seq == token_seq)
			break;
		seq += record.kind == CLAW_TOKEN ? 1 : record.kind == CLAW_GAP ? record.count : 0;
	}
	CHECK(record.written_ns == token->written_ns && record.len == token->len && record.count == token->count);
}

static void check_part(const uint8_t *frame, const struct claw_part *part, uint32_t client)
{
	struct reading *reading = &it.readings[part->attachment % IDS];
	CHECK(part->attachment && part->attachment <= it.ids && reading->client == client && reading->known);
	uint64_t seq = part->first_seq;
	for (uint32_t at = part->offset; at < part->offset + part->len;) {
		struct claw_spooled record;
		memcpy(&record, frame + at, sizeof(record));
		CHECK(!reading->ended);
		if (record.kind == CLAW_TOKEN || record.kind == CLAW_GAP)
			CHECK(seq == reading->expected);
		if (record.kind == CLAW_TOKEN)
			check_token(&record, part->attachment, seq, client);
		seq += record.kind == CLAW_TOKEN ? 1 : record.kind == CLAW_GAP ? record.count : 0;
		if (record.kind == CLAW_TOKEN || record.kind == CLAW_GAP)
			reading->expected = seq;
		reading->ended |= record.kind == CLAW_CLOSE;
		at += claw_spooled_bytes(record.len);
	}
	CHECK(seq == part->end_seq);
}

static void check_frame(const uint8_t *frame, uint32_t len, uint32_t client)
{
	static struct claw_part parts[CLAW_FRAME_MAX / sizeof(struct claw_segment)];
	uint32_t connection;
	int count = claw_frame_split(frame, len, parts, sizeof(parts) / sizeof(*parts), &connection);
	CHECK(count > 0 && connection == it.clients[client]);
	for (int i = 0; i < count; i++)
		check_part(frame, &parts[i], client);
}

/*
 * Every block that a stream has holds whole records; all others say that they are free; a live stream is known to the ring
 * by its handle.
 */
static void check_spool(void)
{
	const struct claw_spool *spool = &it.core->spool;
	const struct claw_ring *ring = &it.core->rings[0];
	uint8_t taken[SPOOL_BLOCKS] = { 0 };
	uint32_t used = 0, live = 0;
	for (uint32_t i = 0; i < it.core->streams.used; i++) {
		const struct claw_stream *stream = &it.core->streams.table[i];
		if (stream->state == CLAW_STREAM_FREE)
			continue;
		if (stream->state == CLAW_STREAM_LIVE) {
			CHECK(ring->handles && ring->handles[stream->handle] == i);
			live++;
		}
		uint32_t blocks = 0;
		for (uint32_t block = stream->first_block; block != CLAW_NONE; block = spool->slots[block].next) {
			const struct claw_slot *slot = &spool->slots[block];
			uint64_t seq = slot->first_seq;
			uint32_t offset = 0;
			CHECK(block < spool->block_count && slot->stream == i && !taken[block]++);
			blocks++;
			CHECK(slot->used <= CLAW_BLOCK_ROOM && claw_spool_block(spool, block)->committed ==
			      claw_block_committed(slot->used, slot->next_seq - slot->first_seq));
			while (offset < slot->used) {
				struct claw_spooled record;
				CHECK(slot->used - offset >= sizeof(record));
				memcpy(&record, claw_spool_records(spool, block) + offset, sizeof(record));
				CHECK(record.len <= RING_BYTES / 4);
				offset += claw_spooled_bytes(record.len);
				seq += record.kind == CLAW_TOKEN ? 1 : record.kind == CLAW_GAP ? record.count : 0;
			}
			CHECK(offset == slot->used && seq == slot->next_seq && seq <= stream->next_seq);
		}
		CHECK(blocks == stream->block_count);
		used += blocks;
	}
	CHECK(used + spool->free_count == spool->block_count && live == ring->live);
	for (uint32_t block = 0; block < spool->block_count; block++)
		CHECK(taken[block] || !claw_spool_block(spool, block)->committed);
}

static void turn(void)
{
	it.now_ns += 1 + take(1) * 10000000;
	claw_turn(it.core, it.now_ns);
	const struct claw_outcome *outcome = claw_outcome(it.core);
	for (uint32_t i = 0; i < outcome->frame_count; i++) {
		const struct claw_frame *frame = &claw_frames(it.core)[i];
		uint32_t client = 0;
		while (client < CLIENTS && it.clients[client] != frame->connection)
			client++;
		CHECK(client < CLIENTS);
		check_frame(claw_out(it.core) + frame->offset, frame->len, client);
		claw_sent(it.core, claw_out(it.core) + frame->offset, frame->len, it.now_ns);
		it.charged[client] += frame->len + CLAW_FRAME_CHARGE;
		CHECK(it.charged[client] - it.acked[client] <= CLAW_WINDOW);
	}
	struct claw_unmet unmet[4];
	claw_unmet(it.core, it.now_ns, unmet, 4);
	check_spool();
}

static void attach(void)
{
	uint8_t name = (uint8_t)('a' + take(1) % 4);
	uint64_t flags = take(1);
	uint32_t client = flags & 1;
	if (it.ids + 1 == IDS)
		return;
	struct claw_attach request = { .name = &name, .name_len = 1, .id = it.ids + 1 };
	request.credit = take(2);
	request.after = (int64_t)(flags & 2 ? take(1) % 16 : 0) - 1;
	request.deadline_ns = flags & 8 ? it.now_ns + 1000000 * take(1) : 0;
	request.cancel = flags & 4 ? 1 : 0;
	request.observes = flags & 16 ? 1 : 0;
	request.grace_ms = flags & 32 ? (uint32_t)take(1) : 0;
	it.readings[++it.ids] = (struct reading){ .client = client, .expected = (uint64_t)(request.after + 1), .known = 1 };
	if (claw_attach_stream(it.core, it.clients[client], &request, it.now_ns) < 0)
		it.readings[it.ids].known = 0;
}

static void flow(uint32_t client, int any)
{
	uint8_t message[16 + 16 * 8] = { 0 };
	size_t len = sizeof(message);
	struct claw_flow *header = (struct claw_flow *)message;
	uint64_t acked = it.charged[client];
	if (any) {
		len = take(1) % sizeof(message);
		for (size_t i = 0; i < len; i++)
			message[i] = (uint8_t)take(1);
		acked = header->acked;
	}
	if (!any || len & 3) { /* its head in order */
		header->kind = CLAW_FRAME_FLOW;
		header->version = CLAW_FRAME_VERSION;
		header->connection = it.clients[client];
	}
	if (!any || len & 1) { /* and its length */
		header->credits = 8;
		len = sizeof(message);
	}
	if (!any) {
		header->acked = acked;
		for (uint32_t i = 0; i < 8; i++)
			memcpy(message + 16 + 16 * i,
			       &(struct claw_credit){ .attachment = it.ids - i, .limit = take(2) * 8 }, 16);
	}
	uint8_t *exact = malloc(len + !len); /* ASan watches its end */
	CHECK(exact);
	memcpy(exact, message, len);
	int result = claw_flow(it.core, it.clients[client], exact, len);
	free(exact);
	CHECK(result == 0 || result == -EBADMSG);
	CHECK(result || acked <= it.charged[client] || header->connection != it.clients[client]);
	if (!result && header->connection == it.clients[client] && acked > it.acked[client])
		it.acked[client] = acked;
}

static void reconnect(uint32_t client)
{
	CHECK(claw_disconnect(it.core, it.clients[client], it.now_ns) == 0);
	it.clients[client] = claw_connect(it.core);
	CHECK(it.clients[client]);
	it.charged[client] = it.acked[client] = 0;
	for (uint32_t i = 0; i < IDS; i++)
		if (it.readings[i].client == client)
			it.readings[i].known = 0;
}

static void perform(uint64_t operation)
{
	uint8_t bytes[256];
	uint32_t id;
	size_t len;
	switch (operation) {
	case RAW:
		len = take(1);
		for (size_t i = 0; i < len; i++)
			bytes[i] = (uint8_t)take(1);
		write_ring(it.head, bytes, len);
		publish((len + 31) & ~(size_t)31);
		break;
	case RECORD:
	case ODD_RECORD:
		put_any(operation == ODD_RECORD);
		break;
	case OPEN:
		put_open();
		break;
	case HEAD:
		publish(take(1) & 1 ? take(8) : take(1) * 32);
		break;
	case ATTACH:
		attach();
		break;
	case GRANT:
	case FLOW:
		flow(take(1) & 1, operation == FLOW);
		break;
	case CANCEL:
	case DETACH:
		id = 1 + (uint32_t)take(1) % IDS;
		if (operation == CANCEL) {
			claw_cancel(it.core, it.clients[it.readings[id % IDS].client], id, it.now_ns);
		} else if (claw_detach(it.core, it.clients[it.readings[id % IDS].client], id, it.now_ns)) {
			it.readings[id % IDS].known = 0;
		}
		break;
	case BLOCK:
		id = (uint32_t)take(1);
		claw_block(it.core, it.clients[id & 1], id & 2);
		break;
	case RECONNECT:
		reconnect(take(1) & 1);
		break;
	case LEAVE:
		claw_ring_leave(it.core, 0);
		break;
	default:
		turn();
	}
}

/* A word of the ring or its head, changed while clawd reads */
void fuzz_disturb(uint64_t random)
{
	static const uint32_t lens[] = { 0, 1, 31, 32, 1024, 1025, 0xffffffff };
	if (!memory.data)
		return;
	uint64_t *words = (uint64_t *)memory.ring;
	uint64_t at = random % (RING_BYTES / 32) * 4;
	switch (random >> 32 & 15) {
	case 0: /* rarely, or every ring is quarantined at once */
		if ((random >> 36 & 1023) == 0)
			claw_store_relaxed(&memory.data->head, random >> 50);
		break;
	case 1:
	case 2:
		claw_store_relaxed((uint32_t *)&words[at], lens[(random >> 40) % 7]);
		break;
	case 3:
		claw_store_relaxed(&words[at + 1], random >> 56);
		break;
	default: /* payload, or a header of something else */
		claw_store_relaxed(&words[(random >> 8) % (RING_BYTES / 8)], random);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct claw_limits limits = {
		.spool_bytes = SPOOL_BLOCKS * CLAW_BLOCK_BYTES,
		.stream_bytes = 3 * CLAW_BLOCK_BYTES,
		.keep_ns = 100000000,
		.max_streams = 4,
		.max_rings = 1,
		.max_connections = CLIENTS,
		.max_attachments = 6,
	};
	int error;
	if (!memory.data) {
		struct memory made = memory_make(RING_BYTES);
		spool_fd = memory_file("spool", limits.spool_bytes);
		spool_view = must(mmap(NULL, limits.spool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, spool_fd, 0));
		event_fd = eventfd(0, EFD_CLOEXEC);
		memory = made;
	}
	memset(&it, 0, sizeof(it));
	it.at = data;
	it.end = data + size;
	it.now_ns = 1000000000;
	it.seq = 1;
	memory.data->head = 0;
	memset(memory.ctl, 0, sizeof(*memory.ctl));
	memset(spool_view, 0, limits.spool_bytes);
	it.core = claw_core_create(&limits, -1, &error);
	CHECK(it.core && claw_core_map_spool(it.core, spool_fd, limits.spool_bytes) == 0);
	CHECK(claw_ring_add(it.core, memory.data_fd, memory.ctl_fd, event_fd, RING_BYTES, 7, 9) == 0);
	for (uint32_t i = 0; i < CLIENTS; i++)
		it.clients[i] = claw_connect(it.core);
	while (it.at < it.end)
		perform(take(1) % (OPERATIONS + 3)); /* more turns than the rest */
	for (int i = 0; i < 4; i++)
		turn();
	claw_core_destroy(it.core);
	return 0;
}
