/* SPDX-License-Identifier: Apache-2.0 */
/* First: which streams' first token is waited for, and what clawd had done about it. */
enum {
	CLAW_FIRST_WAIT_MS = 500, /* a first token is urgent for so long after its stream's OPEN */
	CLAW_BOOST_REST = 0, /* levels of what clawd asks for; see clawd/kernel/weights.conf */
	CLAW_BOOST_PRESSURE = 1,
	CLAW_BOOST_FIRST = 2,
};

/* For the page: what clawd asks its helper for now, and how long its threads waited for a processor in all. */
void claw_core_boost(struct claw_core *core, uint32_t level, uint64_t run_delay_ns);
