/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping until there is something to do, without missing a token and without being kept awake for nothing. */
#include <errno.h>
#include <sys/epoll.h>
#include <time.h>

#include "barrier.h"
#include "turn.h"

enum {
	EVENTS_MAX = 64,
	IDLE_WAKES_MAX = 16, /* wake-ups in a row without a new byte: no producer that keeps the rules makes two */
	IDLE_WAKES_AGAIN = 14, /* where one that stormed before starts */
	MUTE_FIRST_NS = 1000000,
	MUTE_MAX_NS = 1000000000,
	SIGNAL_GRACE_NS = 20000000,
	POLL_NS = 2000000, /* how soon a ring is looked at again whose producer cannot signal yet */
	POLL_MAX_NS = 64000000, /* where that ends which doubles with each look in vain: it may never come to attach again */
};

/* epoll's word for a ring's eventfd; Python's tags are below */
static const uint64_t ring_tag = 1ull << 32;

static uint64_t clock_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

int claw_ring_hear(struct claw_core *core, struct claw_ring *ring)
{
	/* Edge-triggered and never read: each write wakes us, and nothing done to it can block us */
	struct epoll_event event = {
		.events = EPOLLIN | EPOLLET,
		.data.u64 = ring_tag | (uint64_t)(ring - core->rings),
	};
	return epoll_ctl(core->epoll_fd, EPOLL_CTL_ADD, ring->event_fd, &event) < 0 ? -errno : 0;
}

/* A ring's eventfd was written. One that keeps being written for nothing is only looked at now and then. */
static void woken(struct claw_core *core, struct claw_ring *ring)
{
	if (!claw_ring_is_drained(ring) || ring->muted_until_ns)
		return;
	/* It signals where we hear it: what it wrote before is seen by the turn that follows */
	core->polled -= ring->polled;
	ring->polled = 0;
	if (ring->drain.pos != ring->woken_pos || claw_drain_has_data(&ring->drain)) {
		ring->idle_wakes = 0;
		ring->mute_ns /= 2;
	} else if (++ring->idle_wakes >= IDLE_WAKES_MAX) {
		ring->mute_ns = ring->mute_ns ? 2 * ring->mute_ns : MUTE_FIRST_NS;
		if (ring->mute_ns > MUTE_MAX_NS)
			ring->mute_ns = MUTE_MAX_NS;
		ring->muted_until_ns = clock_ns() + ring->mute_ns;
		epoll_ctl(core->epoll_fd, EPOLL_CTL_DEL, ring->event_fd, NULL);
		claw_count(&core->totals->storms, 1);
	}
	ring->woken_pos = ring->drain.pos;
}

/* Listen again to rings whose time is over. Returns when the next one's is, 0 = none is muted. */
static uint64_t unmute(struct claw_core *core)
{
	uint64_t next = 0;
	for (uint32_t i = 0; i < core->ring_used; i++) {
		struct claw_ring *ring = &core->rings[i];
		if (!ring->muted_until_ns)
			continue;
		if (ring->muted_until_ns <= clock_ns()) {
			ring->muted_until_ns = 0;
			ring->idle_wakes = IDLE_WAKES_AGAIN;
			claw_ring_hear(core, ring);
		} else if (!next || ring->muted_until_ns < next) {
			next = ring->muted_until_ns;
		}
	}
	return next;
}

static int any_data(const struct claw_core *core, int polled)
{
	for (uint32_t i = 0; i < core->ring_used; i++) {
		const struct claw_ring *ring = &core->rings[i];
		if (claw_ring_is_drained(ring) && (polled || !ring->polled) && claw_drain_has_data(&ring->drain))
			return 1;
	}
	return 0;
}

static int64_t earlier(int64_t timeout_ns, uint64_t due_ns)
{
	if (!due_ns)
		return timeout_ns;
	uint64_t now = clock_ns();
	int64_t until = due_ns > now ? (int64_t)(due_ns - now) : 0;
	return timeout_ns < 0 || until < timeout_ns ? until : timeout_ns;
}

