/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recovery: streams again from what the spool's blocks say of themselves. Headers are read once, records only of each
 * stream's first and last block; those between are checked when a reader comes to them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "barrier.h"
#include "check.h"
#include "reserve.h"
#include "turn.h"

enum {
	TEXT_ENOUGH = 256, /* bytes of text after which it is known whether a sentence has ended */
};

/* Further than any stream gets; a reader is told of what is missing in pieces of 32 bits */
static const uint64_t seq_max = 1ull << 48;
static const uint64_t serial_max = 1ull << 62;

static const char reason_lost[] = "error:reason lost";

struct found {
	uint64_t key; /* serial, or when a stream ended */
	uint32_t index;
};

/* Streams by their id: index + 1, 0 = free */
struct ids {
	uint32_t *table;
	uint32_t mask;
};

static int by_key(const void *left, const void *right)
{
	const struct found *a = left, *b = right;
	if (a->key != b->key)
		return a->key < b->key ? -1 : 1;
	return a->index < b->index ? -1 : a->index > b->index;
}

static int is_whole_header(const struct claw_block *block, uint64_t committed)
{
	uint32_t bytes = claw_block_bytes(committed);
	uint64_t seqs = committed >> CLAW_BLOCK_SEQ_SHIFT;
	return block->magic == CLAW_MAGIC && block->layout == CLAW_LAYOUT && bytes >= sizeof(struct claw_spooled) &&
	       bytes <= CLAW_BLOCK_ROOM && bytes % CLAW_SPOOLED_ALIGN == 0 && block->handle < CLAW_HANDLE_COUNT &&
	       block->serial && block->serial < serial_max && block->first_seq < seq_max && seqs < seq_max &&
	       block->next_seq < seq_max && !(block->flags & ~CLAW_BLOCK_FIRST) && block->name_len &&
	       claw_is_text(block->name, block->name_len);
}

/* --- blocks to chains --- */

static void give_up(struct claw_spool *spool, uint32_t block)
{
	claw_store_release(&claw_spool_block(spool, block)->committed, 0);
}

/* Blocks with a header in order, oldest first. Returns how many. */
static uint32_t collect(struct claw_spool *spool, struct found *ret_found, struct claw_recovered *report)
{
	uint32_t count = 0;
	for (uint32_t i = 0; i < spool->block_count; i++) {
		const struct claw_block *block = claw_spool_block(spool, i);
		uint64_t committed = claw_load_acquire(&block->committed);
		if (!committed)
			continue;
		if (is_whole_header(block, committed)) {
			ret_found[count++] = (struct found){ block->serial, i };
		} else {
			give_up(spool, i);
			report->damaged++;
		}
	}
	qsort(ret_found, count, sizeof(*ret_found), by_key);
	return count;
}

static uint32_t *bucket_of(const struct ids *ids, const struct claw_streams *streams, uint64_t id)
{
	uint32_t at = (uint32_t)((id * 0x9e3779b97f4a7c15) >> 32) & ids->mask; /* Fibonacci hashing */
	while (ids->table[at] && streams->table[ids->table[at] - 1].stream_id != id)
		at = (at + 1) & ids->mask;
	return &ids->table[at];
}

/* A stream for a first block. One whose id or name is there already is younger, so that this block is of no use. */
static void make_stream(struct claw_streams *streams, struct ids *ids, uint32_t block, struct claw_recovered *report)
{
	const struct claw_block *header = claw_spool_block(streams->spool, block);
	uint32_t *bucket = bucket_of(ids, streams, header->stream_id);
	if (*bucket || claw_stream_find(streams, header->name, header->name_len) != CLAW_NONE)
		return;
	if (streams->free_head == CLAW_NONE && streams->used == streams->max) {
		report->beyond++;
		return;
	}
	uint32_t index = claw_stream_await(streams, header->name, header->name_len);
	struct claw_stream *stream = &streams->table[index];
	stream->stream_id = header->stream_id;
	stream->incarnation = stream->row.incarnation = header->incarnation;
	stream->ring_id = header->ring_id;
	stream->handle = header->handle;
	stream->open_seq = header->open_seq;
	stream->first_block = block;
	*bucket = index + 1;
}

