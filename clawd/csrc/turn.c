/* SPDX-License-Identifier: Apache-2.0 */
#include "turn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "barrier.h"

struct claw_core *claw_core_create(const struct claw_limits *limits, int page_fd, int *ret_error)
{
	struct claw_core *core = calloc(1, sizeof(*core));
	int result = -ENOMEM;
	if (!core)
		goto fail;
	core->limits = *limits;
	core->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (core->epoll_fd < 0) {
		result = -errno;
		goto fail;
	}
	if (!limits->max_rings || limits->max_rings > 4096) {
		result = -EINVAL;
		goto fail;
	}
	core->rings = calloc(limits->max_rings, sizeof(*core->rings));
	if (!core->rings)
		goto fail;
	result = claw_page_init(&core->page, page_fd, limits->max_streams, limits->max_rings, limits->max_connections);
	if (result < 0)
		goto fail;
	core->totals = core->page.totals;
	result = claw_spool_init(&core->spool, limits->spool_bytes);
	if (!result)
		result = claw_streams_init(&core->streams, &core->spool, limits->max_streams, limits->keep_ns,
					   limits->stream_bytes);
	if (!result)
		result = claw_pacing_init(&core->pacing, limits->max_streams);
	if (!result)
		result = claw_outbox_init(&core->outbox, &core->streams, limits->max_connections,
					  limits->max_attachments);
	core->outbox.attachments_per_user = limits->user_attachments;
	if (!result)
		return core;
fail:
	claw_core_destroy(core);
	*ret_error = result;
	return NULL;
}

void claw_core_destroy(struct claw_core *core)
{
	if (!core)
		return;
	/* Rings stay as they are: to their producers it is as if clawd slept, and the next one goes on with them */
	for (uint32_t i = 0; i < core->ring_used; i++)
		if (core->rings[i].state != CLAW_RING_FREE)
			claw_ring_unmap(core, &core->rings[i]);
	free(core->orphans);
	claw_outbox_deinit(&core->outbox);
	claw_pacing_deinit(&core->pacing, core->limits.max_streams);
	claw_rows_deinit(&core->rows);
	claw_streams_deinit(&core->streams);
	claw_spool_deinit(&core->spool);
	claw_page_deinit(&core->page);
	if (core->epoll_fd > 0)
		close(core->epoll_fd);
	free(core->rings);
	free(core);
}

int claw_core_map_spool(struct claw_core *core, int fd, uint64_t bytes)
{
	return claw_spool_map(&core->spool, fd, bytes);
}

int claw_core_limit(struct claw_core *core, uint64_t stream_bytes, uint64_t keep_ns)
{
	int result = claw_streams_limit(&core->streams, keep_ns, stream_bytes);
	if (result < 0)
		return result;
	core->limits.stream_bytes = stream_bytes;
	core->limits.keep_ns = keep_ns;
	core->pending = 1; /* the next turn finds what is over by now, and when the rest will be */
	return 0;
}

void claw_core_drain(struct claw_core *core)
{
	core->draining = 1;
}

