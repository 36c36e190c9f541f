/* SPDX-License-Identifier: Apache-2.0 */
/* Showing: what a turn changed goes to the page, once a turn and never per token. */
#include <errno.h>
#include <string.h>

#include "barrier.h"
#include "turn.h"

static void show_stream(struct claw_core *core, uint32_t index)
{
	const struct claw_stream_row *row = &core->streams.table[index].row;
	struct claw_page_stream shown = {
		.state = row->state,
		.incarnation = row->incarnation,
		.ring = row->ring,
		.attachments = row->attachments,
		.tokens = row->tokens,
		.text_bytes = row->text_bytes,
		.spool_bytes = row->spool_bytes,
		.requested_ns = row->requested_ns,
		.opened_ns = row->opened_ns,
		.ended_ns = row->ended_ns,
		.first_sent_ns = row->first_sent_ns,
		.name_len = row->name_len,
		.reason_len = claw_page_cut(row->reason, row->reason_len, CLAW_PAGE_REASON),
	};
	memcpy(shown.name, row->name, row->name_len);
	memcpy(shown.reason, row->reason, shown.reason_len);
	claw_page_put_stream(&core->page, index, &shown);
}

static void show_connection(struct claw_core *core, uint32_t index)
{
	const struct claw_connection *connection = &core->outbox.connections[index];
	struct claw_page_connection shown = {
		.number = connection->id,
		.attachments = connection->attachment_count,
		.blocked = connection->blocked,
		.charged = connection->charged,
		.acked = connection->acked,
		.peer = connection->peer,
	};
	claw_page_put_connection(&core->page, index, &shown);
}

void claw_show_ring(struct claw_core *core, struct claw_ring *ring)
{
	struct claw_page_ring shown = { .state = CLAW_RING_FREE };
	if (ring->state != CLAW_RING_FREE) {
		uint64_t used = claw_load_relaxed(&ring->drain.data->head) - ring->drain.pos;
		shown = (struct claw_page_ring){
			.state = ring->state,
			.violation = ring->violation,
			.streams = ring->live,
			.ring_bytes = ring->drain.ring_bytes,
			.used_bytes = used <= ring->drain.ring_bytes ? used : ring->drain.ring_bytes,
			.records = ring->records,
			.tokens = ring->tokens,
			.bytes = ring->bytes,
			.peer = ring->peer,
		};
	}
	claw_page_put_ring(&core->page, (uint32_t)(ring - core->rings), &shown);
}

static void show_totals(struct claw_core *core)
{
	struct claw_totals *totals = core->totals;
	claw_store_relaxed(&totals->dropped, core->streams.dropped_tokens);
	claw_store_relaxed(&totals->evicted_blocks, core->streams.evicted_blocks);
	claw_store_relaxed(&totals->gaps, core->outbox.gaps);
	claw_store_relaxed(&totals->streams_live, core->streams.count[CLAW_STREAM_LIVE]);
	claw_store_relaxed(&totals->streams_ended, core->streams.count[CLAW_STREAM_ENDED]);
	claw_store_relaxed(&totals->streams_awaited, core->streams.count[CLAW_STREAM_AWAITED]);
	claw_store_relaxed(&totals->streams_gone, core->streams.count[CLAW_STREAM_GONE]);
	claw_store_relaxed(&totals->attachments, core->outbox.attachment_count);
	claw_store_relaxed(&totals->spool_blocks, core->spool.block_count);
	claw_store_relaxed(&totals->spool_free, core->spool.free_count);
}

void claw_show(struct claw_core *core, uint64_t now_ns)
{
	struct claw_streams *streams = &core->streams;
	while (streams->unshown != CLAW_NONE) {
		uint32_t index = streams->unshown;
		streams->unshown = streams->table[index].next_unshown;
		streams->table[index].unshown = 0;
		show_stream(core, index);
	}
	struct claw_outbox *outbox = &core->outbox;
	while (outbox->unshown != CLAW_NONE) {
		uint32_t index = outbox->unshown;
		outbox->unshown = outbox->connections[index].next_unshown;
		outbox->connections[index].unshown = 0;
		show_connection(core, index);
	}
	show_totals(core);
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
		       const char *version)
{
	struct claw_page_header *header = core->page.header;
	header->pid = pid;
	header->daemon_epoch = daemon_epoch;
	header->started_ns = started_ns;
	header->spool_bytes = core->limits.spool_bytes;
	size_t len = strnlen(version, sizeof(header->version) - 1);
	memcpy(header->version, version, len);
	claw_show(core, started_ns);
	claw_page_publish(&core->page);
}

int claw_ring_label(struct claw_core *core, int index, const struct claw_page_peer *peer)
{
	if (index < 0 || (uint32_t)index >= core->ring_used || core->rings[index].state == CLAW_RING_FREE)
		return -ENOENT;
	core->rings[index].peer = *peer;
	claw_show_ring(core, &core->rings[index]);
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
