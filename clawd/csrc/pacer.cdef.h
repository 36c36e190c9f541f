/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pacer: when does each token of a stream go? A pure step on the clock it is given: tokens arrive, the one that has waited
 * longest is due at some time, and is released. Knows nothing of text, streams or sockets. Tokens leave in order.
 *
 * off     a token is due as it arrives.
 * smooth  the producer's own pace without its jitter, and never more than max_delay behind. What the pace is, and how far
 *         arrivals stray from it, is learnt from the gaps; tokens that arrive at once share the gap before them. The least
 *         that any token of the last quarter second was held is what could be saved: it is brought down to the usual
 *         stray, an eighth of the pace at most, so a burst is worked off unseen. Where arrivals are even, a token goes up
 *         to an eighth of the pace early: one that comes about when it should is not held, and one that was late holds
 *         up only the next few.
 * steady  a token bucket, then a leaky bucket: each stream's rate has a bound whatever its producer does.
 *
 * Times are ns of one monotonic clock, rates tokens in 1,000 s.
 */
enum {
	CLAW_PACER_RUNS = 16,
	CLAW_SEND_BUFFER = 5, /* tokens; what is more waits behind it (O5: 3 to 5) */
};

/* What the pacer noticed, as bits: O5's triggers */
enum {
	CLAW_PACED_SLOWER = 1, /* three gaps in a row were over 150 % of the mean: the new pace is believed at once */
	CLAW_PACED_HIGH_WATER = 2, /* the send buffer has no fifth of room left: steady may use its burst rate */
	CLAW_PACED_LOW_WATER = 4, /* it ran empty after it had held three */
	CLAW_PACED_DELAY_JUMP = 8, /* a token was held 50 ms longer than usual */
};

/* How to pace: settings, the same for many streams */
struct claw_pace {
	uint64_t max_delay_ns; /* smooth: no token is held longer */
	uint64_t timeout_ns; /* steady: how long a token waits for its window to fill */
	uint32_t prefetch; /* arrivals looked ahead at (smooth), tokens of a window (steady) */
	uint32_t bucket; /* tokens; full at the start, from a fifth down the rate falls linearly */
	uint32_t refill_rate;
	uint32_t leak_rate;
	uint32_t burst_rate;
	uint32_t burst; /* tokens that may go at burst_rate */
};

/* The way to the reader: all 0 = nothing known against it */
struct claw_network {
	uint32_t loss_ppm;
	uint32_t jitter_us;
	uint32_t congested; /* what was sent is not taken */
};

/* Tokens that arrived at once, or so close that no reader could tell */
struct claw_run {
	uint64_t arrived_ns;
	uint64_t count;
};

struct claw_pacer {
	uint32_t mode;
	uint32_t queued; /* tokens that arrived and are not released */
	uint32_t flush; /* of those, so many go at once: an urgent one is among them */
	uint32_t first_run, run_count;
	uint32_t learnt; /* gaps, until they are many */
	uint32_t long_gaps; /* in a row */
	uint32_t filling; /* steady: its window is not full yet */
	uint32_t held_three; /* since the send buffer last ran empty */
	uint64_t released_ns; /* the last one, as it was due; 0 = none yet */
	uint64_t run_started_ns; /* the run that arrived last */
	uint64_t run_tokens;
	int64_t gap_ns, pace_ns; /* a token's share: predicted, and that without its ripple */
	int64_t error_ns, stray_ns; /* of the prediction: mean with its sign, and without */
	int64_t uneven_ns; /* stray_ns, but a single one that is far off counts little, and more than one at once is far off */
	int64_t delay_ns; /* as usual */
	uint64_t least_ns[2]; /* that a token was held: in the last quarter second, in this one */
	uint64_t least_until_ns;
	int64_t level; /* steady: millionths of a token in the bucket */
	uint64_t filled_ns; /* as of when */
	uint64_t next_ns, burst_next_ns; /* earliest release by the leaky bucket, and in a burst */
	uint64_t leak_at_ns; /* when the leaky bucket is empty */
	uint32_t refill; /* the rate that the network leaves of refill_rate, as of the last token */
	uint32_t share_ppm; /* of its rate that congestion left */
	uint64_t shared_ns; /* when that changed */
	struct claw_run runs[CLAW_PACER_RUNS];
};

void claw_pacer_init(struct claw_pacer *ret_pacer, uint32_t mode, const struct claw_pace *pace, uint64_t now_ns);
/* So many tokens arrived. `urgent`: the last of them, and so all before it, wait for nothing. Returns what it noticed. */
uint32_t claw_pacer_arrive(struct claw_pacer *pacer, uint64_t now_ns, uint32_t count, int urgent);
/* When the next token goes, which may be past; UINT64_MAX = there is none. */
uint64_t claw_pacer_due(const struct claw_pacer *pacer, const struct claw_pace *pace);
/* The next token goes now. Returns what it noticed; *ret_held_ns: how long it was held. Only if one is queued. */
uint32_t claw_pacer_release(struct claw_pacer *pacer, const struct claw_pace *pace, const struct claw_network *network,
			    uint64_t now_ns, uint64_t *ret_held_ns);
/* Pace in another way from now on: what is queued stays queued. */
void claw_pacer_mode(struct claw_pacer *pacer, uint32_t mode, const struct claw_pace *pace, uint64_t now_ns);
