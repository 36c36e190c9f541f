/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_PRODUCER_H
#define CLAW_PRODUCER_H

#include <stdint.h>

#include "ring.h"

/* ctypes finds these by name in the core, which hides everything else */
#pragma GCC visibility push(default)
#include "producer.cdef.h"
#pragma GCC visibility pop

#endif
