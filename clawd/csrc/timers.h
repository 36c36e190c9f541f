/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_TIMERS_H
#define CLAW_TIMERS_H

#include <stdint.h>

#include "timers.cdef.h"

#endif
