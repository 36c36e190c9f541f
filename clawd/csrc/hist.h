/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_HIST_H
#define CLAW_HIST_H

#include <stdint.h>

#include "hist.cdef.h"

#endif
