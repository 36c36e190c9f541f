/* SPDX-License-Identifier: Apache-2.0 */
/* Packing: from what each attachment has not had yet to the frames of this turn. */
#include <string.h>

#include "compact.h"
#include "lanes.h"
#include "outbox.h"

static void queue_readers(struct claw_outbox *outbox, const struct claw_stream *stream)
{
	for (uint32_t at = stream->attachments; at != CLAW_NONE; at = outbox->attachments[at].next_of_stream)
		claw_attachment_queue(outbox, at);
}

/* The connections of those whose news is CRITICAL get their frames first in this turn, then those of HIGH */
static void queue_by_class(struct claw_outbox *outbox)
{
	const struct claw_streams *streams = outbox->streams;
	if (streams->dirty.head == streams->dirty.tail)
		return;
	for (uint32_t klass = CLAW_CRITICAL; klass <= CLAW_HIGH; klass++) {
		for (uint32_t at = streams->dirty.head; at != CLAW_NONE; at = streams->table[at].next_dirty) {
			const struct claw_stream *stream = &streams->table[at];
			uint64_t until = klass == CLAW_CRITICAL ? stream->critical_until : stream->high_until;
			if (stream->released_seq > stream->told_seq && until > stream->told_seq)
				queue_readers(outbox, stream);
		}
	}
}

/* Of what was released just now, each reader's next token is timed, unless one is that it has not been sent */
static void time_next(struct claw_outbox *outbox, const struct claw_stream *stream)
{
	for (uint32_t at = stream->attachments; at != CLAW_NONE; at = outbox->attachments[at].next_of_stream) {
		struct claw_attachment *attachment = &outbox->attachments[at];
		if (attachment->timed_ns || stream->told_seq == stream->released_seq ||
		    attachment->next_seq > stream->told_seq)
			continue;
		attachment->timed_seq = stream->told_seq;
		attachment->timed_ns = stream->last_released_ns;
	}
}

void claw_outbox_wake(struct claw_outbox *outbox)
{
	struct claw_streams *streams = outbox->streams;
	queue_by_class(outbox);
	while (streams->dirty.head != CLAW_NONE) {
		struct claw_stream *stream = &streams->table[streams->dirty.head];
		streams->dirty.head = stream->next_dirty;
		if (streams->dirty.head == CLAW_NONE)
			streams->dirty.tail = CLAW_NONE;
		stream->dirty = 0;
		if (stream->state == CLAW_STREAM_FREE || stream->state == CLAW_STREAM_AWAITED)
			continue;
		/* All that came is held by its pacer */
		if (stream->state == CLAW_STREAM_LIVE && stream->told_seq == stream->released_seq && stream->told)
			continue;
		time_next(outbox, stream);
		stream->told_seq = stream->released_seq;
		stream->told = 1;
		queue_readers(outbox, stream);
	}
}

/* What fill() came to */
enum fill {
	FILL_DRY, /* the reader has all there is */
	FILL_CREDIT, /* the reader wants no more for now */
	FILL_ROOM, /* the frame is full */
	FILL_END, /* CLOSE went out: the attachment is done */
};

struct segment {
	uint8_t *at;
	uint32_t room, used, records;
};

static int put(struct segment *segment, struct claw_attachment *attachment, const struct claw_spooled *header,
	       const uint8_t *payload)
{
	uint32_t bytes = claw_spooled_bytes(header->len);
	if (segment->room - segment->used < bytes)
		return 0;
	uint8_t *at = segment->at + segment->used;
	memset(at + bytes - CLAW_SPOOLED_ALIGN, 0, CLAW_SPOOLED_ALIGN);
	memcpy(at, header, sizeof(*header));
	memcpy(at + sizeof(*header), payload, header->len);
	segment->used += bytes;
	segment->records++;
	attachment->credit_used += bytes;
	return 1;
}

static int put_gap(struct claw_outbox *outbox, struct segment *segment, struct claw_attachment *attachment,
		   uint64_t until)
{
	static const char reason[] = "evicted";
	uint64_t count = until - attachment->next_seq;
	if (count > UINT32_MAX)
		count = UINT32_MAX;
	struct claw_spooled gap = {
		.len = sizeof(reason) - 1,
		.kind = CLAW_GAP,
		.klass = CLAW_NORMAL,
		.count = (uint32_t)count,
	};
	if (!put(segment, attachment, &gap, (const uint8_t *)reason))
		return 0;
	attachment->next_seq += count;
	outbox->gaps++;
	return 1;
}

