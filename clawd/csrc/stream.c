/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "barrier.h"
#include "reserve.h"

enum {
	TRIM_BLOCKS = 64, /* let go of at once by a stream that holds more than it may since a limit was lowered */
};

int claw_streams_init(struct claw_streams *ret_streams, struct claw_spool *spool, uint32_t max, uint64_t keep_ns,
		      uint64_t stream_bytes)
{
	if (!max || max > 1u << 24 || stream_bytes < 2 * CLAW_BLOCK_BYTES)
		return -EINVAL;
	uint32_t buckets = 1;
	while (buckets < 2 * max)
		buckets *= 2;
	struct claw_streams streams = {
		.spool = spool,
		.hash_mask = buckets - 1,
		.max = max,
		.free_head = CLAW_NONE,
		.ended = { CLAW_NONE, CLAW_NONE },
		.gone = { CLAW_NONE, CLAW_NONE },
		.dirty = { CLAW_NONE, CLAW_NONE },
		.unshown = CLAW_NONE,
		.keep_ns = keep_ns,
		.stream_blocks = (uint32_t)(stream_bytes / CLAW_BLOCK_BYTES),
	};
	uint64_t seed[4];
	if (getrandom(seed, sizeof(seed), 0) != sizeof(seed))
		return -EIO;
	memcpy(streams.hash_key, seed, sizeof(streams.hash_key));
	streams.ids = seed[2];
	streams.random = seed[3] | 1;
	streams.table = claw_reserve((uint64_t)max * sizeof(struct claw_stream));
	streams.hash = claw_reserve((uint64_t)buckets * sizeof(uint32_t));
	if (claw_grace_init(&streams.grace, max) < 0 || !streams.table || !streams.hash) {
		*ret_streams = streams;
		claw_streams_deinit(ret_streams);
		return -ENOMEM;
	}
	*ret_streams = streams;
	return 0;
}

void claw_streams_deinit(struct claw_streams *streams)
{
	if (streams->table)
		munmap(streams->table, (uint64_t)streams->max * sizeof(struct claw_stream));
	if (streams->hash)
		munmap(streams->hash, ((uint64_t)streams->hash_mask + 1) * sizeof(uint32_t));
	claw_grace_deinit(&streams->grace, streams->max);
	streams->table = NULL;
	streams->hash = NULL;
}

int claw_streams_limit(struct claw_streams *streams, uint64_t keep_ns, uint64_t stream_bytes)
{
	if (stream_bytes < 2 * CLAW_BLOCK_BYTES || stream_bytes / CLAW_BLOCK_BYTES > UINT32_MAX)
		return -EINVAL;
	/* All by the same: both lists stay in the order of their deadlines */
	uint64_t change_ns = keep_ns - streams->keep_ns;
	for (uint32_t at = streams->ended.head; at != CLAW_NONE; at = streams->table[at].younger)
		streams->table[at].deadline_ns += change_ns;
	for (uint32_t at = streams->gone.head; at != CLAW_NONE; at = streams->table[at].younger)
		streams->table[at].deadline_ns += change_ns;
	streams->keep_ns = keep_ns;
	streams->stream_blocks = (uint32_t)(stream_bytes / CLAW_BLOCK_BYTES);
	return 0;
}

/* The hash table holds index + 1, so that zeroed memory is an empty table. */
static uint32_t *bucket_of(const struct claw_streams *streams, const uint8_t *name, uint32_t name_len)
{
	return &streams->hash[claw_hash(streams->hash_key, name, name_len) & streams->hash_mask];
}

uint32_t claw_stream_find(const struct claw_streams *streams, const uint8_t *name, uint32_t name_len)
{
	for (uint32_t link = *bucket_of(streams, name, name_len); link; link = streams->table[link - 1].next_in_hash) {
		const struct claw_stream_row *row = &streams->table[link - 1].row;
		if (row->name_len == name_len && !memcmp(row->name, name, name_len))
			return link - 1;
	}
	return CLAW_NONE;
}

static void set_state(struct claw_streams *streams, struct claw_stream *stream, uint32_t state)
{
	streams->count[stream->state]--;
	streams->count[state]++;
	stream->state = stream->row.state = state;
	claw_stream_touch(streams, (uint32_t)(stream - streams->table), CLAW_UNSHOWN_WHOLE);
}

