/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_WAYS_H
#define CLAW_WAYS_H

#include <stdint.h>

#include "ways.cdef.h"

struct claw_rows {
	const uint8_t *base; /* NULL = there are none, and entries is 0 */
	uint64_t bytes;
	struct claw_rows_layout layout;
};

/* Of a connection */
struct claw_way {
	uint64_t cookie;
	uint32_t slot; /* of its row, + 1; 0 = not found */
	uint32_t far; /* on another host: bytes are what is short when it is congested, and compact encoding saves them */
	uint32_t loss_ppm;
	struct claw_told told;
	uint64_t seen_ns; /* when that was taken, 0 = never */
};

/* Take what its row says, if that changed: two cache lines, no call of the kernel. */
void claw_way_refresh(struct claw_core *core, uint32_t index, uint64_t now_ns);
void claw_rows_deinit(struct claw_rows *rows);

#endif
