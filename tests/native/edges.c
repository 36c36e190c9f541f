/* SPDX-License-Identifier: Apache-2.0 */
/* The producer's side of the ordering edges, one function each, to look at what the compiler makes of it */
#include "clawd_ring.h"

void edge_publish(struct claw_producer *p, const struct claw_batch *batch);
void edge_wake(struct claw_producer *p);
int edge_room(struct claw_producer *p);

void edge_publish(struct claw_producer *p, const struct claw_batch *batch)
{
	claw_commit(p, batch);
}

void edge_wake(struct claw_producer *p)
{
	claw_wake(p);
}

int edge_room(struct claw_producer *p)
{
	return claw_take_ack(p);
}