int claw_core_watch(struct claw_core *core, int fd, uint32_t tag)
{
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = tag };
	return epoll_ctl(core->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

int claw_core_unwatch(struct claw_core *core, int fd)
{
	return epoll_ctl(core->epoll_fd, EPOLL_CTL_DEL, fd, NULL) < 0 ? -errno : 0;
}

/* --- rings --- */

struct claw_ring *claw_ring_take(struct claw_core *core)
{
	uint32_t index = 0;
	while (index < core->ring_used && core->rings[index].state != CLAW_RING_FREE)
		index++;
	if (index == core->limits.max_rings)
		return NULL;
	if (index == core->ring_used)
		core->ring_used++;
	return &core->rings[index];
}

void claw_ring_unmap(struct claw_core *core, struct claw_ring *ring)
{
	core->polled -= ring->polled;
	if (ring->event_fd >= 0) {
		epoll_ctl(core->epoll_fd, EPOLL_CTL_DEL, ring->event_fd, NULL);
		close(ring->event_fd);
	}
	claw_drain_deinit(&ring->drain);
	free(ring->handles);
	*ring = (struct claw_ring){ 0 };
}

int claw_ring_add(struct claw_core *core, int data_fd, int ctl_fd, int event_fd, uint64_t ring_bytes, uint64_t ring_id,
		  uint64_t daemon_epoch)
{
	struct claw_ring *ring = claw_ring_take(core);
	if (!ring)
		return -EDQUOT;
	int result = claw_drain_init(&ring->drain, data_fd, ctl_fd, ring_bytes);
	if (result < 0)
		return result;
	ring->handles = malloc(CLAW_HANDLE_COUNT * sizeof(*ring->handles));
	ring->event_fd = ring->handles ? dup(event_fd) : -1;
	result = ring->handles ? ring->event_fd < 0 ? -errno : claw_ring_hear(core, ring) : -ENOMEM;
	if (result < 0) {
		if (ring->event_fd >= 0)
			close(ring->event_fd);
		free(ring->handles);
		claw_drain_deinit(&ring->drain);
		*ring = (struct claw_ring){ 0 };
		return result;
	}
	memset(ring->handles, 0xff, CLAW_HANDLE_COUNT * sizeof(*ring->handles)); /* CLAW_NONE */

	struct claw_ctl *ctl = ring->drain.ctl;
	ctl->magic = CLAW_MAGIC;
	ctl->layout = CLAW_LAYOUT;
	ctl->size = sizeof(*ctl);
	ctl->record_max = ring->drain.record_max;
	ctl->ring_bytes = ring_bytes;
	ctl->ring_id = ring_id;
	ctl->daemon_epoch = daemon_epoch;
	claw_store_release(&ctl->state, CLAW_STATE_OPEN);
	ring->drain.next_seq = 1;
	ring->ring_id = ring_id;
	ring->state = CLAW_RING_LIVE;
	claw_hints_begin(core, ring, 1); /* due at once */
	claw_show_ring(core, ring, 1);
	return (int)(ring - core->rings);
}

static struct claw_ring *ring_of(const struct claw_core *core, int index)
{
	return index >= 0 && (uint32_t)index < core->ring_used ? &core->rings[index] : NULL;
}

int claw_ring_leave(struct claw_core *core, int index)
{
	struct claw_ring *ring = ring_of(core, index);
	if (!ring || ring->state == CLAW_RING_FREE)
		return -ENOENT;
	if (ring->state == CLAW_RING_LIVE)
		ring->state = CLAW_RING_LEFT;
	claw_show_ring(core, ring, 1);
	core->pending = 1;
	return 0;
}

int claw_ring_drop(struct claw_core *core, int index)
{
	struct claw_ring *ring = ring_of(core, index);
	if (!ring || ring->state == CLAW_RING_FREE)
		return -ENOENT;
	claw_store_release(&ring->drain.ctl->state,
			   ring->state == CLAW_RING_BROKEN ? CLAW_STATE_QUARANTINED : CLAW_STATE_CLOSED);
	claw_ring_unmap(core, ring);
	claw_show_ring(core, ring, 1);
	return 0;
}

int claw_ring_row(const struct claw_core *core, int index, struct claw_ring_row *ret_row)
{
	const struct claw_ring *ring = ring_of(core, index);
	if (!ring || ring->state == CLAW_RING_FREE)
		return -ENOENT;
	uint64_t used = claw_load_relaxed(&ring->drain.data->head) - ring->drain.pos;
	*ret_row = (struct claw_ring_row){
		.ring_bytes = ring->drain.ring_bytes,
		.used_bytes = used <= ring->drain.ring_bytes ? used : ring->drain.ring_bytes,
		.records = ring->records,
		.tokens = ring->tokens,
		.bytes = ring->bytes,
		.state = ring->state,
		.violation = ring->violation,
		.streams = ring->live,
	};
	return 0;
}

static int take(struct claw_core *core, struct claw_ring *ring, uint64_t now_ns)
{
	int result = claw_intake(core, ring, now_ns);
	if (result < 0) {
		ring->violation = (uint32_t)-result;
		ring->state = CLAW_RING_BROKEN;
		claw_count(&core->totals->quarantined, 1);
		core->outcome.rings_settled++;
		claw_store_relaxed(&ring->drain.ctl->state_reason, ring->violation);
		claw_store_release(&ring->drain.ctl->state, CLAW_STATE_QUARANTINED);
		claw_ring_end(core, ring, "error:quarantined", now_ns);
		return 0;
	}
	if (!result && ring->state == CLAW_RING_LEFT) {
		claw_ring_end(core, ring, "producer_lost", now_ns);
		ring->state = CLAW_RING_DONE;
		core->outcome.rings_settled++;
	}
	return result;
}

static int intake(struct claw_core *core, struct claw_ring *ring, uint64_t now_ns)
{
	uint64_t records = ring->records;
	uint32_t live = ring->live, state = ring->state;
	int result = take(core, ring, now_ns);
	if (ring->records != records || ring->live != live || ring->state != state)
		claw_show_ring(core, ring, 0);
	return result;
}

/* --- the turn --- */

void claw_tell_first(struct claw_core *core)
{
	core->outcome.first_until_ns = claw_first_until(&core->streams);
	core->outcome.first_count = core->streams.first_count;
}

int claw_turn(struct claw_core *core, uint64_t now_ns)
{
	const uint64_t second_ns = 1000000000;
	int more = 0;
	claw_count(&core->totals->turns, 1);
	/* What the last turn sent is accounted by now; its places are free for what opens in this one */
	claw_outbox_sweep(&core->outbox, now_ns);
	/* Before new ends come: a stream is packed once at least, however short it is kept */
	claw_streams_expire(&core->streams, now_ns);
	claw_grace_expire(core, now_ns);
	claw_first_expire(&core->streams, now_ns);
	/* Rings whose producer is gone come first, so that their ends precede what a successor opens */
	for (uint32_t i = 0; i < core->ring_used; i++)
		if (core->rings[i].state == CLAW_RING_LEFT)
			more |= intake(core, &core->rings[i], now_ns);
	if (core->ring_used) {
		core->ring_first = (core->ring_first + 1) % core->ring_used;
		for (uint32_t i = 0; i < core->ring_used; i++) {
			struct claw_ring *ring = &core->rings[(core->ring_first + i) % core->ring_used];
			if (ring->state == CLAW_RING_LIVE)
				more |= intake(core, ring, now_ns);
		}
	}
	/* To the next whole second: a thousand short answers that end are not a thousand wake-ups a minute later */
	uint64_t due = claw_streams_due(&core->streams, now_ns);
	core->expire_ns = due ? (due / second_ns + 1) * second_ns : 0;
	claw_pacing_turn(core, now_ns);
	claw_hints_turn(core, now_ns);
	claw_outbox_wake(&core->outbox);
	more |= claw_outbox_build(&core->outbox);
	claw_count(&core->totals->frames, core->outbox.frame_count);
	claw_count(&core->totals->frame_bytes, core->outbox.out_bytes);
	core->outcome.frame_count = core->outbox.frame_count;
	core->outcome.unmet_ns = core->outbox.unmet_ns;
	claw_tell_first(core);
	core->outcome.more = (uint32_t)more;
	core->outcome.unproven = core->outbox.unproven;
	core->pending = more;
	claw_show(core, now_ns);
	return more;
}

const struct claw_outcome *claw_outcome(const struct claw_core *core)
{
	return &core->outcome;
}

const struct claw_frame *claw_frames(const struct claw_core *core)
{
	return core->outbox.frames;
}

const struct claw_event *claw_events(const struct claw_core *core)
{
	return core->events;
}

const uint8_t *claw_out(const struct claw_core *core)
{
	return core->outbox.out;
}

int64_t claw_account(struct claw_core *core, int hist, uint64_t from_ns, uint64_t to_ns)
{
	/* A producer's clock is only believed as far as it makes sense: it may live in another time namespace */
	const uint64_t second_ns = 1000000000, hour_ns = 3600 * second_ns;
	uint64_t took_ns = to_ns - from_ns;
	/* A turn's time is when it began: what was written while it went on, and taken by it, waited for nothing */
	if (from_ns - to_ns < second_ns)
		took_ns = 0;
	if (took_ns >= hour_ns) {
		claw_count(&core->totals->odd_clock, 1);
		return -1;
	}
	claw_hist_add(&core->page.hists[hist], took_ns);
	return (int64_t)took_ns;
}

/* --- clients --- */

uint32_t claw_connect(struct claw_core *core)
{
	core->pending = 1; /* shown by the next turn, as are the changes below */
	return claw_connection_open(&core->outbox);
}

int claw_disconnect(struct claw_core *core, uint32_t connection, uint64_t now_ns)
{
	core->pending = 1;
	return claw_connection_close(&core->outbox, connection, now_ns);
}

int claw_block(struct claw_core *core, uint32_t connection, int blocked)
{
	core->pending = 1;
	return claw_connection_block(&core->outbox, connection, blocked);
}

int claw_flow(struct claw_core *core, uint32_t connection, const uint8_t *message, size_t len)
{
	core->pending = 1;
	return claw_flow_take(&core->outbox, connection, message, len);
}

int claw_attach_stream(struct claw_core *core, uint32_t connection, const struct claw_attach *attach, uint64_t now_ns)
{
	int result = claw_attachment_open(&core->outbox, connection, attach, now_ns);
	core->pending = 1;
	if (result == 0 && attach->cancel)
		claw_cancel(core, connection, attach->id, now_ns);
	return result;
}

int claw_detach(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns)
{
	core->pending = 1;
	return claw_attachment_close(&core->outbox, connection, id, now_ns);
}

int claw_unmet(struct claw_core *core, uint64_t now_ns, struct claw_unmet *ret_unmet, int max)
{
	return claw_outbox_unmet(&core->outbox, now_ns, ret_unmet, max);
}

int claw_cancel(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns)
{
	uint32_t at = claw_attachment_find(&core->outbox, connection, id);
	if (at == CLAW_NONE)
		return -ENOENT;
	struct claw_attachment *attachment = &core->outbox.attachments[at];
	core->pending = 1;
	attachment->cancel = 1;
	/* Else it counts once it is known that this reader is meant */
	if (attachment->admitted || !core->streams.table[attachment->stream].restricted)
		claw_stream_cancel(core, attachment->stream, now_ns);
	return 0;
}

int claw_cancel_stream(struct claw_core *core, const uint8_t *name, uint32_t name_len, uint64_t now_ns)
{
	uint32_t stream = claw_stream_find(&core->streams, name, name_len);
	uint32_t state = stream == CLAW_NONE ? CLAW_STREAM_FREE : core->streams.table[stream].state;
	if (state == CLAW_STREAM_FREE || state == CLAW_STREAM_AWAITED)
		return -ENOENT;
	if (state != CLAW_STREAM_LIVE)
		return -ESTALE;
	core->pending = 1;
	claw_stream_cancel(core, stream, now_ns);
	return 0;
}

/* --- figures --- */

int claw_stream_at(const struct claw_core *core, uint32_t stream, struct claw_stream_row *ret_row)
{
	if (stream >= core->streams.used || core->streams.table[stream].state == CLAW_STREAM_FREE)
		return -ENOENT;
	*ret_row = core->streams.table[stream].row;
	return 0;
}
