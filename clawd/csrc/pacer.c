/* SPDX-License-Identifier: Apache-2.0 */
#include "pacer.h"

#include <string.h>

enum {
	RUN_NS = 1000000, /* arrivals so close are one run */
	PRIOR_GAP_NS = 20000000, /* before anything was learnt: 50 tokens a second, what readers find fluent (O1) */
	FIRST_GAPS = 10, /* learnt by plain averaging */
	PACE_AFTER = 8, /* gaps after which the pace follows the prediction slowly */
	LATE_NS = 5000000,
	LONG_GAPS = 3, /* O5 */
	LEAST_NS = 250000000,
	DELAY_JUMP_NS = 50000000, /* O5 */
	HIGH_WATER = CLAW_SEND_BUFFER * 4 / 5 + 1, /* O5: less than a fifth of its room left */
	FILLED = 3,
	TOKEN = 1000000, /* of the bucket's level */
	SHARE_STEP_NS = 1000000000,
	SHARE_MIN = 500000, /* congestion halves a rate at most */
	SHARE_BACK = 50000, /* a second without it gives so much back */
	RATE_MIN = 1000, /* one token a second: however bad the network, it goes on */
	/* O4: the prediction's weight of a new gap, in 256ths: 0.1 when gaps scatter about it, up to 0.3 when they lead away */
	ALPHA_MIN = 26,
	ALPHA_MAX = 77,
	TRACK = 51, /* 0.2, of the means that tell the two apart (Trigg and Leach's tracking signal, 1967) */
};

static const uint64_t thousand_s_ns = 1000000000000;
static const uint64_t never = UINT64_MAX;

static int64_t follow(int64_t mean, int64_t value, int64_t weight)
{
	return mean + ((value - mean) * weight >> 8);
}

