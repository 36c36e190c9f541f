/* SPDX-License-Identifier: Apache-2.0 */
/* Pacing: every stream's pacer, when the next one has something to release, and what that came to. */
struct claw_core;

/*
 * How to pace from now on: `mode` for streams that made no choice of their own, `pace` for all. Tokens that are held go by
 * the new rules. 0, or -EINVAL for what makes no sense, with nothing changed.
 */
int claw_core_pace(struct claw_core *core, uint32_t mode, const struct claw_pace *pace);
/* Pace one stream so, whatever it was opened with; CLAW_PACE_DEFAULT: as configured. 0, or
 * -ENOENT: it is not open, nor kept. */
int claw_core_pace_stream(struct claw_core *core, const uint8_t *name, uint32_t name_len, uint32_t mode);
/*
 * Live streams that a client reads. *ret_unpaced: how many of them no pacer spreads. *ret_bytes: what a token of each
 * takes in a frame, all together, by the mean of each so far. Returns how many streams, or -ENOENT.
 */
int claw_connection_streams(const struct claw_core *core, uint32_t connection, uint32_t *ret_unpaced,
			    uint64_t *ret_bytes);
