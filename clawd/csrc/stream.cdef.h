/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: names, incarnations, sequence numbers, ends; and which blocks of the spool hold a stream's records. */

enum {
	CLAW_STREAM_FREE = 0,
	CLAW_STREAM_AWAITED = 1, /* somebody attached before it opened */
	CLAW_STREAM_LIVE = 2,
	CLAW_STREAM_ENDED = 3, /* all of it that policy keeps can still be read */
	CLAW_STREAM_GONE = 4, /* only the name is remembered */
};

/* A stream as people and programs see it */
struct claw_stream_row {
	uint8_t name[CLAW_NAME_MAX + 1];
	uint8_t reason[CLAW_REASON_MAX + 1]; /* why it ended */
	uint32_t name_len;
	uint32_t reason_len;
	uint32_t state;
	uint32_t incarnation;
	uint32_t ring; /* index */
	uint32_t attachments;
	uint64_t tokens;
	uint64_t text_bytes;
	uint64_t spool_bytes;
	uint64_t requested_ns; /* CLOCK_MONOTONIC; 0 = not told */
	uint64_t opened_ns; /* written time of OPEN */
	uint64_t ended_ns;
	uint64_t first_written_ns; /* 0 = no token yet */
	uint64_t first_sent_ns;
	uint64_t lag_ns; /* how long its pacer held what it released last */
};
