/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lanes: a client on another host is reached by two connections. Every frame goes on bulk, in order, so that bulk alone is
 * complete; express has copies of those that are to overtake it: frames of CRITICAL tokens always, all frames while the
 * way loses much. The client takes the first copy, known by its number.
 */
struct claw_core;

enum {
	CLAW_LANE_BULK = 1,
	CLAW_LANE_EXPRESS = 2,
	CLAW_LANE_BEHIND = 4, /* windows that one lane may be behind while the other goes on */
};

/* This connection, new, has an express lane too. 0, or -ENOENT. */
int claw_lanes_open(struct claw_core *core, uint32_t connection);
/* From now on all frames go on both lanes, or no more. 0, or -ENOENT. */
int claw_lanes_double(struct claw_core *core, uint32_t connection, int on);
/* A flow message that came by the express lane: it acks that one. As claw_flow. */
int claw_lanes_flow(struct claw_core *core, uint32_t connection, const uint8_t *message, size_t len);
