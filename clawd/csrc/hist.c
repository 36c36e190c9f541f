/* SPDX-License-Identifier: Apache-2.0 */
#include "hist.h"

#include "barrier.h"

enum { CUT_BITS = 5 };

_Static_assert(CLAW_HIST_CUTS == 1 << CUT_BITS, "cuts are a power of two");

static uint32_t bucket_of(uint64_t value)
{
	if (value < CLAW_HIST_CUTS)
		return (uint32_t)value;
	uint32_t octave = 63 - (uint32_t)__builtin_clzll(value) - CUT_BITS;
	uint32_t index = octave * CLAW_HIST_CUTS + (uint32_t)(value >> octave);
	return index < CLAW_HIST_BUCKETS ? index : CLAW_HIST_BUCKETS - 1;
}

static uint64_t middle_of(uint32_t index)
{
	if (index < 2 * CLAW_HIST_CUTS)
		return index;
	uint32_t octave = index / CLAW_HIST_CUTS - 1;
	uint64_t low = (uint64_t)(index - octave * CLAW_HIST_CUTS) << octave;
	return low + ((1ull << octave) >> 1);
}

void claw_hist_add_many(struct claw_hist *hist, uint64_t value_ns, uint64_t count)
{
	claw_count(&hist->count, count);
	claw_count(&hist->sum_ns, value_ns * count);
	if (value_ns > hist->max_ns)
		claw_store_relaxed(&hist->max_ns, value_ns);
	claw_count(&hist->bucket[bucket_of(value_ns)], count);
}

void claw_hist_add(struct claw_hist *hist, uint64_t value_ns)
{
	claw_hist_add_many(hist, value_ns, 1);
}

uint64_t claw_hist_quantile(const struct claw_hist *hist, double share)
{
	if (!hist->count)
		return 0;
	uint64_t rank = (uint64_t)(share * (double)hist->count);
	if (rank >= hist->count)
		rank = hist->count - 1;
	uint64_t seen = 0;
	for (uint32_t i = 0; i < CLAW_HIST_BUCKETS; i++) {
		seen += hist->bucket[i];
		if (seen > rank)
			return middle_of(i);
	}
	return hist->max_ns;
}