/*
 * Copy whole records from a block to the segment, as many as room and credit allow: one run of bytes, because the spool
 * holds them as they go on the wire. Returns what stopped it; FILL_DRY = the end of the block.
 */
static enum fill put_run(struct segment *segment, struct claw_attachment *attachment, const uint8_t *records,
			 uint32_t end, uint64_t until)
{
	uint32_t from = attachment->offset;
	enum fill result = FILL_DRY;
	while (attachment->offset < end && attachment->next_seq < until) {
		struct claw_spooled header;
		memcpy(&header, records + attachment->offset, sizeof(header));
		uint32_t bytes = claw_spooled_bytes(header.len);
		if (header.kind == CLAW_CLOSE)
			break; /* told from the stream's own reason */
		if (attachment->credit_used >= attachment->credit_limit) {
			result = FILL_CREDIT;
			break;
		}
		if (segment->room - segment->used - (attachment->offset - from) < bytes) {
			result = FILL_ROOM;
			break;
		}
		attachment->offset += bytes;
		attachment->credit_used += bytes;
		attachment->next_seq += header.kind == CLAW_GAP ? header.count : 1;
		segment->records++;
	}
	memcpy(segment->at + segment->used, records + from, attachment->offset - from);
	segment->used += attachment->offset - from;
	return result;
}

/* Where in a block the record with sequence next_seq starts. Returns that record's sequence: later than next_seq when the
 * reader has had half of a producer's GAP. */
static uint64_t find_in_block(const struct claw_spool *spool, uint32_t block, uint64_t next_seq, uint32_t *ret_offset)
{
	const uint8_t *records = claw_spool_records(spool, block);
	uint64_t seq = spool->slots[block].first_seq;
	uint32_t offset = 0;
	while (offset < spool->slots[block].used) {
		struct claw_spooled header;
		memcpy(&header, records + offset, sizeof(header));
		if (header.kind == CLAW_TOKEN || header.kind == CLAW_GAP) {
			if (seq >= next_seq)
				break;
			seq += header.kind == CLAW_GAP ? header.count : 1;
		}
		offset += claw_spooled_bytes(header.len);
	}
	*ret_offset = offset;
	return seq;
}

/* Everything up to sequence `until`, or to the stream's end if that is before */
static enum fill fill(struct claw_outbox *outbox, struct claw_attachment *attachment, struct segment *segment,
		      uint64_t until)
{
	const struct claw_stream *stream = &outbox->streams->table[attachment->stream];
	const struct claw_spool *spool = outbox->streams->spool;
	if (!attachment->opened) {
		struct claw_spooled header = { .kind = CLAW_OPEN, .klass = CLAW_NORMAL };
		const uint8_t *meta = (const uint8_t *)"";
		if (stream->first_block != CLAW_NONE) {
			const uint8_t *first = claw_spool_records(spool, stream->first_block);
			memcpy(&header, first, sizeof(header));
			/* Whom it is for stays here */
			uint32_t readers = header.count < header.len ? header.count : header.len;
			meta = first + sizeof(header) + readers;
			header.len = (uint16_t)(header.len - readers);
			header.count = 0;
		}
		if (!put(segment, attachment, &header, meta))
			return FILL_ROOM;
		attachment->opened = 1;
	}
	for (;;) {
		if (attachment->next_seq == stream->next_seq) {
			if (stream->state == CLAW_STREAM_LIVE)
				return FILL_DRY;
			struct claw_spooled header = {
				.len = (uint16_t)stream->row.reason_len,
				.kind = CLAW_CLOSE,
				.klass = CLAW_NORMAL,
				.written_ns = stream->row.ended_ns,
			};
			return put(segment, attachment, &header, stream->row.reason) ? FILL_END : FILL_ROOM;
		}
		if (attachment->next_seq >= until)
			return FILL_DRY;
		if (attachment->credit_used >= attachment->credit_limit)
			return FILL_CREDIT;
		uint32_t block = attachment->block;
		int holds = block != CLAW_NONE && spool->slots[block].serial == attachment->block_serial;
		if (!holds || attachment->offset == spool->slots[block].used) {
			block = holds ? spool->slots[block].next :
					claw_stream_seek(outbox->streams, attachment->stream, attachment->next_seq);
			if (block != CLAW_NONE && !claw_stream_check_block(outbox->streams, block))
				continue; /* damaged, so it is gone now */
			uint32_t offset = 0;
			uint64_t from = block == CLAW_NONE ? stream->next_seq :
				find_in_block(spool, block, attachment->next_seq, &offset);
			if (attachment->next_seq < from) {
				if (!put_gap(outbox, segment, attachment, from))
					return FILL_ROOM;
				continue;
			}
			attachment->block = block;
			attachment->block_serial = spool->slots[block].serial;
			attachment->offset = offset;
		}
		enum fill result = put_run(segment, attachment, claw_spool_records(spool, block), spool->slots[block].used,
					   until);
		if (result != FILL_DRY)
			return result;
	}
}

