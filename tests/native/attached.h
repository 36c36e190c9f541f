/* SPDX-License-Identifier: Apache-2.0 */
/* A producer on memory that the caller made, as if it had attached. Include clawd_ring.h first. */
#ifndef ATTACHED_H
#define ATTACHED_H

#include "memory.h"

static inline void attached_make(struct claw_producer *p, const struct memory *memory, uint64_t pos, uint64_t seq,
				 int event_fd)
{
	static uint32_t guard = CLAW_GUARD_LIVE;
	uint32_t handle;

	memset(p, 0, sizeof(*p));
	p->guard = &guard;
	p->ctl = memory->ctl;
	p->data = memory->data;
	p->ring = memory->ring;
	p->ring_bytes = p->capacity = memory->ring_bytes; /* no overflow */
	p->head = p->ack_pos = pos;
	p->ring_seq = seq;
	p->record_max = memory->ring_bytes / 4 < CLAW_RECORD_MAX ? (uint32_t)(memory->ring_bytes / 4) : CLAW_RECORD_MAX;
	p->owner = 1;
	p->event_fd = event_fd;
	p->control_fd = -1;
	for (handle = 0; handle < CLAW_HANDLE_COUNT; handle++)
		p->free_handles[p->free_count++] = (uint16_t)(CLAW_HANDLE_COUNT - 1 - handle);
	memory->ctl->ack_pos = pos;
	memory->data->head = pos;
}

#endif
