/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_LANES_H
#define CLAW_LANES_H

#include <stddef.h>
#include <stdint.h>

#include "outbox.h"

#include "lanes.cdef.h"

/* Which lanes the connection's next frame goes on; 0 = none has room, or its socket took no more. */
uint8_t claw_lanes_next(const struct claw_connection *connection, int critical);
/* A frame of so many bytes went there. */
void claw_lanes_charge(struct claw_outbox *outbox, struct claw_connection *connection, uint8_t lanes, uint32_t len);

#endif
