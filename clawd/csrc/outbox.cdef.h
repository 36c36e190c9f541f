/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Outbox: who reads what, how far each has been sent, and the frames to send next. What a client may not have yet stays
 * in the spool, so a client that reads nothing costs its table entries and no more.
 */
enum {
	CLAW_FRAME_COUNT = 512, /* frames a turn */
	CLAW_OUT_BYTES = 0x100000, /* bytes of frames a turn */
};

/* A frame built by the last turn, at out + offset */
struct claw_frame {
	uint32_t connection;
	uint32_t offset;
	uint32_t len;
	uint32_t lanes; /* CLAW_LANE_… */
};

struct claw_attach {
	const uint8_t *name;
	uint32_t name_len;
	uint32_t id;
	int64_t after; /* last sequence the client has, -1 = none */
	uint64_t credit;
	uint32_t incarnation;
	uint8_t has_incarnation;
	uint8_t cancel;
	uint8_t observes; /* never counts as a reader */
	uint8_t admitted; /* it was found to be one of the stream's readers */
	uint32_t grace_ms; /* once nobody reads it any more, cancel it after this long; 0 = keep it */
	uint32_t reserved2;
	uint64_t deadline_ns; /* until when a stream that is not open yet is waited for; 0 = not at all */
};

/* An attachment that waited in vain and is no more */
struct claw_unmet {
	uint32_t connection;
	uint32_t id;
};