static void list_add(struct claw_streams *streams, struct claw_list *list, uint32_t index)
{
	streams->table[index].older = list->tail;
	streams->table[index].younger = CLAW_NONE;
	if (list->tail == CLAW_NONE)
		list->head = index;
	else
		streams->table[list->tail].younger = index;
	list->tail = index;
}

static void list_remove(struct claw_streams *streams, struct claw_list *list, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	if (stream->older == CLAW_NONE)
		list->head = stream->younger;
	else
		streams->table[stream->older].younger = stream->younger;
	if (stream->younger == CLAW_NONE)
		list->tail = stream->older;
	else
		streams->table[stream->younger].older = stream->older;
}

/* Before the block with the highest sequence goes, or when a token is dropped: a start after a crash must not give these
 * numbers to other tokens. */
static void remember_seq(struct claw_streams *streams, const struct claw_stream *stream)
{
	if (stream->first_block == CLAW_NONE)
		return;
	struct claw_block *header = claw_spool_block(streams->spool, stream->first_block);
	header->tokens = stream->row.tokens;
	header->text_bytes = stream->row.text_bytes;
	/* In this order: cut in between, a record that was dropped comes again and takes a number of its own, and the one
	 * it had is told as missing. The other way it would be lost without a word. */
	claw_store_release(&header->next_seq, stream->next_seq);
	claw_store_release(&header->ring_seq, stream->ring_seq);
}

void claw_stream_free_block(struct claw_streams *streams, uint32_t index, uint32_t block)
{
	struct claw_stream *stream = &streams->table[index];
	struct claw_slot *slots = streams->spool->slots;
	if (slots[block].prev == CLAW_NONE)
		stream->first_block = slots[block].next;
	else
		slots[slots[block].prev].next = slots[block].next;
	if (slots[block].next == CLAW_NONE) {
		stream->last_block = slots[block].prev;
		remember_seq(streams, stream);
		stream->shut = 1; /* a record there would seem to follow on what it holds */
	} else {
		slots[slots[block].next].prev = slots[block].prev;
	}
	stream->block_count--;
	stream->row.spool_bytes -= CLAW_BLOCK_BYTES;
	claw_spool_free(streams->spool, block);
}

/* ENDED → GONE: the blocks go, the name stays for another while. */
static void forget(struct claw_streams *streams, uint32_t index, uint64_t now_ns)
{
	struct claw_stream *stream = &streams->table[index];
	list_remove(streams, &streams->ended, index);
	/* The first one first: to a start after a crash the others are nothing without it */
	while (stream->block_count)
		claw_stream_free_block(streams, index, stream->first_block);
	stream->flush_seq = stream->next_seq;
	set_state(streams, stream, CLAW_STREAM_GONE);
	stream->deadline_ns = now_ns + streams->keep_ns;
	list_add(streams, &streams->gone, index);
}

void claw_stream_release(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	if (stream->attachment_count || stream->grace_at ||
	    (stream->state != CLAW_STREAM_AWAITED && stream->state != CLAW_STREAM_GONE))
		return;
	if (stream->state == CLAW_STREAM_GONE)
		list_remove(streams, &streams->gone, index);
	uint32_t *link = bucket_of(streams, stream->row.name, stream->row.name_len);
	while (*link != index + 1)
		link = &streams->table[*link - 1].next_in_hash;
	*link = stream->next_in_hash;
	set_state(streams, stream, CLAW_STREAM_FREE);
	stream->next_in_hash = streams->free_head;
	streams->free_head = index;
}

static uint32_t oldest_unread(const struct claw_streams *streams, uint32_t index)
{
	while (index != CLAW_NONE && streams->table[index].attachment_count)
		index = streams->table[index].younger;
	return index;
}

