/* SPDX-License-Identifier: Apache-2.0 */
#include "lanes.h"

#include <errno.h>
#include <string.h>

#include "turn.h"

static int has_room(uint64_t charged, uint64_t acked, uint64_t windows)
{
	return charged - acked + CLAW_FRAME_MAX + CLAW_FRAME_CHARGE <= windows * CLAW_WINDOW;
}

uint8_t claw_lanes_next(const struct claw_connection *connection, int critical)
{
	if (!connection->id || connection->blocked)
		return 0;
	int bulk = has_room(connection->charged, connection->acked, 1);
	/*
	 * With two copies the lane that gets through decides: the other one, stuck behind what it lost or behind a backlog,
	 * catches up from its socket. How far it may be behind is bounded, so that ZeroMQ's queue is.
	 */
	if (connection->laned && (connection->doubled || critical) &&
	    (bulk || has_room(connection->express_charged, connection->express_acked, 1)) &&
	    has_room(connection->charged, connection->acked, CLAW_LANE_BEHIND) &&
	    has_room(connection->express_charged, connection->express_acked, CLAW_LANE_BEHIND))
		return CLAW_LANE_BULK | CLAW_LANE_EXPRESS;
	return bulk ? CLAW_LANE_BULK : 0;
}

void claw_lanes_charge(struct claw_outbox *outbox, struct claw_connection *connection, uint8_t lanes, uint32_t len)
{
	connection->charged += len + CLAW_FRAME_CHARGE;
	if (lanes & CLAW_LANE_EXPRESS) {
		connection->express_charged += len + CLAW_FRAME_CHARGE;
		outbox->copies++;
	}
}

int claw_lanes_open(struct claw_core *core, uint32_t id)
{
	struct claw_connection *connection = claw_connection_of(&core->outbox, id);
	if (!connection)
		return -ENOENT;
	connection->laned = 1;
	return 0;
}

int claw_lanes_double(struct claw_core *core, uint32_t id, int on)
{
	struct claw_connection *connection = claw_connection_of(&core->outbox, id);
	if (!connection || !connection->laned)
		return -ENOENT;
	connection->doubled = on != 0;
	return 0;
}

int claw_lanes_flow(struct claw_core *core, uint32_t id, const uint8_t *message, size_t len)
{
	struct claw_connection *connection = claw_connection_of(&core->outbox, id);
	struct claw_flow flow;
	if (!connection || !connection->laned)
		return -ENOENT;
	if (len != sizeof(flow))
		return -EBADMSG;
	memcpy(&flow, message, sizeof(flow));
	if (flow.kind != CLAW_FRAME_FLOW || flow.version != CLAW_FRAME_VERSION || flow.credits)
		return -EBADMSG;
	if (flow.connection != connection->id)
		return 0; /* about an earlier connection of this client */
	if (flow.acked > connection->express_charged)
		return -EBADMSG;
	if (flow.acked > connection->express_acked) {
		connection->express_acked = flow.acked;
		claw_connection_ready(&core->outbox, id & UINT16_MAX);
		core->pending = 1;
	}
	return 0;
}
