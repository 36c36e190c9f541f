/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_TEXT_H
#define CLAW_TEXT_H

#include <stdint.h>

#include "text.cdef.h"

#endif