static int is_due(const struct claw_connection *connection, uint32_t queue)
{
	return connection->queue[queue].head != CLAW_NONE && connection->overtaken[queue] == CLAW_OVERTAKES;
}

/*
 * Which queue is next, CLAW_QUEUE_NONE when all are empty. HIGH is common: NORMAL gets its share. A first token goes before
 * both, but where an engine says of all its tokens that they are urgent its neighbours get their share too.
 */
static uint32_t next_queue(const struct claw_connection *connection)
{
	int is_others_turn = connection->overtaken[CLAW_CRITICAL] == CLAW_OVERTAKES &&
			     (is_due(connection, CLAW_HIGH) || is_due(connection, CLAW_NORMAL));
	if (connection->queue[CLAW_CRITICAL].head != CLAW_NONE && !is_others_turn)
		return CLAW_CRITICAL;
	if (connection->queue[CLAW_HIGH].head != CLAW_NONE && !is_due(connection, CLAW_NORMAL))
		return CLAW_HIGH;
	return connection->queue[CLAW_NORMAL].head != CLAW_NONE ? CLAW_NORMAL : CLAW_QUEUE_NONE;
}

/* A frame is made: which queues waited through it? served: bits */
static void count_overtaken(struct claw_connection *connection, uint32_t served)
{
	uint8_t *overtaken = connection->overtaken;
	int waits = 0;
	for (uint32_t queue = CLAW_HIGH; queue < CLAW_QUEUES; queue++) {
		if (served & 1u << queue || connection->queue[queue].head == CLAW_NONE) {
			overtaken[queue] = 0;
			continue;
		}
		waits = 1;
		if (overtaken[queue] < CLAW_OVERTAKES)
			overtaken[queue]++;
	}
	int is_any_due = is_due(connection, CLAW_HIGH) || is_due(connection, CLAW_NORMAL);
	int is_first = served >> CLAW_CRITICAL & 1;
	if (!waits || (!is_first && !is_any_due))
		overtaken[CLAW_CRITICAL] = 0;
	else if (is_first && overtaken[CLAW_CRITICAL] < CLAW_OVERTAKES)
		overtaken[CLAW_CRITICAL]++;
}

/*
 * One frame for one connection, from its queues in order. `critical`: CRITICAL tokens, what must come before them, and
 * nothing else, so that little is copied to the express lane. Returns its bytes, 0 = nothing to say.
 */