uint32_t claw_stream_await(struct claw_streams *streams, const uint8_t *name, uint32_t name_len)
{
	if (streams->free_head == CLAW_NONE && streams->used == streams->max) {
		uint32_t victim = oldest_unread(streams, streams->gone.head);
		if (victim == CLAW_NONE) {
			victim = oldest_unread(streams, streams->ended.head);
			if (victim == CLAW_NONE)
				return CLAW_NONE;
			forget(streams, victim, 0);
		}
		claw_stream_release(streams, victim);
	}
	uint32_t index = streams->free_head;
	if (index != CLAW_NONE)
		streams->free_head = streams->table[index].next_in_hash;
	else
		index = streams->used++;

	struct claw_stream *stream = &streams->table[index];
	uint32_t *bucket = bucket_of(streams, name, name_len);
	/* A slot can be used again while it is still in these lists */
	uint8_t dirty = stream->dirty, unshown = stream->unshown;
	uint32_t next_dirty = stream->next_dirty, next_unshown = stream->next_unshown;
	memset(stream, 0, sizeof(*stream));
	stream->dirty = dirty;
	stream->next_dirty = next_dirty;
	stream->unshown = unshown;
	stream->next_unshown = next_unshown;
	stream->ring = stream->row.ring = CLAW_NONE;
	stream->first_block = stream->last_block = CLAW_NONE;
	stream->attachments = CLAW_NONE;
	memcpy(stream->row.name, name, name_len);
	stream->row.name_len = name_len;
	stream->next_in_hash = *bucket;
	*bucket = index + 1;
	streams->count[CLAW_STREAM_FREE]++;
	set_state(streams, stream, CLAW_STREAM_AWAITED);
	return index;
}

/* Make room in a full spool: what ended longest ago goes first, then the oldest block of anyone that is not a first one. */
static void evict(struct claw_streams *streams)
{
	if (streams->ended.head != CLAW_NONE) {
		uint32_t index = streams->ended.head;
		struct claw_stream *stream = &streams->table[index];
		streams->evicted_blocks += stream->block_count;
		forget(streams, index, stream->deadline_ns);
		claw_stream_mark(streams, index);
	} else if (streams->spool->oldest != CLAW_NONE) {
		uint32_t block = streams->spool->oldest;
		streams->evicted_blocks++;
		claw_stream_free_block(streams, streams->spool->slots[block].stream, block);
	}
}

static uint32_t add_block(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	struct claw_spool *spool = streams->spool;
	for (int i = 0; i < TRIM_BLOCKS && stream->block_count >= streams->stream_blocks; i++) {
		/* The first block stays: it holds the OPEN that every reader starts with */
		streams->evicted_blocks++;
		claw_stream_free_block(streams, index, spool->slots[stream->first_block].next);
	}
	if (!spool->free_count)
		evict(streams);
	uint32_t block = claw_spool_take(spool, index, stream->next_seq);
	if (block == CLAW_NONE)
		return CLAW_NONE;
	if (stream->last_block == CLAW_NONE) {
		stream->first_block = block;
	} else {
		spool->slots[block].prev = stream->last_block;
		spool->slots[stream->last_block].next = block;
		claw_spool_age_add(spool, block);
	}
	stream->last_block = block;
	stream->block_count++;
	stream->shut = 0;
	stream->row.spool_bytes += CLAW_BLOCK_BYTES;

	struct claw_block *header = claw_spool_block(spool, block);
	memset(header, 0, sizeof(*header));
	header->magic = CLAW_MAGIC;
	header->layout = CLAW_LAYOUT;
	header->stream_id = stream->stream_id;
	header->first_seq = stream->next_seq;
	header->ring_id = stream->ring_id;
	header->open_seq = stream->open_seq;
	header->requested_ns = stream->row.requested_ns;
	header->incarnation = stream->incarnation;
	header->handle = stream->handle;
	header->name_len = (uint8_t)stream->row.name_len;
	header->flags = block == stream->first_block ? CLAW_BLOCK_FIRST : 0;
	header->serial = spool->slots[block].serial;
	header->tokens = stream->row.tokens;
	header->text_bytes = stream->row.text_bytes;
	header->grace_ms = stream->grace_ms;
	header->pace = stream->pace;
	memcpy(header->name, stream->row.name, stream->row.name_len);
	return block;
}

struct claw_spooled *claw_stream_reserve(struct claw_streams *streams, uint32_t index, uint32_t len)
{
	struct claw_stream *stream = &streams->table[index];
	uint32_t bytes = claw_spooled_bytes(len);
	uint32_t block = stream->last_block;
	if (block == CLAW_NONE || stream->shut || streams->spool->slots[block].used + bytes > CLAW_BLOCK_ROOM) {
		block = add_block(streams, index);
		if (block == CLAW_NONE)
			return NULL;
	}
	return (struct claw_spooled *)(claw_spool_records(streams->spool, block) + streams->spool->slots[block].used);
}

