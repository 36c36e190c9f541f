/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_TURN_H
#define CLAW_TURN_H

#include <stddef.h>
#include <stdint.h>

#include "drain.h"
#include "hints.h"
#include "outbox.h"
#include "pacing.h"

#include "turn.cdef.h"

#define CLAW_DISCARD (CLAW_NONE - 1)
#define CLAW_UNSURE (CLAW_NONE - 2)

/* One ring on clawd's side */
struct claw_ring {
	uint32_t state;
	uint32_t violation;
	int event_fd;
	uint32_t live; /* streams */
	uint64_t ring_id;
	uint64_t records, tokens, bytes;
	struct claw_page_peer peer;
	uint64_t woken_pos; /* drain.pos at its last wake-up */
	uint32_t idle_wakes; /* in a row that brought nothing */
	uint64_t mute_ns; /* how long it is not listened to next time; 0 = it never stormed */
	uint64_t muted_until_ns; /* 0 = it is listened to */
	struct claw_hints hints;
	struct claw_drain drain;
	/*
	 * Stream index, CLAW_NONE = not open, CLAW_DISCARD = clawd ended it, CLOSE not seen yet, CLAW_UNSURE = either of the
	 * two: an earlier clawd may have taken its CLOSE, or not
	 */
	uint32_t *handles;
	uint64_t known_seq; /* an earlier clawd took all records up to this ring_seq */
	uint32_t polled; /* its producer has no eventfd of ours yet: look at it by the clock */
};

/* A stream that a start found, and where its records came from */
struct claw_orphan {
	uint64_t ring_id;
	uint64_t open_seq;
	uint32_t handle;
	uint32_t stream; /* index */
};

struct claw_core {
	struct claw_limits limits;
	struct claw_spool spool;
	struct claw_streams streams;
	struct claw_outbox outbox;
	struct claw_pacing pacing;
	struct claw_rows rows;
	struct claw_ring *rings;
	uint32_t ring_used; /* entries ever used */
	uint32_t ring_first; /* whose turn it is to be first */
	int epoll_fd;
	int pending; /* the last turn left something undone */
	int draining; /* no stream opens any more */
	uint64_t expire_ns; /* next deadline of a stream, 0 = none */
	uint64_t hints_due_ns; /* when to look what engines should hear, 0 = there is nothing */
	uint32_t pressure; /* as told by claw_core_pressure */
	struct claw_orphan *orphans; /* streams that a start found, in the order of their rings, until those are adopted */
	uint32_t orphan_count;
	uint32_t polled; /* rings that are */
	uint64_t poll_ns; /* how soon next, 0 = they are new */
	struct claw_outcome outcome;
	struct claw_event events[CLAW_EVENT_COUNT];
	struct claw_page page;
	struct claw_totals *totals; /* in the page, as are the histograms */
	uint8_t scratch[CLAW_RECORD_MAX];
	uint8_t unpacked[CLAW_FRAME_MAX];
};

/* Returns how long that was; -1: the times were not believed, and are counted as odd. */
int64_t claw_account(struct claw_core *core, int hist, uint64_t from_ns, uint64_t to_ns);
/* turn.c: renew the outcome's count of first tokens that are waited for; one may be sent between turns */
void claw_tell_first(struct claw_core *core);
/* show.c: the page */
void claw_show(struct claw_core *core, uint64_t now_ns);
/* `whole`: also who is at its other end */
void claw_show_ring(struct claw_core *core, struct claw_ring *ring, int whole);
static inline int claw_ring_is_drained(const struct claw_ring *ring)
{
	return ring->state == CLAW_RING_LIVE || ring->state == CLAW_RING_LEFT;
}

/* wait.c: have the ring's eventfd wake claw_wait */
int claw_ring_hear(struct claw_core *core, struct claw_ring *ring);
/* turn.c: a place for one more ring, NULL = there is none; and unmap one */
struct claw_ring *claw_ring_take(struct claw_core *core);
void claw_ring_unmap(struct claw_core *core, struct claw_ring *ring);
/* intake.c: what the records of a ring mean */
int claw_intake(struct claw_core *core, struct claw_ring *ring, uint64_t now_ns);
void claw_ring_end(struct claw_core *core, struct claw_ring *ring, const char *reason, uint64_t now_ns);
/* A stream without a ring ends. */
void claw_orphan_end(struct claw_core *core, uint32_t stream, const char *reason, uint64_t now_ns);
void claw_stream_cancel(struct claw_core *core, uint32_t stream, uint64_t now_ns);
/* Likewise, as nobody reads it. */
void claw_stream_unread(struct claw_core *core, uint32_t stream, uint64_t now_ns);

#endif
