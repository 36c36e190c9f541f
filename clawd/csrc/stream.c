/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "barrier.h"
#include "keep.h"
#include "reserve.h"

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
		.first = { CLAW_NONE, CLAW_NONE },
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
	claw_grace_deinit(&streams->grace);
	streams->table = NULL;
	streams->hash = NULL;
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

void claw_stream_set_state(struct claw_streams *streams, uint32_t index, uint32_t state)
{
	struct claw_stream *stream = &streams->table[index];
	streams->count[stream->state]--;
	streams->count[state]++;
	stream->state = stream->row.state = state;
	claw_stream_touch(streams, index, CLAW_UNSHOWN_WHOLE);
}

void claw_stream_release(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	if (stream->attachment_count || claw_grace_runs(streams, index) ||
	    (stream->state != CLAW_STREAM_AWAITED && stream->state != CLAW_STREAM_GONE))
		return;
	if (stream->state == CLAW_STREAM_GONE)
		claw_keep_no_more(streams, index);
	claw_first_stop(streams, index);
	uint32_t *link = bucket_of(streams, stream->row.name, stream->row.name_len);
	while (*link != index + 1)
		link = &streams->table[*link - 1].next_in_hash;
	*link = stream->next_in_hash;
	claw_stream_set_state(streams, index, CLAW_STREAM_FREE);
	stream->next_in_hash = streams->free_head;
	streams->free_head = index;
}

uint32_t claw_stream_await(struct claw_streams *streams, const uint8_t *name, uint32_t name_len)
{
	if (streams->free_head == CLAW_NONE && streams->used == streams->max) {
		uint32_t victim = claw_keep_victim(streams);
		if (victim == CLAW_NONE)
			return CLAW_NONE;
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
	claw_stream_set_state(streams, index, CLAW_STREAM_AWAITED);
	return index;
}

struct claw_spooled *claw_stream_reserve(struct claw_streams *streams, uint32_t index, uint32_t len)
{
	struct claw_stream *stream = &streams->table[index];
	uint32_t bytes = claw_spooled_bytes(len);
	uint32_t block = stream->last_block;
	if (block == CLAW_NONE || stream->shut || streams->spool->slots[block].used + bytes > CLAW_BLOCK_ROOM) {
		block = claw_keep_block(streams, index);
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
		stream->flush_seq = stream->gap_seq = stream->next_seq;
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
	stream->flush_seq = stream->gap_seq = stream->next_seq;
	stream->ring_seq = ring_seq;
	claw_keep_seq(streams, stream);
	stream->shut = 1;
	streams->dropped_tokens += count;
	claw_stream_mark(streams, index);
}

int claw_stream_open(struct claw_streams *streams, uint32_t index, uint32_t ring, uint64_t ring_id,
		     const struct claw_record *record, uint64_t requested_ns, const uint8_t *meta, uint32_t meta_len,
		     uint32_t readers_len)
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
	stream->restricted = readers_len != 0;
	stream->open_seq = stream->ring_seq = record->ring_seq;
	stream->row.requested_ns = requested_ns;
	stream->row.opened_ns = record->written_ns;
	struct claw_spooled *spooled = claw_stream_reserve(streams, index, meta_len);
	if (!spooled)
		return -ENOSPC;
	stream->ring = stream->row.ring = ring;
	streams->grace.awaited -= (uint32_t)claw_grace_runs(streams, index);
	claw_stream_set_state(streams, index, CLAW_STREAM_LIVE);
	memcpy(spooled + 1, meta, meta_len);
	*spooled = (struct claw_spooled){
		.len = (uint16_t)meta_len,
		.kind = CLAW_OPEN,
		.count = readers_len,
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
	if (!stream->row.tokens)
		claw_first_stop(streams, index); /* none will come; one that is here is still to be sent */
	claw_stream_set_state(streams, index, CLAW_STREAM_ENDED);
	claw_keep_ended(streams, index, ended_ns);
	claw_stream_mark(streams, index);
}

void claw_stream_revive(struct claw_streams *streams, uint32_t index)
{
	claw_stream_set_state(streams, index, CLAW_STREAM_LIVE);
}

void claw_stream_first_sent(struct claw_streams *streams, uint32_t index, uint64_t sent_ns)
{
	struct claw_stream *stream = &streams->table[index];
	stream->row.first_sent_ns = sent_ns;
	claw_first_stop(streams, index);
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

uint32_t claw_stream_seek(const struct claw_streams *streams, uint32_t index, uint64_t seq)
{
	const struct claw_slot *slots = streams->spool->slots;
	uint32_t block = streams->table[index].first_block;
	while (block != CLAW_NONE && slots[block].next_seq <= seq)
		block = slots[block].next;
	return block;
}
