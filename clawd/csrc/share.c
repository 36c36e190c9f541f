/* SPDX-License-Identifier: Apache-2.0 */
#include "share.h"

#include "turn.h"

int claw_share_stream(const struct claw_core *core, const struct claw_ring *ring)
{
	uint32_t most = core->limits.user_streams, live = 0;
	if (!most || core->streams.count[CLAW_STREAM_LIVE] < most)
		return 1;
	for (uint32_t i = 0; i < core->ring_used; i++)
		if (core->rings[i].state != CLAW_RING_FREE && core->rings[i].peer.uid == ring->peer.uid)
			live += core->rings[i].live;
	return live < most;
}

int claw_share_attachment(const struct claw_outbox *outbox, const struct claw_connection *connection)
{
	uint32_t most = outbox->attachments_per_user, count = 0;
	if (!most || outbox->attachment_count < most)
		return 1;
	for (uint32_t i = 0; i < outbox->connection_used; i++)
		if (outbox->connections[i].id && outbox->connections[i].peer.uid == connection->peer.uid)
			count += outbox->connections[i].attachment_count;
	return count < most;
}