static int poll_events(const struct claw_core *core, struct epoll_event *events, int limit, int64_t timeout_ns)
{
	struct timespec timeout = { .tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000 };
	int count = epoll_pwait2(core->epoll_fd, events, limit, timeout_ns < 0 ? NULL : &timeout, NULL);
	return count < 0 ? -errno : count;
}

int claw_wait(struct claw_core *core, int64_t timeout_ns, uint32_t *ret_tags, int tag_max)
{
	struct epoll_event events[EVENTS_MAX];
	int limit = tag_max < EVENTS_MAX ? tag_max : EVENTS_MAX;
	int asleep = 0, polls = 0;
	uint64_t muted_ns = unmute(core);
	if (core->pending)
		timeout_ns = 0;
	if (timeout_ns != 0) {
		timeout_ns = earlier(timeout_ns, core->expire_ns);
		timeout_ns = earlier(timeout_ns, claw_pacing_due(&core->pacing));
		timeout_ns = earlier(timeout_ns, core->hints_due_ns);
		timeout_ns = earlier(timeout_ns, core->outbox.unmet_ns);
		timeout_ns = earlier(timeout_ns, claw_grace_due(&core->streams));
		timeout_ns = earlier(timeout_ns, muted_ns);
		if (!core->poll_ns)
			core->poll_ns = POLL_NS;
		if (core->polled && (timeout_ns < 0 || (uint64_t)timeout_ns > core->poll_ns)) {
			timeout_ns = (int64_t)core->poll_ns;
			polls = 1;
		}
		for (uint32_t i = 0; i < core->ring_used; i++)
			if (claw_ring_is_drained(&core->rings[i]) && !core->rings[i].polled)
				claw_drain_sleep(&core->rings[i].drain);
		/* Pairs with the producer's fence between its store of head and its load of need_wake: either it sees that
		 * we sleep, or we see its head. Without both, a token can lie there unseen. */
		claw_fence_full();
		asleep = !any_data(core, 1);
		if (!asleep) {
			timeout_ns = 0;
			core->poll_ns = 0; /* from the shortest on again */
		}
		claw_count(&core->totals->sleeps, (uint64_t)asleep);
	}
	int count = poll_events(core, events, limit, timeout_ns);
	if (polls && asleep && count == 0)
		core->poll_ns = any_data(core, 1) ? POLL_NS : core->poll_ns * 2 < POLL_MAX_NS ? core->poll_ns * 2 : POLL_MAX_NS;
	if (asleep && count == 0 && !muted_ns && any_data(core, 0)) {
		/* Its producer may be on the way from head to its signal. One that does not come is a lost wake-up. */
		count = poll_events(core, events, limit, SIGNAL_GRACE_NS);
		claw_count(&core->totals->rescued, count == 0);
	}
	for (uint32_t i = 0; i < core->ring_used; i++)
		if (claw_ring_is_drained(&core->rings[i]))
			claw_drain_awake(&core->rings[i].drain);
	if (count < 0)
		return count;
	int tags = 0;
	for (int i = 0; i < count; i++) {
		if (events[i].data.u64 & ring_tag)
			woken(core, &core->rings[(uint32_t)events[i].data.u64]);
		else
			ret_tags[tags++] = (uint32_t)events[i].data.u64;
	}
	return tags;
}

int claw_next(struct claw_core *core, int64_t timeout_ns, uint32_t *ret_tags, int tag_max)
{
	/* Nothing of the last turn may be sent again when a signal cuts this one short */
	core->outcome.frame_count = core->outcome.more = 0;
	int result = claw_wait(core, timeout_ns, ret_tags, tag_max);
	/* A readable descriptor goes first: it may be the end of a producer, which comes before what others open */
	if (result == 0)
		claw_turn(core, clock_ns());
	return result;
}
