/* SPDX-License-Identifier: Apache-2.0 */
/*
 * First: streams whose first token is waited for, from their OPEN until it was sent or they end without one, for
 * CLAW_FIRST_WAIT_MS each at most. All wait for as long, so a list in the order of their OPENs is one in that of their
 * ends: each step costs the same however many there are.
 */
#ifndef CLAW_FIRST_H
#define CLAW_FIRST_H

#include <stdint.h>

struct claw_core;
struct claw_streams;

#include "first.cdef.h"

void claw_first_start(struct claw_streams *streams, uint32_t index, uint64_t now_ns);
/* It was sent, or is waited for no more. Also for a stream that does not wait. */
void claw_first_stop(struct claw_streams *streams, uint32_t index);
/* Those that waited long enough wait no more. */
void claw_first_expire(struct claw_streams *streams, uint64_t now_ns);
/* When the last one has waited long enough, 0 = none waits. */
uint64_t claw_first_until(const struct claw_streams *streams);

#endif
