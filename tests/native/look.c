/* SPDX-License-Identifier: Apache-2.0 */
#include "drain.h"

#include "look.h"

int look_at_ring(const struct memory *memory, uint64_t pos, uint64_t seq, struct seen *ret_seen)
{
	struct claw_drain drain = {
		.data = memory->data,
		.bytes = memory->ring,
		.ctl = memory->ctl,
		.ring_bytes = memory->ring_bytes,
		.pos = pos,
		.next_seq = seq,
		.record_max = claw_record_max(memory->ring_bytes),
	};
	int count = 0;
	int result = claw_drain_begin(&drain);
	if (result < 0)
		return result;
	for (; count < LOOK_MAX; count++) {
		result = claw_drain_next(&drain, &ret_seen[count].header);
		if (result <= 0)
			return result < 0 ? result : count;
		result = claw_drain_copy(&drain, &ret_seen[count].header, ret_seen[count].payload);
		if (result < 0)
			return result;
		claw_drain_advance(&drain, &ret_seen[count].header);
	}
	return count;
}
