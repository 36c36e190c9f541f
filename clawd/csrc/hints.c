/* SPDX-License-Identifier: Apache-2.0 */
#include "hints.h"

#include <errno.h>

#include "barrier.h"
#include "turn.h"

enum {
	LOOK_NS = 250000000,
	BETTER_NS = 1000000000, /* it must be better for so long before an engine hears so: no wavering */
};

static const uint64_t second_ns = 1000000000;

int claw_core_pressure(struct claw_core *core, uint32_t level)
{
	if (level > CLAW_DEGRADE_MAX)
		return -EINVAL;
	core->pressure = core->outbox.pressure = level;
	core->hints_due_ns = 1;
	core->pending = 1;
	return 0;
}

static uint32_t at_least(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

static void tell(struct claw_ring *ring, uint32_t rate, uint32_t degrade, uint32_t reason)
{
	struct claw_ctl *ctl = ring->drain.ctl;
	uint32_t odd = ctl->hint_seq | 1;
	claw_store_relaxed(&ctl->hint_seq, odd);
	/* Pairs with the acquire loads in claw_hints(): who saw one of the words sees hint_seq odd or changed */
	claw_fence_release();
	claw_store_relaxed(&ctl->target_rate, rate);
	claw_store_relaxed(&ctl->degrade, degrade);
	claw_store_relaxed(&ctl->hint_reason, reason);
	claw_store_release(&ctl->hint_seq, odd + 1);
	ring->hints.rate = rate;
	ring->hints.degrade = degrade;
	ring->hints.reason = reason;
}

void claw_hints_begin(struct claw_core *core, struct claw_ring *ring, uint64_t now_ns)
{
	const struct claw_ctl *ctl = ring->drain.ctl;
	struct claw_hints *hints = &ring->hints;
	hints->rate = ctl->target_rate;
	hints->degrade = ctl->degrade;
	hints->reason = ctl->hint_reason;
	hints->worse_ns = now_ns;
	/* Killed while it told: until the number is even no engine believes a word of it */
	if (ctl->hint_seq & 1)
		tell(ring, hints->rate, hints->degrade, hints->reason);
	/* A look that finds nothing to take back is the last: this ring was not there when the pressure rose */
	if (!core->hints_due_ns && (core->pressure || hints->rate || hints->degrade))
		core->hints_due_ns = now_ns;
}

/* Mark the rings whose tokens wait for a reader that does not take them */
static void mark_congested(struct claw_core *core)
{
	const struct claw_outbox *outbox = &core->outbox;
	for (uint32_t i = 0; i < outbox->connection_used; i++) {
		const struct claw_connection *connection = &outbox->connections[i];
		if (!connection->id || !connection->congested)
			continue;
		for (uint32_t at = connection->attachments; at != CLAW_NONE;
		     at = outbox->attachments[at].next_of_connection) {
			uint32_t ring = core->streams.table[outbox->attachments[at].stream].ring;
			if (ring != CLAW_NONE && !outbox->attachments[at].observes)
				core->rings[ring].hints.congested = 1;
		}
	}
}

/* Returns whether there is something told that may have to be taken back. */
static int look(struct claw_core *core, struct claw_ring *ring, uint64_t now_ns)
{
	struct claw_hints *hints = &ring->hints;
	uint32_t degrade = core->pressure, reason = degrade ? CLAW_HINT_PRESSURE : CLAW_HINT_NONE, rate = 0;
	if (hints->congested) {
		degrade = at_least(degrade, 1);
		reason = CLAW_HINT_CONGESTED;
	}
	if (hints->lag_ns >= second_ns) {
		/* A rate that the pace can follow; and the further behind, the cheaper may the answers be */
		rate = hints->refill;
		degrade = at_least(degrade, hints->lag_ns >= 20 * second_ns ? 3 : hints->lag_ns >= 5 * second_ns ? 2 : 1);
		reason = CLAW_HINT_LAG;
	}
	hints->congested = 0;
	hints->lag_ns = 0;
	hints->refill = 0;
	int is_worse = degrade > hints->degrade || (degrade == hints->degrade && (rate || !hints->rate));
	if (is_worse)
		hints->worse_ns = now_ns;
	if ((rate != hints->rate || degrade != hints->degrade || reason != hints->reason) &&
	    (is_worse || now_ns - hints->worse_ns >= BETTER_NS))
		tell(ring, rate, degrade, reason);
	return hints->rate || hints->degrade;
}

void claw_hints_turn(struct claw_core *core, uint64_t now_ns)
{
	if (core->outbox.congested) {
		core->outbox.congested = 0;
		if (!core->hints_due_ns)
			core->hints_due_ns = now_ns;
	}
	if (!core->hints_due_ns || now_ns < core->hints_due_ns)
		return;
	mark_congested(core);
	int more = 0;
	for (uint32_t i = 0; i < core->ring_used; i++)
		if (claw_ring_is_drained(&core->rings[i]))
			more |= look(core, &core->rings[i], now_ns);
	/* Without anything to take back, the next lag or congestion starts it again */
	core->hints_due_ns = more ? now_ns + LOOK_NS : 0;
}
