/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_PACING_H
#define CLAW_PACING_H

#include "pacer.h"
#include "timers.h"

#include "pacing.cdef.h"

struct claw_pacing {
	struct claw_pacer *pacers; /* by stream */
	struct claw_timers timers;
	struct claw_pace pace;
	uint32_t mode;
};

int claw_pacing_init(struct claw_pacing *ret_pacing, uint32_t max_streams);
void claw_pacing_deinit(struct claw_pacing *pacing, uint32_t max_streams);
/* After the intake: let arrive what came, and release what is due. */
void claw_pacing_turn(struct claw_core *core, uint64_t now_ns);
/* When it has something to do next, 0 = not as things stand. */
static inline uint64_t claw_pacing_due(const struct claw_pacing *pacing)
{
	return claw_timers_next(&pacing->timers);
}

#endif