static int is_block_of(const struct claw_block *block, const struct claw_stream *stream)
{
	return block->incarnation == stream->incarnation && block->ring_id == stream->ring_id &&
	       block->handle == stream->handle && block->open_seq == stream->open_seq &&
	       block->name_len == stream->row.name_len &&
	       !memcmp(block->name, stream->row.name, stream->row.name_len);
}

/* Put a block behind those that its stream has. 0 = it has no place there. */
static int chain(struct claw_streams *streams, const struct ids *ids, uint32_t block, uint64_t serial,
		 struct claw_recovered *report)
{
	struct claw_spool *spool = streams->spool;
	const struct claw_block *header = claw_spool_block(spool, block);
	uint32_t link = *bucket_of(ids, streams, header->stream_id);
	if (!link)
		return 0; /* a clawd was ended while it let go of this stream, or there was no room for it */
	struct claw_stream *stream = &streams->table[link - 1];
	int is_first = header->flags & CLAW_BLOCK_FIRST;
	uint32_t last = stream->last_block;
	if (!is_block_of(header, stream) || is_first != (block == stream->first_block) || is_first != (last == CLAW_NONE) ||
	    (last != CLAW_NONE && header->first_seq < spool->slots[last].next_seq)) {
		report->damaged++;
		return 0;
	}
	uint64_t committed = header->committed;
	spool->slots[block] = (struct claw_slot){
		.serial = serial,
		.first_seq = header->first_seq,
		.next_seq = header->first_seq + (committed >> CLAW_BLOCK_SEQ_SHIFT),
		.stream = link - 1,
		.prev = last,
		.next = CLAW_NONE,
		.older = CLAW_NONE,
		.younger = CLAW_NONE,
		.used = (uint16_t)claw_block_bytes(committed),
		.unchecked = 1,
	};
	if (last != CLAW_NONE) {
		spool->slots[last].next = block;
		claw_spool_age_add(spool, block);
	}
	stream->last_block = block;
	stream->block_count++;
	stream->row.spool_bytes += CLAW_BLOCK_BYTES;
	return 1;
}

/* Blocks in no chain are free. Those behind the last one in use were never touched, as far as we know. */
static void list_free(struct claw_spool *spool, uint32_t used_count, uint32_t end)
{
	spool->free_count = spool->block_count - used_count;
	for (uint32_t i = end; i-- > 0;) {
		if (spool->slots[i].serial)
			continue;
		spool->slots[i].stream = CLAW_NONE;
		spool->slots[i].next = spool->free_head;
		spool->free_head = i;
	}
}

/* --- chains to streams --- */

/* What kind of text came last decides the class of the next token. Returns how many bytes there were. */
static uint64_t learn(const struct claw_spool *spool, uint32_t block, struct claw_text *text)
{
	const uint8_t *records = claw_spool_records(spool, block);
	uint64_t bytes = 0;
	for (uint32_t offset = 0; offset < spool->slots[block].used;) {
		struct claw_spooled record;
		memcpy(&record, records + offset, sizeof(record));
		if (record.kind == CLAW_TOKEN)
			claw_text_class(text, records + offset + sizeof(record), record.len);
		else if (record.kind == CLAW_GAP)
			*text = (struct claw_text){ 0 };
		bytes += record.len;
		offset += claw_spooled_bytes(record.len);
	}
	return bytes;
}

static void learn_text(struct claw_streams *streams, struct claw_stream *stream)
{
	const struct claw_spool *spool = streams->spool;
	uint32_t last = stream->last_block;
	if (learn(spool, last, &stream->text) >= TEXT_ENOUGH || spool->slots[last].prev == CLAW_NONE)
		return;
	uint32_t before = spool->slots[last].prev;
	if (!claw_stream_check_block(streams, before))
		return;
	stream->text = (struct claw_text){ 0 };
	learn(spool, before, &stream->text);
	learn(spool, last, &stream->text);
}

/* Find the last block with records in order, and what it and the first one tell. 0 = nothing is left of the stream. */
static int look_at_ends(struct claw_streams *streams, uint32_t index, struct claw_tale *ret_first, struct claw_tale *ret_last,
			struct claw_recovered *report)
{
	struct claw_stream *stream = &streams->table[index];
	struct claw_slot *slots = streams->spool->slots;
	uint32_t first = stream->first_block;
	while (stream->last_block != first && !claw_block_look(streams->spool, stream->last_block, 0, 1, ret_last)) {
		claw_stream_free_block(streams, index, stream->last_block);
		report->damaged++;
	}
	int is_alone = stream->last_block == first;
	if (!claw_block_look(streams->spool, first, 1, is_alone, ret_first)) {
		report->damaged++;
		return 0;
	}
	if (is_alone)
		*ret_last = *ret_first;
	slots[first].unchecked = slots[stream->last_block].unchecked = 0;
	return 1;
}

