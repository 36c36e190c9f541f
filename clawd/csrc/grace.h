/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Grace: what is to become of a stream that nobody reads. Its last reader may have asked for it to be cancelled then; a
 * timer gives that reader, or another one, time to come (again).
 */
#ifndef CLAW_GRACE_H
#define CLAW_GRACE_H

#include <stdint.h>

#include "timers.h"

struct claw_core;
struct claw_streams;
struct claw_stream;

struct claw_grace {
	struct claw_timers timers; /* when each stream's time is over */
	uint32_t awaited; /* names among them that have not opened */
};

int claw_grace_init(struct claw_grace *ret_grace, uint32_t max);
void claw_grace_deinit(struct claw_grace *grace);
/*
 * What holds for this stream from now on when nobody reads it: cancel it grace_ms after its last reader left; 0 = keep
 * it. The one place where this changes.
 */
void claw_stream_grace(struct claw_streams *streams, uint32_t index, uint32_t grace_ms);
/* Nobody reads it since now_ns: its time runs, if it is to be cancelled. */
void claw_grace_start(struct claw_streams *streams, uint32_t index, uint64_t now_ns);
/* Somebody reads it, or it is no more. Also without a timer. */
void claw_grace_stop(struct claw_streams *streams, uint32_t index);
/* Does its time run? */
int claw_grace_runs(const struct claw_streams *streams, uint32_t index);
/* When the next one's time is over, 0 = none runs. */
uint64_t claw_grace_due(const struct claw_streams *streams);
/* Cancel the streams whose time is over. */
void claw_grace_expire(struct claw_core *core, uint64_t now_ns);

#endif