void claw_stream_commit(struct claw_streams *streams, uint32_t index, const struct claw_spooled *spooled)
{
	struct claw_stream *stream = &streams->table[index];
	if (spooled->kind == CLAW_TOKEN) {
		stream->next_seq++;
		stream->row.tokens++;
		stream->row.text_bytes += spooled->len;
		if (spooled->klass == CLAW_CRITICAL) {
			stream->critical_until = stream->next_seq;
			if (stream->next_seq > 1) /* the first one is not held as it is, and what comes with it may be */
				stream->flush_seq = stream->next_seq;
		}
		if (spooled->klass == CLAW_HIGH)
			stream->high_until = stream->next_seq;
		if (!stream->row.first_written_ns)
			stream->row.first_written_ns = spooled->written_ns;
	} else if (spooled->kind == CLAW_GAP) {
		stream->next_seq += spooled->count;
		stream->flush_seq = stream->next_seq;
	}
	if (spooled->ring_seq)
		stream->ring_seq = spooled->ring_seq;
	claw_spool_commit(streams->spool, stream->last_block, claw_spooled_bytes(spooled->len), stream->next_seq);
	claw_stream_mark(streams, index);
}

void claw_stream_drop(struct claw_streams *streams, uint32_t index, uint32_t count, uint64_t ring_seq)
{
	struct claw_stream *stream = &streams->table[index];
	stream->next_seq += count;
	stream->flush_seq = stream->next_seq;
	stream->ring_seq = ring_seq;
	remember_seq(streams, stream);
	stream->shut = 1;
	streams->dropped_tokens += count;
	claw_stream_mark(streams, index);
}

int claw_stream_open(struct claw_streams *streams, uint32_t index, uint32_t ring, uint64_t ring_id,
		     const struct claw_record *record, uint64_t requested_ns, const uint8_t *meta, uint32_t meta_len)
{
	struct claw_stream *stream = &streams->table[index];
	/* xorshift64*: incarnations need to differ, not to be secret */
	streams->random ^= streams->random >> 12;
	streams->random ^= streams->random << 25;
	streams->random ^= streams->random >> 27;
	stream->incarnation = stream->row.incarnation = (uint32_t)((streams->random * 0x2545f4914f6cdd1d) >> 32);
	stream->stream_id = ++streams->ids;
	stream->ring_id = ring_id;
	stream->handle = record->handle;
	stream->open_seq = stream->ring_seq = record->ring_seq;
	stream->row.requested_ns = requested_ns;
	stream->row.opened_ns = record->written_ns;
	struct claw_spooled *spooled = claw_stream_reserve(streams, index, meta_len);
	if (!spooled)
		return -ENOSPC;
	stream->ring = stream->row.ring = ring;
	streams->grace.awaited -= stream->grace_at != 0;
	set_state(streams, stream, CLAW_STREAM_LIVE);
	memcpy(spooled + 1, meta, meta_len);
	*spooled = (struct claw_spooled){
		.len = (uint16_t)meta_len,
		.kind = CLAW_OPEN,
		.klass = CLAW_NORMAL,
		.ring_seq = record->ring_seq,
		.written_ns = record->written_ns,
	};
	claw_stream_commit(streams, index, spooled);
	return 0;
}

void claw_stream_end(struct claw_streams *streams, uint32_t index, uint64_t ring_seq, const uint8_t *reason,
		     uint32_t reason_len, uint64_t now_ns)
{
	struct claw_stream *stream = &streams->table[index];
	/* Readers are told the reason kept here; the record is for a start after a crash, so a full spool is no failure. */
	struct claw_spooled *spooled = claw_stream_reserve(streams, index, reason_len);
	if (spooled) {
		memcpy(spooled + 1, reason, reason_len);
		*spooled = (struct claw_spooled){
			.len = (uint16_t)reason_len,
			.kind = CLAW_CLOSE,
			.klass = CLAW_NORMAL,
			.ring_seq = ring_seq,
			.written_ns = now_ns,
		};
		claw_stream_commit(streams, index, spooled);
	} else if (stream->first_block != CLAW_NONE) {
		claw_store_release(&claw_spool_block(streams->spool, stream->first_block)->ended_ns, now_ns);
	}
	claw_stream_conclude(streams, index, reason, reason_len, now_ns);
}

