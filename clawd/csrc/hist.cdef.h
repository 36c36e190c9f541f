/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Histogram of durations: each power of two is cut into CLAW_HIST_CUTS equal parts, so a bucket is at most 3.2 % wide.
 */
enum {
	CLAW_HIST_CUTS = 32,
	CLAW_HIST_BUCKETS = 1184, /* up to 2^41 ns, 36 minutes; more counts in the last */
};

struct claw_hist {
	uint64_t count;
	uint64_t sum_ns;
	uint64_t max_ns;
	uint64_t bucket[CLAW_HIST_BUCKETS];
};

void claw_hist_add(struct claw_hist *hist, uint64_t value_ns);
/* The same value so many times */
void claw_hist_add_many(struct claw_hist *hist, uint64_t value_ns, uint64_t count);
/* The middle of the bucket that holds the given share of all values, share in 0 … 1; 0 when empty */
uint64_t claw_hist_quantile(const struct claw_hist *hist, double share);
