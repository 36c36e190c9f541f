/* SPDX-License-Identifier: Apache-2.0 */
/* The next clawd, on copies of what the one that is looked at has in memory at this moment. */
#ifndef RESTART_H
#define RESTART_H

#include <stdint.h>

#include "memory.h"

struct expected {
	uint64_t open_seq;
	uint64_t next_seq; /* when all of the ring is taken */
	int ended;
};

/* NULL when it comes to just these streams, each record taken once; else what is wrong. */
const char *restart(const uint8_t *spool, uint64_t spool_bytes, const struct memory *memory,
		    const struct claw_limits *limits, const struct expected *streams, int count);

#endif
