/* SPDX-License-Identifier: Apache-2.0 */
/* Hints: what clawd would like engines to do about answers that are made faster than they can be read (O8, O9). */
enum {
	CLAW_DEGRADE_MAX = 3,
};

/* How short the host is of processor time: 0 not … CLAW_DEGRADE_MAX. Told to every engine. 0, or -EINVAL. */
int claw_core_pressure(struct claw_core *core, uint32_t level);