static void drop_stream(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	while (stream->block_count)
		claw_stream_free_block(streams, index, stream->first_block);
	claw_stream_release(streams, index);
}

/*
 * All that is known of a stream, from its two ends. Returns when it ended, 0 = it is live, UINT64_MAX = nothing is left of
 * it.
 */
static uint64_t restore(struct claw_streams *streams, uint32_t index, uint64_t now_ns, struct claw_recovered *report)
{
	struct claw_stream *stream = &streams->table[index];
	const struct claw_spool *spool = streams->spool;
	const struct claw_block *header = claw_spool_block(spool, stream->first_block);
	struct claw_stream_row *row = &stream->row;
	struct claw_tale first, last;
	stream->next_seq = spool->slots[stream->last_block].next_seq;
	if (stream->next_seq < header->next_seq)
		stream->next_seq = header->next_seq;
	stream->ring_seq = header->ring_seq;
	row->tokens = header->tokens;
	row->text_bytes = header->text_bytes;
	if (!look_at_ends(streams, index, &first, &last, report)) {
		drop_stream(streams, index);
		return UINT64_MAX;
	}
	const struct claw_block *tail = claw_spool_block(spool, stream->last_block);
	if (last.close != CLAW_NONE)
		stream->next_seq = spool->slots[stream->last_block].next_seq; /* nothing comes after an end */
	if (stream->next_seq > spool->slots[stream->last_block].next_seq) {
		stream->shut = 1;
	} else {
		int is_alone = tail == header;
		row->tokens = last.tokens + (is_alone ? 0 : tail->tokens);
		row->text_bytes = last.text_bytes + (is_alone ? 0 : tail->text_bytes);
	}
	if (stream->ring_seq < last.ring_seq)
		stream->ring_seq = last.ring_seq;
	row->requested_ns = header->requested_ns;
	row->opened_ns = first.opened_ns;
	row->first_sent_ns = header->first_sent_ns;
	struct claw_spooled open;
	memcpy(&open, claw_spool_records(spool, stream->first_block), sizeof(open));
	stream->restricted = open.count != 0;
	/* What the pacer held was held long enough */
	stream->arrived_seq = stream->released_seq = stream->flush_seq = stream->next_seq;
	stream->grace_ms = header->grace_ms;
	stream->pace = header->pace <= CLAW_PACE_STEADY ? (uint8_t)header->pace : CLAW_PACE_DEFAULT;
	if (first.tokens) {
		row->first_written_ns = first.first_written_ns;
		stream->critical_until = first.first_seq + 1;
	}
	uint64_t ended_ns = header->ended_ns;
	const char *reason = reason_lost;
	uint32_t len = sizeof(reason_lost) - 1;
	if (last.close != CLAW_NONE) {
		struct claw_spooled record;
		const uint8_t *at = claw_spool_records(spool, stream->last_block) + last.close;
		memcpy(&record, at, sizeof(record));
		ended_ns = record.written_ns ? record.written_ns : 1;
		reason = (const char *)at + sizeof(record);
		len = record.len;
	}
	if (!ended_ns) {
		learn_text(streams, stream);
		return 0;
	}
	memcpy(row->reason, reason, len);
	row->reason_len = len;
	return ended_ns < now_ns ? ended_ns : now_ns;
}

/* Every stream lives, or has ended; the ended ones in the order of their ends, as their list has them. */
static void restore_all(struct claw_core *core, uint64_t now_ns, struct found *scratch, struct claw_recovered *report)
{
	struct claw_streams *streams = &core->streams;
	uint32_t ended = 0;
	for (uint32_t i = 0; i < streams->used; i++) {
		uint64_t ended_ns = restore(streams, i, now_ns, report);
		if (!ended_ns) {
			claw_stream_revive(streams, i);
			claw_grace_start(streams, i, now_ns); /* its readers are to come again */
			report->live++;
		} else if (ended_ns != UINT64_MAX) {
			scratch[ended++] = (struct found){ ended_ns, i };
		}
	}
	qsort(scratch, ended, sizeof(*scratch), by_key);
	for (uint32_t i = 0; i < ended; i++) {
		struct claw_stream_row *row = &streams->table[scratch[i].index].row;
		claw_stream_conclude(streams, scratch[i].index, row->reason, row->reason_len, scratch[i].key);
	}
	report->ended = ended;
}

