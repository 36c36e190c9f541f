/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_HINTS_H
#define CLAW_HINTS_H

#include <stdint.h>

struct claw_core;
struct claw_ring;

/* What a ring's producer was told, and what there is to tell it */
struct claw_hints {
	uint64_t lag_ns; /* the longest that a token of its streams was held since the last look */
	uint32_t refill; /* what the slowest of those that lagged go at in the long run */
	uint64_t worse_ns; /* when it was last as bad as told */
	uint32_t congested; /* one of its readers is */
	uint32_t rate, degrade, reason; /* as told */
};

#include "hints.cdef.h"

/* A ring begins, or goes on after an earlier clawd: what that told is taken back unless it holds here as well. */
void claw_hints_begin(struct claw_core *core, struct claw_ring *ring, uint64_t now_ns);
/* After the pacing: tell what changed, four times a second at most. */
void claw_hints_turn(struct claw_core *core, uint64_t now_ns);

#endif
