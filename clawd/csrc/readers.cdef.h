/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Readers: whom a stream is for, if not for everybody. A text that the producer gives at OPEN and that is kept before the
 * meta; who fits it is not decided here. Who attached before the stream opened gets nothing until that was decided.
 */
struct claw_core;

enum {
	CLAW_READERS_MAX = 255, /* bytes */
};

/* An attachment that waits for a verdict: claw_admit or claw_deny */
struct claw_unproven {
	uint32_t connection;
	uint32_t id;
	uint32_t stream; /* index */
};

/* Index of a stream, UINT32_MAX when there is none of this name that could be read. */
uint32_t claw_stream_index(const struct claw_core *core, const uint8_t *name, uint32_t name_len);
/* Bytes of the text in ret_readers, which has room for CLAW_READERS_MAX; 0 = the stream is for everybody. */
int claw_stream_readers(const struct claw_core *core, uint32_t stream, uint8_t *ret_readers);
/* Attachments without a verdict, at most max; outcome.unproven says that there may be some. */
int claw_unproven(struct claw_core *core, struct claw_unproven *ret_unproven, int max);
/* It may read: its cancel counts now, if it said so. 0, or -ENOENT. */
int claw_admit(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns);
/* It may not, and is no more: as if it had never been there. 0, or -ENOENT. */
int claw_deny(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns);
