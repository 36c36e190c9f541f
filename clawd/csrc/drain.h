/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_DRAIN_H
#define CLAW_DRAIN_H

#include <stddef.h>
#include <stdint.h>

#include "ring.h"

#include "drain.cdef.h"

static inline uint64_t claw_record_bytes(uint32_t len)
{
	return (CLAW_RECORD_ALIGN + (uint64_t)len + CLAW_RECORD_ALIGN - 1) & ~(uint64_t)(CLAW_RECORD_ALIGN - 1);
}

static inline uint32_t claw_record_max(uint64_t ring_bytes)
{
	return ring_bytes / 4 < CLAW_RECORD_MAX ? (uint32_t)(ring_bytes / 4) : CLAW_RECORD_MAX;
}

#endif
