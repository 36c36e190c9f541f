/* SPDX-License-Identifier: Apache-2.0 */
/* What the records of a ring mean: copy → spool commit, stream by stream, then give the ring bytes back. */
#include <errno.h>
#include <string.h>

#include "barrier.h"
#include "failpoint.h"
#include "share.h"
#include "readers.h"
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
		.ring = ring ? (uint32_t)(ring - core->rings) : CLAW_NONE,
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
	CLAW_FAILPOINT("committed");
	if (ring)
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
	if (ring->handles[entry->handle] == stream) /* not while an earlier use of the handle comes again */
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
		if (stream >= CLAW_UNSURE)
			continue;
		ring->handles[handle] = CLAW_NONE;
		end_stream(core, ring, stream, 0, (const uint8_t *)reason, (uint32_t)strlen(reason), now_ns);
	}
	/* While records come again, a handle may have another meaning for a moment, and a producer may leave it at that */
	for (uint32_t stream = 0; stream < core->streams.used && ring->live; stream++)
		if (core->streams.table[stream].state == CLAW_STREAM_LIVE &&
		    core->streams.table[stream].ring == (uint32_t)(ring - core->rings))
			end_stream(core, ring, stream, 0, (const uint8_t *)reason, (uint32_t)strlen(reason), now_ns);
}

void claw_orphan_end(struct claw_core *core, uint32_t stream, const char *reason, uint64_t now_ns)
{
	end_stream(core, NULL, stream, 0, (const uint8_t *)reason, (uint32_t)strlen(reason), now_ns);
}

static void refuse(struct claw_core *core, struct claw_ring *ring, const struct claw_record *record, uint32_t stream,
		   uint32_t why)
{
	ring->handles[record->handle] = CLAW_DISCARD;
	stop(ring, record->handle, record->ring_seq, why);
	claw_count(&core->totals->refused, 1);
	note(core, CLAW_EVENT_REFUSED, stream, ring, why);
}

/* Was this OPEN taken by an earlier clawd? It comes again when that one was ended before it gave the ring bytes back. */
static int is_known(const struct claw_ring *ring, const struct claw_record *record)
{
	/* Records are taken in their order: one that is followed by a committed one was taken, and one that was refused is
	 * told so by the word of its handle */
	return record->ring_seq <= ring->known_seq ||
		claw_load_relaxed(&ring->drain.ctl->stopped[record->handle]) >> 8 == record->ring_seq;
}

