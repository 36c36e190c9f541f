/* SPDX-License-Identifier: Apache-2.0 */
/* What the records of a ring mean: copy → spool commit, stream by stream, then give the ring bytes back. */
#include <errno.h>
#include <string.h>

#include "barrier.h"
#include "share.h"
#include "turn.h"

static void note(struct claw_core *core, uint32_t kind, uint32_t stream, const struct claw_ring *ring, uint32_t detail)
{
	if (core->outcome.event_count == CLAW_EVENT_COUNT) {
		claw_count(&core->totals->events_missed, 1);
		return;
	}
	core->events[core->outcome.event_count++] = (struct claw_event){
		.kind = kind,
		.stream = stream,
		.ring = (uint32_t)(ring - core->rings),
		.detail = detail,
	};
}

static void stop(struct claw_ring *ring, uint16_t handle, uint64_t open_seq, uint32_t why)
{
	/* Release: nothing else goes with it, but the engine must see it as soon as any later ack */
	claw_store_release(&ring->drain.ctl->stopped[handle], open_seq << 8 | why);
}

static void end_stream(struct claw_core *core, struct claw_ring *ring, uint32_t stream, uint64_t ring_seq,
		       const uint8_t *reason, uint32_t reason_len, uint64_t now_ns)
{
	claw_stream_end(&core->streams, stream, ring_seq, reason, reason_len, now_ns);
	ring->live--;
	claw_count(&core->totals->ended, 1);
	note(core, CLAW_EVENT_ENDED, stream, ring, 0);
}

void claw_stream_cancel(struct claw_core *core, uint32_t stream, uint64_t now_ns)
{
	static const char reason[] = "cancelled";
	const struct claw_stream *entry = &core->streams.table[stream];
	if (entry->state != CLAW_STREAM_LIVE)
		return;
	struct claw_ring *ring = &core->rings[entry->ring];
	ring->handles[entry->handle] = CLAW_DISCARD;
	stop(ring, entry->handle, entry->open_seq, CLAW_STOPPED_CANCELLED);
	claw_count(&core->totals->cancelled, 1);
	end_stream(core, ring, stream, 0, (const uint8_t *)reason, sizeof(reason) - 1, now_ns);
}

void claw_stream_unread(struct claw_core *core, uint32_t stream, uint64_t now_ns)
{
	note(core, CLAW_EVENT_UNREAD, stream, &core->rings[core->streams.table[stream].ring], 0);
	claw_stream_cancel(core, stream, now_ns);
}

void claw_ring_end(struct claw_core *core, struct claw_ring *ring, const char *reason, uint64_t now_ns)
{
	for (uint32_t handle = 0; handle < CLAW_HANDLE_COUNT && ring->live; handle++) {
		uint32_t stream = ring->handles[handle];
		if (stream == CLAW_NONE || stream == CLAW_DISCARD)
			continue;
		ring->handles[handle] = CLAW_NONE;
		end_stream(core, ring, stream, 0, (const uint8_t *)reason, (uint32_t)strlen(reason), now_ns);
	}
}

/* UTF-8 without control characters: what a name or a reason may be made of */
static int is_text(const uint8_t *text, uint32_t len)
{
	uint32_t at = 0;
	while (at < len) {
		uint8_t lead = text[at++];
		uint32_t more, lowest;
		if (lead < 0x80) {
			if (lead < 0x20 || lead == 0x7f)
				return 0;
			continue;
		}
		if ((lead & 0xe0) == 0xc0)
			more = 1, lowest = 0x80;
		else if ((lead & 0xf0) == 0xe0)
			more = 2, lowest = 0x800;
		else if ((lead & 0xf8) == 0xf0)
			more = 3, lowest = 0x10000;
		else
			return 0;
		if (len - at < more)
			return 0;
		uint32_t point = lead & (0x3f >> more);
		for (; more; more--) {
			if ((text[at] & 0xc0) != 0x80)
				return 0;
			point = point << 6 | (text[at++] & 0x3f);
		}
		if (point < lowest || point > 0x10ffff || (point >= 0xd800 && point < 0xe000))
			return 0;
	}
	return 1;
}

