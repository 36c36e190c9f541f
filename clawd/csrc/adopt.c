/* SPDX-License-Identifier: Apache-2.0 */
/* Adoption: a ring that an earlier clawd made goes on here, with the streams that came from it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "barrier.h"
#include "turn.h"

/* The streams of a ring, as recovery listed them: those from *ret_from up to the index returned */
static uint32_t orphans_of(const struct claw_core *core, uint64_t ring_id, uint32_t *ret_from)
{
	uint32_t low = 0, high = core->orphan_count;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		if (core->orphans[middle].ring_id < ring_id)
			low = middle + 1;
		else
			high = middle;
	}
	*ret_from = low;
	while (low < core->orphan_count && core->orphans[low].ring_id == ring_id)
		low++;
	return low;
}

static int waits(const struct claw_stream *stream)
{
	return stream->state == CLAW_STREAM_LIVE && stream->ring == CLAW_NONE;
}

/*
 * Up to which ring_seq were records taken? In order and each at once, so that a stream that has one, and a handle's word
 * that answers one, speak for all before it. What was taken after these left no trace, and does no harm again.
 */
static uint64_t find_known(const struct claw_core *core, const struct claw_ring *ring, uint32_t from, uint32_t to)
{
	uint64_t known = 0;
	for (uint32_t i = from; i < to; i++) {
		const struct claw_stream *stream = &core->streams.table[core->orphans[i].stream];
		if (stream->ring_id == ring->ring_id && stream->ring_seq > known)
			known = stream->ring_seq;
	}
	for (uint32_t handle = 0; handle < CLAW_HANDLE_COUNT; handle++) {
		uint64_t word = claw_load_relaxed(&ring->drain.ctl->stopped[handle]);
		if (word & 0xff && word >> 8 > known)
			known = word >> 8;
	}
	return known;
}

static void take_streams(struct claw_core *core, struct claw_ring *ring, uint32_t from, uint32_t to, uint64_t now_ns)
{
	for (uint32_t i = from; i < to; i++) {
		uint32_t index = core->orphans[i].stream;
		struct claw_stream *stream = &core->streams.table[index];
		if (!waits(stream))
			continue;
		stream->ring = stream->row.ring = (uint32_t)(ring - core->rings);
		ring->handles[stream->handle] = index;
		ring->live++;
		uint64_t word = claw_load_relaxed(&ring->drain.ctl->stopped[stream->handle]);
		if (word & 0xff && word >> 8 == stream->open_seq)
			claw_stream_cancel(core, index, now_ns); /* which had come as far as telling the producer */
		claw_stream_touch(&core->streams, index, CLAW_UNSHOWN_PART);
	}
}

static int is_left(const struct claw_ring *ring, uint64_t ring_bytes, uint64_t ring_id)
{
	const struct claw_ctl *ctl = ring->drain.ctl;
	return ctl->magic == CLAW_MAGIC && ctl->layout == CLAW_LAYOUT && !ctl->incompatible &&
	       ctl->size >= sizeof(*ctl) && ctl->ring_bytes == ring_bytes && ctl->ring_id == ring_id && ring_id &&
	       ctl->record_max == ring->drain.record_max && ctl->state == CLAW_STATE_OPEN &&
	       ctl->ack_pos % CLAW_RECORD_ALIGN == 0;
}

int claw_ring_adopt(struct claw_core *core, int data_fd, int ctl_fd, uint64_t ring_bytes, uint64_t ring_id,
		    uint64_t daemon_epoch, uint64_t now_ns)
{
	struct claw_ring *ring = claw_ring_take(core);
	if (!ring)
		return -EDQUOT;
	int result = claw_drain_init(&ring->drain, data_fd, ctl_fd, ring_bytes);
	if (result < 0)
		return result;
	ring->event_fd = -1;
	ring->handles = malloc(CLAW_HANDLE_COUNT * sizeof(*ring->handles));
	if (!ring->handles || !is_left(ring, ring_bytes, ring_id)) {
		result = ring->handles ? -EBADMSG : -ENOMEM;
		claw_ring_unmap(core, ring);
		return result;
	}
	for (uint32_t handle = 0; handle < CLAW_HANDLE_COUNT; handle++)
		ring->handles[handle] = CLAW_UNSURE;
	struct claw_ctl *ctl = ring->drain.ctl;
	ring->ring_id = ring_id;
	ring->drain.pos = ring->woken_pos = ctl->ack_pos;
	/* From there on: a generation that was signalled before would not be signalled again, and a token sleep */
	ring->drain.wake = ctl->need_wake;
	claw_drain_awake(&ring->drain);
	ring->state = CLAW_RING_LIVE;
	ring->polled = 1;
	claw_count(&core->totals->recovered_rings, 1);
	core->polled++;
	core->poll_ns = 0;
	uint32_t from, to = orphans_of(core, ring_id, &from);
	ring->known_seq = find_known(core, ring, from, to);
	take_streams(core, ring, from, to, now_ns);
	claw_hints_begin(core, ring, now_ns);
	core->pending = 1;
	claw_show_ring(core, ring, 1);
	/* Last: its producer looks for us when it sees another epoch */
	claw_store_release(&ctl->daemon_epoch, daemon_epoch);
	return (int)(ring - core->rings);
}

int claw_ring_hear_again(struct claw_core *core, int index, int event_fd)
{
	if (index < 0 || (uint32_t)index >= core->ring_used || !claw_ring_is_drained(&core->rings[index]))
		return -ENOENT;
	struct claw_ring *ring = &core->rings[index];
	if (ring->event_fd >= 0)
		return -EEXIST;
	ring->event_fd = dup(event_fd);
	int result = ring->event_fd < 0 ? -errno : claw_ring_hear(core, ring);
	if (result < 0 && ring->event_fd >= 0) {
		close(ring->event_fd);
		ring->event_fd = -1;
	}
	return result;
}

int claw_orphans_end(struct claw_core *core, uint64_t ring_id, const char *reason, uint64_t now_ns)
{
	int count = 0;
	uint32_t from = 0, to = core->orphan_count;
	if (ring_id)
		to = orphans_of(core, ring_id, &from);
	for (uint32_t i = from; i < to; i++) {
		if (!waits(&core->streams.table[core->orphans[i].stream]))
			continue;
		claw_orphan_end(core, core->orphans[i].stream, reason, now_ns);
		count++;
	}
	if (!ring_id) {
		free(core->orphans);
		core->orphans = NULL;
		core->orphan_count = 0;
	}
	core->pending = 1;
	return count;
}