/* --- streams to their rings --- */

static int by_ring(const void *left, const void *right)
{
	const struct claw_orphan *a = left, *b = right;
	if (a->ring_id != b->ring_id)
		return a->ring_id < b->ring_id ? -1 : 1;
	if (a->handle != b->handle)
		return a->handle < b->handle ? -1 : 1;
	return a->open_seq < b->open_seq ? -1 : a->open_seq > b->open_seq;
}

static int list_orphans(struct claw_core *core, uint64_t now_ns, struct claw_recovered *report)
{
	const struct claw_streams *streams = &core->streams;
	uint32_t count = report->live + report->ended;
	core->orphans = calloc(count + !count, sizeof(*core->orphans));
	if (!core->orphans)
		return -ENOMEM;
	for (uint32_t i = 0; i < streams->used; i++) {
		const struct claw_stream *stream = &streams->table[i];
		if (stream->state != CLAW_STREAM_LIVE && stream->state != CLAW_STREAM_ENDED)
			continue;
		core->orphans[core->orphan_count++] = (struct claw_orphan){
			.ring_id = stream->ring_id,
			.open_seq = stream->open_seq,
			.handle = stream->handle,
			.stream = i,
		};
	}
	qsort(core->orphans, core->orphan_count, sizeof(*core->orphans), by_ring);
	/* A handle was given to another stream: the one before had ended, and the spool no room for its CLOSE */
	for (uint32_t i = 1; i < core->orphan_count; i++) {
		const struct claw_orphan *orphan = &core->orphans[i - 1], *next = &core->orphans[i];
		if (orphan->ring_id != next->ring_id || orphan->handle != next->handle ||
		    streams->table[orphan->stream].state != CLAW_STREAM_LIVE)
			continue;
		claw_orphan_end(core, orphan->stream, reason_lost, now_ns);
		report->live--;
		report->ended++;
	}
	return 0;
}

static int make_ids(struct ids *ret_ids, uint32_t count)
{
	uint32_t buckets = 2;
	while (buckets < 2 * count)
		buckets *= 2;
	*ret_ids = (struct ids){ calloc(buckets, sizeof(uint32_t)), buckets - 1 };
	return ret_ids->table ? 0 : -ENOMEM;
}

int claw_core_recover(struct claw_core *core, uint64_t now_ns, struct claw_recovered *ret_found)
{
	struct claw_spool *spool = &core->spool;
	struct claw_streams *streams = &core->streams;
	struct claw_recovered report = { 0 };
	uint64_t bytes = (uint64_t)spool->block_count * sizeof(struct found);
	struct found *found = claw_reserve(bytes + !bytes);
	if (!found)
		return -ENOMEM;
	uint32_t count = collect(spool, found, &report);
	struct ids ids;
	int result = make_ids(&ids, count);
	if (!result) {
		/* The youngest first: where there is no room for all, it is the longest ended that are left out */
		for (uint32_t i = count; i-- > 0;)
			if (claw_spool_block(spool, found[i].index)->flags & CLAW_BLOCK_FIRST)
				make_stream(streams, &ids, found[i].index, &report);
		uint32_t end = 0;
		for (uint32_t i = 0; i < count; i++) {
			uint32_t block = found[i].index;
			if (!chain(streams, &ids, block, found[i].key, &report)) {
				give_up(spool, block);
				continue;
			}
			report.blocks++;
			if (block >= end)
				end = block + 1;
		}
		spool->serial = count ? found[count - 1].key : 0;
		list_free(spool, report.blocks, end);
		restore_all(core, now_ns, found, &report);
		result = list_orphans(core, now_ns, &report);
		claw_streams_expire(streams, now_ns);
		free(ids.table);
	}
	munmap(found, bytes + !bytes);
	core->pending = 1;
	claw_count(&core->totals->recovered_streams, report.live + report.ended);
	claw_count(&core->totals->recovered_blocks, report.blocks);
	*ret_found = report;
	return result;
}