static void refuse(struct claw_core *core, struct claw_ring *ring, const struct claw_record *record, uint32_t stream,
		   uint32_t why)
{
	ring->handles[record->handle] = CLAW_DISCARD;
	stop(ring, record->handle, record->ring_seq, why);
	claw_count(&core->totals->refused, 1);
	note(core, CLAW_EVENT_REFUSED, stream, ring, why);
}

static int take_open(struct claw_core *core, struct claw_ring *ring, const struct claw_record *record, uint64_t now_ns)
{
	if (ring->handles[record->handle] != CLAW_NONE)
		return -CLAW_BAD_HANDLE;
	struct claw_open open;
	if (record->len < sizeof(open))
		return -CLAW_BAD_OPEN;
	int result = claw_drain_copy(&ring->drain, record, core->scratch);
	if (result < 0)
		return result;
	memcpy(&open, core->scratch, sizeof(open));
	const uint8_t *name = core->scratch + sizeof(open);
	if (!open.name_len || open.name_len > CLAW_NAME_MAX || open.reserved ||
	    record->len != sizeof(open) + (uint32_t)open.name_len + open.meta_len || !is_text(name, open.name_len))
		return -CLAW_BAD_OPEN;
	if (core->draining || !claw_share_stream(core, ring)) {
		refuse(core, ring, record, CLAW_NONE, CLAW_STOPPED_LIMIT);
		return 0;
	}

	struct claw_streams *streams = &core->streams;
	uint32_t stream = claw_stream_find(streams, name, open.name_len);
	if (stream != CLAW_NONE && streams->table[stream].state == CLAW_STREAM_GONE) {
		/* Not live and not spooled: the name is free again once the last reader of the old one left */
		claw_stream_release(streams, stream);
		stream = claw_stream_find(streams, name, open.name_len);
	}
	if (stream == CLAW_NONE)
		stream = claw_stream_await(streams, name, open.name_len);
	if (stream == CLAW_NONE) {
		refuse(core, ring, record, CLAW_NONE, CLAW_STOPPED_LIMIT);
		return 0;
	}
	if (streams->table[stream].state != CLAW_STREAM_AWAITED) {
		refuse(core, ring, record, stream, CLAW_STOPPED_EXISTS);
		return 0;
	}
	if (claw_stream_open(streams, stream, (uint32_t)(ring - core->rings), ring->ring_id, record, open.requested_ns,
			     name + open.name_len, open.meta_len) < 0) {
		refuse(core, ring, record, stream, CLAW_STOPPED_NO_SPACE);
		claw_stream_release(streams, stream);
		return 0;
	}
	ring->handles[record->handle] = stream;
	ring->live++;
	claw_count(&core->totals->opened, 1);
	note(core, CLAW_EVENT_OPENED, stream, ring, 0);
	if (claw_outbox_cancelled(&core->outbox, stream))
		claw_stream_cancel(core, stream, now_ns);
	else if (streams->table[stream].doomed)
		claw_stream_unread(core, stream, now_ns);
	return 0;
}

