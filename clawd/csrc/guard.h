/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_GUARD_H
#define CLAW_GUARD_H

#include <stddef.h>
#include <stdint.h>

#include "guard.cdef.h"

/* Guard a mapping: after a fault in it *mark is 1. -ENOSPC when too many are guarded. */
int claw_guard_add(void *base, size_t bytes, int protection, uint32_t *mark);
/* Before it is unmapped */
void claw_guard_remove(void *base);

#endif