static uint64_t at_least(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

static uint64_t at_most(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

void claw_pacer_init(struct claw_pacer *ret_pacer, uint32_t mode, const struct claw_pace *pace, uint64_t now_ns)
{
	memset(ret_pacer, 0, sizeof(*ret_pacer));
	ret_pacer->least_ns[0] = ret_pacer->least_ns[1] = never;
	ret_pacer->share_ppm = 1000000;
	claw_pacer_mode(ret_pacer, mode, pace, now_ns);
}

void claw_pacer_mode(struct claw_pacer *pacer, uint32_t mode, const struct claw_pace *pace, uint64_t now_ns)
{
	pacer->mode = mode;
	pacer->level = (int64_t)pace->bucket * TOKEN;
	pacer->filled_ns = pacer->leak_at_ns = now_ns;
	pacer->next_ns = pacer->burst_next_ns = now_ns;
	pacer->filling = 0;
}

/* A run is over, delta_ns after it began. Each of its tokens has an equal share of that. */
static uint32_t learn(struct claw_pacer *pacer, uint64_t delta_ns)
{
	/* An hour is as good as for ever, and keeps the sums small */
	const uint64_t hour_ns = 3600000000000;
	int64_t share = (int64_t)(at_most(delta_ns, hour_ns) / pacer->run_tokens);
	if (!pacer->learnt) {
		pacer->gap_ns = pacer->pace_ns = pacer->uneven_ns = share;
		pacer->learnt = 1;
		return 0;
	}
	if (2 * share > 3 * pacer->gap_ns) {
		if (++pacer->long_gaps == LONG_GAPS) {
			pacer->long_gaps = 0;
			pacer->gap_ns = pacer->pace_ns = share;
			return CLAW_PACED_SLOWER;
		}
		/* A pause in the middle of an answer says little about its pace */
		if (share > 2 * pacer->gap_ns)
			share = 2 * pacer->gap_ns;
	} else {
		pacer->long_gaps = 0;
	}
	int64_t error = share - pacer->gap_ns;
	int64_t size = error < 0 ? -error : error;
	pacer->error_ns = follow(pacer->error_ns, error, TRACK);
	pacer->stray_ns = follow(pacer->stray_ns, size, TRACK);
	int64_t odd_ns = 2 * pacer->uneven_ns + (pacer->gap_ns >> 6);
	pacer->uneven_ns = pacer->run_tokens > 1 ? pacer->gap_ns :
						   follow(pacer->uneven_ns, size < odd_ns ? size : odd_ns, TRACK);
	int64_t alpha = ALPHA_MIN;
	if (pacer->stray_ns) {
		int64_t lead = pacer->error_ns < 0 ? -pacer->error_ns : pacer->error_ns;
		alpha = ALPHA_MAX * lead / pacer->stray_ns;
		alpha = alpha < ALPHA_MIN ? ALPHA_MIN : alpha > ALPHA_MAX ? ALPHA_MAX : alpha;
	}
	if (pacer->learnt < FIRST_GAPS) {
		pacer->learnt++;
		if (alpha < 256 / pacer->learnt)
			alpha = 256 / pacer->learnt;
	}
	pacer->gap_ns = follow(pacer->gap_ns, share, alpha);
	pacer->pace_ns += (pacer->gap_ns - pacer->pace_ns) >> (pacer->learnt >= PACE_AFTER ? 3 : 1);
	return 0;
}

uint32_t claw_pacer_arrive(struct claw_pacer *pacer, uint64_t now_ns, uint32_t count, int urgent)
{
	uint32_t noticed = 0;
	if (!count)
		return 0;
	if (!pacer->run_tokens) {
		pacer->run_started_ns = now_ns;
		pacer->run_tokens = count;
	} else if (now_ns - pacer->run_started_ns < RUN_NS) {
		pacer->run_tokens += count;
	} else {
		noticed = learn(pacer, now_ns - pacer->run_started_ns);
		pacer->run_started_ns = now_ns;
		pacer->run_tokens = count;
	}
	if (!pacer->queued && pacer->mode == CLAW_PACE_STEADY && pacer->released_ns)
		pacer->filling = 1;
	struct claw_run *last = pacer->run_count ?
		&pacer->runs[(pacer->first_run + pacer->run_count - 1) % CLAW_PACER_RUNS] : NULL;
	/* Without a place of its own it counts as arrived with the run before: held rather shorter, and accounted as longer */
	if (last && (now_ns - last->arrived_ns < RUN_NS || pacer->run_count == CLAW_PACER_RUNS)) {
		last->count += count;
	} else {
		pacer->runs[(pacer->first_run + pacer->run_count) % CLAW_PACER_RUNS] =
			(struct claw_run){ .arrived_ns = now_ns, .count = count };
		pacer->run_count++;
	}
	if (pacer->queued < HIGH_WATER && pacer->queued + count >= HIGH_WATER)
		noticed |= CLAW_PACED_HIGH_WATER;
	pacer->queued += count;
	if (pacer->queued >= FILLED)
		pacer->held_three = 1;
	if (urgent)
		pacer->flush = pacer->queued;
	return noticed;
}

static uint64_t smooth_due(const struct claw_pacer *pacer, const struct claw_pace *pace, uint64_t arrived_ns)
{
	int64_t pace_ns = pacer->learnt ? pacer->pace_ns : PRIOR_GAP_NS;
	int64_t stray_ns = pacer->learnt > 2 ? pacer->stray_ns : 0;
	if (stray_ns > (int64_t)(pace->max_delay_ns / 4))
		stray_ns = (int64_t)(pace->max_delay_ns / 4);
	int64_t gap_ns = pace_ns;
	uint64_t least_ns = at_most(pacer->least_ns[0], pacer->least_ns[1]);
	if (least_ns != never) {
		int64_t spare_ns = (int64_t)least_ns - stray_ns;
		int64_t most_ns = spare_ns > 0 ? pace_ns / 8 : pace_ns / 16;
		int64_t part_ns = spare_ns > 0 ? spare_ns / 12 : -spare_ns / 16;
		part_ns = part_ns < most_ns ? part_ns : most_ns;
		gap_ns += spare_ns > 0 ? -part_ns : part_ns;
	}
	/* Of an even stream: a gap that is an eighth shorter is even, too */
	int64_t early_ns = pace_ns / 8 - 2 * pacer->uneven_ns;
	int64_t shortest_ns = pace_ns - pace_ns / 8;
	if (pacer->learnt && early_ns > 0 && gap_ns > shortest_ns)
		gap_ns = gap_ns - early_ns > shortest_ns ? gap_ns - early_ns : shortest_ns;
	/* So that those behind it are not late either, and nothing has to go in a heap when they would be */
	uint64_t tokens = 0;
	for (uint32_t i = 0; i < pacer->run_count && i < pace->prefetch; i++) {
		const struct claw_run *run = &pacer->runs[(pacer->first_run + i) % CLAW_PACER_RUNS];
		tokens += run->count;
		uint64_t latest_ns = run->arrived_ns + pace->max_delay_ns;
		int64_t room_ns = latest_ns > pacer->released_ns ?
			(int64_t)((latest_ns - pacer->released_ns) / tokens) : 0;
		gap_ns = gap_ns < room_ns ? gap_ns : room_ns;
	}
	uint64_t due_ns = at_most(pacer->released_ns + (uint64_t)gap_ns, arrived_ns + pace->max_delay_ns);
	return at_least(due_ns, arrived_ns);
}

uint64_t claw_pacer_due(const struct claw_pacer *pacer, const struct claw_pace *pace)
{
	if (!pacer->queued)
		return never;
	uint64_t arrived_ns = pacer->runs[pacer->first_run].arrived_ns;
	if (pacer->mode == CLAW_PACE_OFF || pacer->flush || !pacer->released_ns)
		return arrived_ns;
	if (pacer->mode == CLAW_PACE_SMOOTH)
		return smooth_due(pacer, pace, arrived_ns);
	uint64_t due_ns = pacer->queued >= HIGH_WATER ? pacer->burst_next_ns : pacer->next_ns;
	if (pacer->filling && pacer->queued < pace->prefetch)
		due_ns = at_least(due_ns, arrived_ns + pace->timeout_ns);
	return at_least(due_ns, arrived_ns);
}

static uint64_t scaled(uint32_t rate, uint64_t share_ppm)
{
	return at_least(rate * share_ppm / 1000000, RATE_MIN);
}

/* Both buckets after a token went: when may the next? */
static void spend(struct claw_pacer *pacer, const struct claw_pace *pace, const struct claw_network *network,
		  uint64_t now_ns)
{
	if (now_ns - pacer->shared_ns >= SHARE_STEP_NS) {
		/* O7: a tenth less while it is congested, and back bit by bit */
		if (network->congested)
			pacer->share_ppm = (uint32_t)at_least(pacer->share_ppm * 9ull / 10, SHARE_MIN);
		else
			pacer->share_ppm = (uint32_t)at_most(pacer->share_ppm + SHARE_BACK, 1000000);
		pacer->shared_ns = now_ns;
	}
	/* O2: (1 − loss) / (1 + jitter / 100 ms) */
	uint64_t loss_ppm = at_most(network->loss_ppm, 1000000);
	uint64_t share_ppm = (1000000 - loss_ppm) * 100000 / (100000ull + network->jitter_us) * pacer->share_ppm / 1000000;
	uint64_t refill = scaled(pace->refill_rate, share_ppm);
	pacer->refill = (uint32_t)refill;
	uint64_t leak = at_least(scaled(pace->leak_rate, share_ppm), refill);
	uint64_t burst = at_least(scaled(pace->burst_rate, share_ppm), leak);

	int64_t full = (int64_t)pace->bucket * TOKEN;
	/* In millionths of a token: ns · rate / 10^6; a bucket is full long before the product leaves 64 bits */
	const uint64_t hour_ns = 3600000000000;
	pacer->level += (int64_t)(at_most(now_ns - pacer->filled_ns, hour_ns) / 1000 * refill / 1000);
	pacer->level = pacer->level < full ? pacer->level : full;
	pacer->filled_ns = now_ns;
	pacer->level -= TOKEN;

	int64_t low = full / 5;
	uint64_t rate = leak;
	if (pacer->level < low)
		rate = refill + (leak - refill) * (uint64_t)(pacer->level > 0 ? pacer->level : 0) / (uint64_t)low;
	uint64_t gap_ns = thousand_s_ns / rate;
	uint64_t reserve_ns = pace->burst * (thousand_s_ns / leak - thousand_s_ns / burst);
	pacer->leak_at_ns = at_least(pacer->leak_at_ns, now_ns) + gap_ns;
	pacer->next_ns = pacer->leak_at_ns;
	pacer->burst_next_ns = at_least(now_ns + thousand_s_ns / burst,
					pacer->leak_at_ns > reserve_ns ? pacer->leak_at_ns - reserve_ns : 0);
	if (pacer->level < TOKEN) {
		uint64_t wait_ns = (uint64_t)(TOKEN - pacer->level) * 1000000 / refill;
		pacer->next_ns = at_least(pacer->next_ns, now_ns + wait_ns);
		pacer->burst_next_ns = at_least(pacer->burst_next_ns, now_ns + wait_ns);
	}
}

uint32_t claw_pacer_release(struct claw_pacer *pacer, const struct claw_pace *pace, const struct claw_network *network,
			    uint64_t now_ns, uint64_t *ret_held_ns)
{
	struct claw_run *run = &pacer->runs[pacer->first_run];
	uint64_t held_ns = now_ns > run->arrived_ns ? now_ns - run->arrived_ns : 0;
	uint64_t due_ns = claw_pacer_due(pacer, pace);
	uint32_t noticed = 0;
	if (!--run->count) {
		pacer->first_run = (pacer->first_run + 1) % CLAW_PACER_RUNS;
		pacer->run_count--;
	}
	pacer->queued--;
	if (pacer->flush)
		pacer->flush--;
	if (!pacer->queued && pacer->held_three) {
		noticed |= CLAW_PACED_LOW_WATER;
		pacer->held_three = 0;
	}
	pacer->filling = 0;
	/* A timer that is a little late must not make all that follows later */
	pacer->released_ns = now_ns - due_ns < LATE_NS ? due_ns : now_ns;

	int64_t held = (int64_t)at_most(held_ns, INT64_MAX >> 8);
	if (held - pacer->delay_ns >= DELAY_JUMP_NS)
		noticed |= CLAW_PACED_DELAY_JUMP;
	pacer->delay_ns = follow(pacer->delay_ns, held, ALPHA_MIN);
	if (now_ns >= pacer->least_until_ns) {
		pacer->least_ns[0] = pacer->least_ns[1];
		pacer->least_ns[1] = never;
		pacer->least_until_ns = now_ns + LEAST_NS;
	}
	pacer->least_ns[1] = at_most(pacer->least_ns[1], held_ns);
	if (pacer->mode == CLAW_PACE_STEADY)
		spend(pacer, pace, network, now_ns);
	*ret_held_ns = held_ns;
	return noticed;
}