void claw_stream_conclude(struct claw_streams *streams, uint32_t index, const uint8_t *reason, uint32_t reason_len,
			  uint64_t ended_ns)
{
	struct claw_stream *stream = &streams->table[index];
	memmove(stream->row.reason, reason, reason_len); /* it may be there already */
	stream->row.reason_len = reason_len;
	stream->row.ended_ns = ended_ns;
	stream->ring = CLAW_NONE;
	claw_grace_stop(streams, index);
	set_state(streams, stream, CLAW_STREAM_ENDED);
	stream->deadline_ns = ended_ns + streams->keep_ns;
	list_add(streams, &streams->ended, index);
	claw_stream_mark(streams, index);
}

void claw_stream_revive(struct claw_streams *streams, uint32_t index)
{
	set_state(streams, &streams->table[index], CLAW_STREAM_LIVE);
}

void claw_stream_first_sent(struct claw_streams *streams, uint32_t index, uint64_t sent_ns)
{
	struct claw_stream *stream = &streams->table[index];
	stream->row.first_sent_ns = sent_ns;
	if (stream->first_block != CLAW_NONE)
		claw_spool_block(streams->spool, stream->first_block)->first_sent_ns = sent_ns;
	claw_stream_touch(streams, index, CLAW_UNSHOWN_PART);
}

void claw_stream_touch(struct claw_streams *streams, uint32_t index, uint8_t unshown)
{
	struct claw_stream *stream = &streams->table[index];
	if (!stream->unshown) {
		stream->next_unshown = streams->unshown;
		streams->unshown = index;
	}
	if (stream->unshown < unshown)
		stream->unshown = unshown;
}

void claw_stream_mark(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	if (stream->dirty)
		return;
	claw_stream_touch(streams, index, CLAW_UNSHOWN_PART);
	stream->dirty = 1;
	stream->next_dirty = CLAW_NONE;
	if (streams->dirty.tail == CLAW_NONE)
		streams->dirty.head = index;
	else
		streams->table[streams->dirty.tail].next_dirty = index;
	streams->dirty.tail = index;
}

void claw_streams_expire(struct claw_streams *streams, uint64_t now_ns)
{
	while (streams->ended.head != CLAW_NONE && streams->table[streams->ended.head].deadline_ns <= now_ns) {
		uint32_t index = streams->ended.head;
		struct claw_stream *stream = &streams->table[index];
		if (stream->released_seq < stream->next_seq) {
			/* Its pacer is that far behind: what it holds goes now, and readers get their time for it */
			stream->flush_seq = stream->next_seq;
			list_remove(streams, &streams->ended, index);
			stream->deadline_ns = now_ns + streams->keep_ns;
			list_add(streams, &streams->ended, index);
		} else {
			forget(streams, index, now_ns);
		}
		claw_stream_mark(streams, index);
	}
	uint32_t index = streams->gone.head;
	while (index != CLAW_NONE && streams->table[index].deadline_ns <= now_ns) {
		uint32_t younger = streams->table[index].younger;
		claw_stream_release(streams, index);
		index = younger;
	}
}

uint64_t claw_streams_due(const struct claw_streams *streams, uint64_t now_ns)
{
	uint64_t due = 0;
	if (streams->ended.head != CLAW_NONE)
		due = streams->table[streams->ended.head].deadline_ns;
	/* One that is past its time stays only while somebody still reads it: that reader's leaving is its event */
	uint32_t index = streams->gone.head;
	while (index != CLAW_NONE && streams->table[index].deadline_ns <= now_ns)
		index = streams->table[index].younger;
	if (index != CLAW_NONE && (!due || streams->table[index].deadline_ns < due))
		due = streams->table[index].deadline_ns;
	return due;
}

uint32_t claw_stream_seek(const struct claw_streams *streams, uint32_t index, uint64_t seq)
{
	const struct claw_slot *slots = streams->spool->slots;
	uint32_t block = streams->table[index].first_block;
	while (block != CLAW_NONE && slots[block].next_seq <= seq)
		block = slots[block].next;
	return block;
}
