/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_READERS_H
#define CLAW_READERS_H

#include <stdint.h>

struct claw_core;

#include "readers.cdef.h"

/* The stream, which just opened, is not for everybody: nobody who attached before counts until there is a verdict. */
void claw_readers_open(struct claw_core *core, uint32_t stream);

#endif