static int take_token(struct claw_core *core, struct claw_ring *ring, const struct claw_record *record, uint64_t now_ns)
{
	uint32_t stream = ring->handles[record->handle];
	if (stream == CLAW_NONE)
		return -CLAW_BAD_HANDLE;
	if (stream == CLAW_DISCARD) {
		claw_count(&core->totals->discarded, 1);
		return 0;
	}
	struct claw_stream *entry = &core->streams.table[stream];
	struct claw_spooled *spooled = claw_stream_reserve(&core->streams, stream, record->len);
	/* Read in any case: the class of tokens to come must not depend on how full the spool was */
	uint8_t *copy = spooled ? (uint8_t *)(spooled + 1) : core->scratch;
	int result = claw_drain_copy(&ring->drain, record, copy);
	if (result < 0)
		return result; /* not committed */
	uint8_t klass = claw_text_class(&entry->text, copy, record->len);
	if (!spooled) {
		claw_stream_drop(&core->streams, stream, 1);
		return 0;
	}
	if (entry->row.tokens == 0 || record->flags & CLAW_URGENT)
		klass = CLAW_CRITICAL;
	*spooled = (struct claw_spooled){
		.len = (uint16_t)record->len,
		.kind = CLAW_TOKEN,
		.klass = klass,
		.count = record->count,
		.ring_seq = record->ring_seq,
		.written_ns = record->written_ns,
	};
	claw_stream_commit(&core->streams, stream, spooled);
	ring->tokens++;
	claw_count(&core->totals->tokens, 1);
	claw_count(&core->totals->text_bytes, record->len);
	claw_account(core, CLAW_HIST_COMMIT, record->written_ns, now_ns);
	return 0;
}

/* CLOSE and GAP carry a reason */
static int take_reason(struct claw_core *core, struct claw_ring *ring, const struct claw_record *record, uint64_t now_ns)
{
	uint32_t stream = ring->handles[record->handle];
	if (stream == CLAW_NONE)
		return -CLAW_BAD_HANDLE;
	if (!record->len || record->len > CLAW_REASON_MAX)
		return -CLAW_BAD_CLOSE;
	int result = claw_drain_copy(&ring->drain, record, core->scratch);
	if (result < 0)
		return result;
	if (!is_text(core->scratch, record->len))
		return -CLAW_BAD_CLOSE;
	if (record->kind == CLAW_CLOSE) {
		ring->handles[record->handle] = CLAW_NONE;
		if (stream != CLAW_DISCARD)
			end_stream(core, ring, stream, record->ring_seq, core->scratch, record->len, now_ns);
		return 0;
	}
	if (!record->count)
		return -CLAW_BAD_COUNT;
	if (stream == CLAW_DISCARD)
		return 0;
	core->streams.table[stream].text = (struct claw_text){ 0 }; /* what is missing there, nobody knows */
	struct claw_spooled *spooled = claw_stream_reserve(&core->streams, stream, record->len);
	if (!spooled) {
		claw_stream_drop(&core->streams, stream, record->count);
		return 0;
	}
	memcpy(spooled + 1, core->scratch, record->len);
	*spooled = (struct claw_spooled){
		.len = (uint16_t)record->len,
		.kind = CLAW_GAP,
		.klass = CLAW_NORMAL,
		.count = record->count,
		.ring_seq = record->ring_seq,
		.written_ns = record->written_ns,
	};
	claw_stream_commit(&core->streams, stream, spooled);
	return 0;
}

/* Take what a ring holds, within this turn's bounds. 1 = there may be more, 0 = it is empty, or -CLAW_BAD_…. */
int claw_intake(struct claw_core *core, struct claw_ring *ring, uint64_t now_ns)
{
	int result = claw_drain_begin(&ring->drain);
	if (result < 0)
		return result;
	uint64_t start = ring->drain.pos;
	for (uint32_t taken = 0;; taken++) {
		if (taken == CLAW_TURN_RECORDS || ring->drain.pos - start >= CLAW_TURN_BYTES) {
			result = ring->drain.pos != ring->drain.head;
			break;
		}
		struct claw_record record;
		result = claw_drain_next(&ring->drain, &record);
		if (result <= 0)
			break;
		if (record.kind == CLAW_TOKEN)
			result = take_token(core, ring, &record, now_ns);
		else if (record.kind == CLAW_OPEN)
			result = take_open(core, ring, &record, now_ns);
		else
			result = take_reason(core, ring, &record, now_ns);
		if (result < 0)
			break;
		claw_drain_advance(&ring->drain, &record);
		ring->records++;
		claw_count(&core->totals->records, 1);
	}
	if (ring->drain.pos != start) {
		ring->bytes += ring->drain.pos - start;
		claw_drain_ack(&ring->drain);
	}
	return result;
}
