/* SPDX-License-Identifier: Apache-2.0 */
/* Keeping: how long and how much of a stream stays, and what goes first when there is no room. */
#include <errno.h>
#include <string.h>

#include "barrier.h"
#include "keep.h"

enum {
	TRIM_BLOCKS = 64, /* let go of at once by a stream that holds more than it may since a limit was lowered */
};


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

void claw_keep_seq(struct claw_streams *streams, const struct claw_stream *stream)
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
		claw_keep_seq(streams, stream);
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
	claw_stream_set_state(streams, index, CLAW_STREAM_GONE);
	stream->deadline_ns = now_ns + streams->keep_ns;
	list_add(streams, &streams->gone, index);
}

static uint32_t oldest_unread(const struct claw_streams *streams, uint32_t index)
{
	while (index != CLAW_NONE && streams->table[index].attachment_count)
		index = streams->table[index].younger;
	return index;
}

uint32_t claw_keep_victim(struct claw_streams *streams)
{
	uint32_t victim = oldest_unread(streams, streams->gone.head);
	if (victim != CLAW_NONE)
		return victim;
	victim = oldest_unread(streams, streams->ended.head);
	if (victim != CLAW_NONE)
		forget(streams, victim, 0);
	return victim;
}

void claw_keep_ended(struct claw_streams *streams, uint32_t index, uint64_t ended_ns)
{
	streams->table[index].deadline_ns = ended_ns + streams->keep_ns;
	list_add(streams, &streams->ended, index);
}

void claw_keep_no_more(struct claw_streams *streams, uint32_t index)
{
	list_remove(streams, &streams->gone, index);
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

uint32_t claw_keep_block(struct claw_streams *streams, uint32_t index)
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