static int take_open(struct claw_core *core, struct claw_ring *ring, const struct claw_record *record, uint64_t now_ns)
{
	struct claw_open open;
	if (record->len < sizeof(open))
		return -CLAW_BAD_OPEN;
	int result = claw_drain_copy(&ring->drain, record, core->scratch);
	if (result < 0)
		return result;
	memcpy(&open, core->scratch, sizeof(open));
	const uint8_t *name = core->scratch + sizeof(open);
	if (!open.name_len || open.name_len > CLAW_NAME_MAX || open.pace > CLAW_PACE_STEADY || open.reserved[0] ||
	    open.reserved[1] ||
	    record->len != sizeof(open) + (uint32_t)open.name_len + open.readers_len + open.meta_len || !claw_is_text(name, open.name_len))
		return -CLAW_BAD_OPEN;
	if (is_known(ring, record)) {
		uint32_t known = claw_stream_find(&core->streams, name, open.name_len);
		const struct claw_stream *entry = known == CLAW_NONE ? NULL : &core->streams.table[known];
		int lives = entry && entry->state == CLAW_STREAM_LIVE && entry->ring == (uint32_t)(ring - core->rings) &&
			entry->open_seq == record->ring_seq && entry->handle == record->handle;
		/* Else it was refused, or it is over: what the producer says of it up to its CLOSE is known too, or void */
		ring->handles[record->handle] = lives ? known : CLAW_DISCARD;
		return 0;
	}
	uint32_t earlier = ring->handles[record->handle];
	if (earlier != CLAW_NONE && earlier != CLAW_UNSURE)
		return -CLAW_BAD_HANDLE;
	if (core->draining) {
		refuse(core, ring, record, CLAW_NONE, CLAW_STOPPED_DRAINING);
		return 0;
	}
	if (!claw_share_stream(core, ring)) {
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
	streams->table[stream].pace = open.pace;
	if (claw_stream_open(streams, stream, (uint32_t)(ring - core->rings), ring->ring_id, record, open.requested_ns,
			     name + open.name_len, (uint32_t)open.readers_len + open.meta_len, open.readers_len) < 0) {
		refuse(core, ring, record, stream, CLAW_STOPPED_NO_SPACE);
		claw_stream_release(streams, stream);
		return 0;
	}
	CLAW_FAILPOINT("committed");
	ring->handles[record->handle] = stream;
	ring->live++;
	claw_first_start(streams, stream, now_ns);
	claw_count(&core->totals->opened, 1);
	note(core, CLAW_EVENT_OPENED, stream, ring, 0);
	if (open.readers_len)
		claw_readers_open(core, stream);
	else if (claw_outbox_cancelled(&core->outbox, stream))
		claw_stream_cancel(core, stream, now_ns);
	else if (streams->table[stream].doomed)
		claw_stream_unread(core, stream, now_ns);
	return 0;
}

static void account(struct claw_core *core, const struct claw_stream *entry, uint64_t written_ns, uint64_t now_ns)
{
	int64_t took_ns = claw_account(core, CLAW_HIST_COMMIT, written_ns, now_ns);
	if (took_ns < 0 || entry->next_seq != 1)
		return;
	claw_hist_add(&core->page.hists[CLAW_HIST_COMMIT_FIRST], (uint64_t)took_ns);
	claw_account(core, CLAW_HIST_WRITTEN, entry->row.requested_ns ? entry->row.requested_ns : entry->row.opened_ns,
		     written_ns);
}

static int take_token(struct claw_core *core, struct claw_ring *ring, const struct claw_record *record, uint64_t now_ns)
{
	uint32_t stream = ring->handles[record->handle];
	if (stream == CLAW_NONE)
		return -CLAW_BAD_HANDLE;
	if (stream >= CLAW_UNSURE) {
		claw_count(&core->totals->discarded, 1);
		return 0;
	}
	struct claw_stream *entry = &core->streams.table[stream];
	if (record->ring_seq <= entry->ring_seq)
		return 0; /* an earlier clawd took it, and was ended before it gave the ring bytes back */
	struct claw_spooled *spooled = claw_stream_reserve(&core->streams, stream, record->len);
	/* Read in any case: the class of tokens to come must not depend on how full the spool was */
	uint8_t *copy = spooled ? (uint8_t *)(spooled + 1) : core->scratch;
	int result = claw_drain_copy(&ring->drain, record, copy);
	if (result < 0)
		return result; /* not committed */
	uint8_t klass = claw_text_class(&entry->text, copy, record->len);
	CLAW_FAILPOINT("copied");
	if (!spooled) {
		claw_stream_drop(&core->streams, stream, 1, record->ring_seq);
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
	CLAW_FAILPOINT("committed");
	ring->tokens++;
	claw_count(&core->totals->tokens, 1);
	claw_count(&core->totals->text_bytes, record->len);
	account(core, entry, record->written_ns, now_ns);
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
	if (!claw_is_text(core->scratch, record->len))
		return -CLAW_BAD_CLOSE;
	if (stream < CLAW_UNSURE && record->ring_seq <= core->streams.table[stream].ring_seq)
		return 0; /* as a token that comes again */
	CLAW_FAILPOINT("copied");
	if (record->kind == CLAW_CLOSE) {
		ring->handles[record->handle] = CLAW_NONE;
		if (stream < CLAW_UNSURE)
			end_stream(core, ring, stream, record->ring_seq, core->scratch, record->len, now_ns);
		return 0;
	}
	if (!record->count)
		return -CLAW_BAD_COUNT;
	if (stream >= CLAW_UNSURE)
		return 0;
	core->streams.table[stream].text = (struct claw_text){ 0 }; /* what is missing there, nobody knows */
	struct claw_spooled *spooled = claw_stream_reserve(&core->streams, stream, record->len);
	if (!spooled) {
		claw_stream_drop(&core->streams, stream, record->count, record->ring_seq);
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
	CLAW_FAILPOINT("committed");
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
		CLAW_FAILPOINT("acked");
	}
	return result;
}
