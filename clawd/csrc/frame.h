/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_FRAME_H
#define CLAW_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "ring.h"

#include "frame.cdef.h"

_Static_assert(sizeof(struct claw_frame_header) == 16, "layout of a frame header");
_Static_assert(sizeof(struct claw_segment) == 24, "layout of a segment");
_Static_assert(sizeof(struct claw_spooled) == 24, "layout of a spooled record");
_Static_assert(sizeof(struct claw_part) == 40, "layout of a part");
_Static_assert(sizeof(struct claw_flow) == 16 && sizeof(struct claw_credit) == 16, "layout of a flow message");

static inline uint32_t claw_spooled_bytes(uint32_t len)
{
	return (uint32_t)sizeof(struct claw_spooled) + ((len + CLAW_SPOOLED_ALIGN - 1) & ~(uint32_t)(CLAW_SPOOLED_ALIGN - 1));
}

#endif
