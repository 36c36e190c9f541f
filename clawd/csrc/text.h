/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_TEXT_H
#define CLAW_TEXT_H

#include <stdint.h>

#include "text.cdef.h"

/* UTF-8 without control characters: what a name or a reason may be made of */
int claw_is_text(const uint8_t *text, uint32_t len);

#endif