static uint32_t build_frame(struct claw_outbox *outbox, struct claw_connection *connection, uint8_t *out, int critical)
{
	uint32_t used = sizeof(struct claw_frame_header);
	uint32_t segments = 0;
	uint32_t served = 0; /* queues, as bits */
	/* Its CRITICAL tokens go in frames of their own, which go on both lanes */
	int apart = !critical && connection->laned && !connection->doubled;
	while (segments < UINT16_MAX) {
		uint32_t queue = critical ? CLAW_CRITICAL : next_queue(connection);
		if (queue == CLAW_QUEUE_NONE || connection->queue[queue].head == CLAW_NONE ||
		    (apart && queue == CLAW_CRITICAL))
			break;
		if (CLAW_FRAME_MAX - used < sizeof(struct claw_segment))
			break;
		uint32_t index = connection->queue[queue].head;
		struct claw_attachment *attachment = &outbox->attachments[index];
		const struct claw_stream *stream = &outbox->streams->table[attachment->stream];
		uint64_t until = critical && stream->critical_until < stream->released_seq ? stream->critical_until :
											     stream->released_seq;
		struct claw_segment header = {
			.attachment = attachment->id,
			.incarnation = stream->incarnation,
			.first_seq = attachment->next_seq,
		};
		struct segment segment = {
			.at = out + used + sizeof(header),
			.room = CLAW_FRAME_MAX - used - (uint32_t)sizeof(header),
		};
		enum fill result = fill(outbox, attachment, &segment, until);
		if (segment.records) {
			header.len = segment.used;
			header.records = segment.records;
			memcpy(out + used, &header, sizeof(header));
			used += sizeof(header) + segment.used;
			segments++;
			served |= 1u << queue;
		}
		if (result == FILL_END) {
			claw_attachment_done(outbox, index);
		} else if (result == FILL_ROOM) {
			/* To the back of the queue it belongs in now: one long answer does not hold up the others */
			if (segment.records) {
				claw_attachment_unqueue(outbox, index);
				claw_attachment_queue(outbox, index);
			}
			break;
		} else {
			claw_attachment_unqueue(outbox, index);
			/* By what comes after. What its pacer holds is told again when it is released */
			if (critical && result == FILL_DRY && attachment->next_seq >= stream->critical_until)
				claw_attachment_queue(outbox, index);
		}
	}
	if (!segments)
		return 0;
	count_overtaken(connection, served);
	struct claw_frame_header header = {
		.kind = CLAW_FRAME_DATA,
		.version = CLAW_FRAME_VERSION,
		.segments = (uint16_t)segments,
		.connection = connection->id,
		.len = used,
		.degrade = (uint8_t)(outbox->pressure || !connection->congested ? outbox->pressure : 1),
		.number = ++connection->frame_number,
	};
	memcpy(out, &header, sizeof(header));
	claw_connection_touch(outbox, (uint32_t)(connection - outbox->connections), CLAW_UNSHOWN_PART);
	return used;
}

/* In compact encoding, if that is shorter */
static uint32_t shorten(struct claw_outbox *outbox, uint8_t *frame, uint32_t len)
{
	int packed = claw_frame_pack(frame, len, outbox->packed, sizeof(outbox->packed));
	if (!packed)
		return len;
	outbox->saved_bytes += len - (uint32_t)packed;
	memcpy(frame, outbox->packed, (size_t)packed);
	return (uint32_t)packed;
}

int claw_outbox_build(struct claw_outbox *outbox)
{
	outbox->frame_count = 0;
	outbox->out_bytes = 0;
	while (outbox->ready.head != CLAW_NONE) {
		if (outbox->frame_count == CLAW_FRAME_COUNT || CLAW_OUT_BYTES - outbox->out_bytes < CLAW_FRAME_MAX)
			return 1;
		uint32_t index = outbox->ready.head;
		struct claw_connection *connection = &outbox->connections[index];
		outbox->ready.head = connection->next_ready;
		if (outbox->ready.head == CLAW_NONE)
			outbox->ready.tail = CLAW_NONE;
		connection->ready = 0;
		int apart = connection->laned && !connection->doubled &&
			    connection->queue[CLAW_CRITICAL].head != CLAW_NONE;
		int critical = apart && next_queue(connection) == CLAW_CRITICAL;
		uint8_t lanes = claw_lanes_next(connection, critical);
		/* What is due before it needs the bulk lane: that one being full is no reason to wait on the other */
		if (!lanes && apart && !critical) {
			critical = 1;
			lanes = claw_lanes_next(connection, critical);
		}
		if (!lanes) {
			connection->congested = next_queue(connection) != CLAW_QUEUE_NONE;
			/* Until it has caught up for good: processor time for bytes, where bytes are what is short */
			connection->compact |= connection->congested && connection->way.far;
			outbox->congested |= connection->congested;
			continue; /* an ack, or its socket, makes it ready again */
		}
		uint8_t *out = outbox->out + outbox->out_bytes;
		uint32_t len = build_frame(outbox, connection, out, critical);
		if (!len) {
			if (next_queue(connection) != CLAW_QUEUE_NONE)
				claw_connection_ready(outbox, index);
			continue;
		}
		if (connection->compact)
			len = shorten(outbox, out, len);
		claw_lanes_charge(outbox, connection, lanes, len);
		outbox->frames[outbox->frame_count++] = (struct claw_frame){
			.connection = connection->id,
			.offset = outbox->out_bytes,
			.len = len,
			.lanes = lanes,
		};
		outbox->out_bytes += len;
		if (next_queue(connection) != CLAW_QUEUE_NONE)
			claw_connection_ready(outbox, index);
		else
			connection->congested = connection->compact = 0;
	}
	return 0;
}
