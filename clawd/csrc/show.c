/* SPDX-License-Identifier: Apache-2.0 */
/* Showing: what a turn changed goes to the page, once a turn and never per token. */
#include <errno.h>
#include <string.h>

#include "barrier.h"
#include "turn.h"

#define NS 1000000000ull

/* Rows are not cleared first: what is not set is not written */
static void show_stream(struct claw_core *core, uint32_t index, int whole)
{
	const struct claw_stream *stream = &core->streams.table[index];
	const struct claw_stream_row *row = &stream->row;
	struct claw_page_stream shown;
	shown.state = row->state;
	shown.incarnation = row->incarnation;
	shown.ring = row->ring;
	shown.attachments = row->attachments;
	shown.next_seq = stream->next_seq;
	shown.tokens = row->tokens;
	shown.text_bytes = row->text_bytes;
	shown.spool_bytes = row->spool_bytes;
	shown.first_sent_ns = row->first_sent_ns;
	shown.released_seq = stream->released_seq;
	uint64_t lag_ms = row->lag_ns / 1000000;
	shown.lag_ms = lag_ms < UINT32_MAX ? (uint32_t)lag_ms : UINT32_MAX;
	shown.pace = stream->paced ? core->pacing.pacers[index].mode : CLAW_PACE_DEFAULT;
	if (whole) {
		shown.requested_ns = row->requested_ns;
		shown.opened_ns = row->opened_ns;
		shown.ended_ns = row->ended_ns;
		shown.name_len = row->name_len;
		shown.reason_len = claw_page_cut(row->reason, row->reason_len, CLAW_PAGE_REASON);
		memcpy(shown.name, row->name, sizeof(shown.name));
		memcpy(shown.reason, row->reason, sizeof(shown.reason));
	}
	claw_page_put_stream(&core->page, index, &shown, whole);
}

static void show_connection(struct claw_core *core, uint32_t index, int whole)
{
	const struct claw_connection *connection = &core->outbox.connections[index];
	struct claw_page_connection shown;
	shown.number = connection->id;
	shown.attachments = connection->attachment_count;
	shown.blocked = connection->blocked;
	shown.loss_ppm = connection->way.loss_ppm;
	shown.charged = connection->charged;
	shown.acked = connection->acked;
	shown.rtt_us = connection->way.told.rtt_us;
	shown.jitter_us = connection->way.told.jitter_us;
	shown.way_ns = connection->way.told.at_ns;
	shown.way_seen_ns = connection->way.seen_ns;
	if (whole)
		shown.peer = connection->peer;
	claw_page_put_connection(&core->page, index, &shown, whole);
}

void claw_show_ring(struct claw_core *core, struct claw_ring *ring, int whole)
{
	struct claw_page_ring shown;
	uint64_t used = 0;
	if (ring->state != CLAW_RING_FREE)
		used = claw_load_relaxed(&ring->drain.data->head) - ring->drain.pos;
	shown.state = ring->state;
	shown.violation = ring->violation;
	shown.streams = ring->live;
	shown.reserved = 0;
	shown.ring_bytes = ring->drain.ring_bytes;
	shown.used_bytes = used <= ring->drain.ring_bytes ? used : ring->drain.ring_bytes;
	shown.records = ring->records;
	shown.tokens = ring->tokens;
	shown.bytes = ring->bytes;
	if (whole)
		shown.peer = ring->peer;
	claw_page_put_ring(&core->page, (uint32_t)(ring - core->rings), &shown, whole);
}

