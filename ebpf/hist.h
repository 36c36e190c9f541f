/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which bucket of a histogram a duration belongs to. Not here is what touches a map, and each tracer therefore has its
 * own: bcc translates that in a program's main file alone.
 */
#ifndef CLAW_HIST_H
#define CLAW_HIST_H

static __always_inline u32 highest_bit(u64 value)
{
	u32 bit = 0;

	if (value >> 32) {
		value >>= 32;
		bit += 32;
	}
	if (value >> 16) {
		value >>= 16;
		bit += 16;
	}
	if (value >> 8) {
		value >>= 8;
		bit += 8;
	}
	if (value >> 4) {
		value >>= 4;
		bit += 4;
	}
	if (value >> 2) {
		value >>= 2;
		bit += 2;
	}
	return bit + (value >> 1);
}

static __always_inline u32 bucket_of(u64 value)
{
	u32 octave, bucket;

	if (value < 1 << CLAW_CUT_BITS)
		return value;
	octave = highest_bit(value) - CLAW_CUT_BITS;
	bucket = (octave << CLAW_CUT_BITS) + (u32)(value >> octave);
	return bucket < CLAW_BUCKETS ? bucket : CLAW_BUCKETS - 1;
}

#endif
