/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_COMPACT_H
#define CLAW_COMPACT_H

#include <stddef.h>
#include <stdint.h>

#include "frame.h"

#include "compact.cdef.h"

#endif