static void show_totals(struct claw_core *core)
{
	struct claw_totals *totals = core->totals;
	claw_store_relaxed(&totals->dropped, core->streams.dropped_tokens);
	claw_store_relaxed(&totals->evicted_blocks, core->streams.evicted_blocks);
	claw_store_relaxed(&totals->gaps, core->outbox.gaps);
	claw_store_relaxed(&totals->compact_saved_bytes, core->outbox.saved_bytes);
	claw_store_relaxed(&totals->copied_frames, core->outbox.copies);
	claw_store_relaxed(&totals->streams_live, core->streams.count[CLAW_STREAM_LIVE]);
	claw_store_relaxed(&totals->streams_ended, core->streams.count[CLAW_STREAM_ENDED]);
	claw_store_relaxed(&totals->streams_awaited, core->streams.count[CLAW_STREAM_AWAITED]);
	claw_store_relaxed(&totals->streams_gone, core->streams.count[CLAW_STREAM_GONE]);
	claw_store_relaxed(&totals->attachments, core->outbox.attachment_count);
	claw_store_relaxed(&totals->first_count, core->streams.first_count);
	claw_store_relaxed(&totals->pressure, core->pressure);
	claw_store_relaxed(&totals->spool_blocks, core->spool.block_count);
	claw_store_relaxed(&totals->spool_free, core->spool.free_count);
}

void claw_show(struct claw_core *core, uint64_t now_ns)
{
	struct claw_streams *streams = &core->streams;
	while (streams->unshown != CLAW_NONE) {
		uint32_t index = streams->unshown;
		struct claw_stream *stream = &streams->table[index];
		streams->unshown = stream->next_unshown;
		show_stream(core, index, stream->unshown == CLAW_UNSHOWN_WHOLE);
		stream->unshown = 0;
	}
	struct claw_outbox *outbox = &core->outbox;
	while (outbox->unshown != CLAW_NONE) {
		uint32_t index = outbox->unshown;
		struct claw_connection *connection = &outbox->connections[index];
		outbox->unshown = connection->next_unshown;
		show_connection(core, index, connection->unshown == CLAW_UNSHOWN_WHOLE);
		connection->unshown = 0;
	}
	show_totals(core);
	if (now_ns >= core->page.mark_due_ns) {
		claw_page_mark(&core->page, now_ns);
		core->page.mark_due_ns = now_ns + CLAW_PAGE_MARK_S * NS;
	}
	claw_page_beat(&core->page, now_ns);
}

const struct claw_totals *claw_totals(struct claw_core *core)
{
	show_totals(core);
	return core->totals;
}

const struct claw_hist *claw_hist(const struct claw_core *core, int which)
{
	return which >= 0 && which < CLAW_HIST_COUNT ? &core->page.hists[which] : NULL;
}

void claw_core_publish(struct claw_core *core, uint32_t pid, uint64_t daemon_epoch, uint64_t started_ns,
		       const char *version, const char *runtime_dir)
{
	struct claw_page_header *header = core->page.header;
	header->pid = pid;
	header->daemon_epoch = daemon_epoch;
	header->started_ns = started_ns;
	header->spool_bytes = core->limits.spool_bytes;
	memcpy(header->version, version, strnlen(version, sizeof(header->version) - 1));
	size_t len = strlen(runtime_dir);
	if (len < sizeof(header->runtime_dir))
		memcpy(header->runtime_dir, runtime_dir, len);
	/* What an adopted ring holds waited for clawd: that says nothing of how it is now */
	core->page.mark_due_ns = started_ns + (core->totals->recovered_rings ? CLAW_PAGE_SETTLE_S * NS : 0);
	claw_show(core, started_ns);
	claw_page_publish(&core->page);
}

int claw_ring_label(struct claw_core *core, int index, const struct claw_page_peer *peer)
{
	if (index < 0 || (uint32_t)index >= core->ring_used || core->rings[index].state == CLAW_RING_FREE)
		return -ENOENT;
	core->rings[index].peer = *peer;
	claw_show_ring(core, &core->rings[index], 1);
	return 0;
}

int claw_connection_label(struct claw_core *core, uint32_t connection, const struct claw_page_peer *peer)
{
	core->pending = 1; /* shown by the next turn */
	return claw_connection_name(&core->outbox, connection, peer);
}

void claw_core_clients(struct claw_core *core, uint32_t count)
{
	claw_store_relaxed(&core->page.header->clients, count);
}
