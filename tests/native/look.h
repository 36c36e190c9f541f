/* SPDX-License-Identifier: Apache-2.0 */
/* What clawd would take out of a ring: drain.c behind names that do not meet those of clawd_ring.h */
#ifndef LOOK_H
#define LOOK_H

#include <stdint.h>

#include "memory.h"

enum { LOOK_MAX = 32 };

struct seen {
	struct claw_record header;
	uint8_t payload[CLAW_RECORD_MAX];
};

/* All records from position pos on, whose first has ring_seq seq. Returns their number, or clawd's -CLAW_BAD_…. */
int look_at_ring(const struct memory *memory, uint64_t pos, uint64_t seq, struct seen *ret_seen);

#endif
