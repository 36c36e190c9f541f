/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_PACER_H
#define CLAW_PACER_H

#include <stdint.h>

#include "ring.h"

#include "pacer.cdef.h"

#endif
