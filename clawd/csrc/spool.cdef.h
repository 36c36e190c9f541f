/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spool: shared memory of this clawd, cut into blocks of 4 KiB. A block belongs to one stream and holds its records as
 * they go on the wire (claw_spooled). `committed` is the one word that commits: what it does not cover is not there.
 */
enum {
	CLAW_BLOCK_BYTES = 4096,
	CLAW_BLOCK_HEADER = 384,
	CLAW_BLOCK_ROOM = CLAW_BLOCK_BYTES - CLAW_BLOCK_HEADER,
	CLAW_BLOCK_SEQ_SHIFT = 16, /* in `committed` */
};

/* flags of a block */
enum {
	CLAW_BLOCK_FIRST = 1, /* of its stream: has the OPEN, and stays as long as the stream has any */
};

/* Header of a block in shared memory: all that a start after a crash needs to know about it */
struct claw_block {
	/* Low 16 bits: bytes of records; the rest: how many sequence numbers they take. Release store; 0 = the block is free */
	uint64_t committed;
	uint32_t magic;
	uint32_t layout;
	uint64_t stream_id; /* the same in all blocks of one stream of one incarnation */
	uint64_t first_seq;
	uint64_t ring_id;
	uint64_t open_seq;
	uint64_t requested_ns;
	uint32_t incarnation;
	uint16_t handle;
	uint8_t name_len;
	uint8_t flags;
	/* In a stream's first block: no sequence below it is given again, though no block may hold it */
	uint64_t next_seq;
	uint64_t serial; /* blocks in the order they were taken */
	/* Of the stream: before this block. In its first block: when next_seq was stored */
	uint64_t tokens;
	uint64_t text_bytes;
	/* In the first block alone, 0 = not so */
	uint64_t ring_seq; /* of the last record that next_seq counts */
	uint64_t ended_ns; /* when it ended, if the spool had no room for its CLOSE */
	uint64_t first_sent_ns;
	uint32_t grace_ms; /* nobody reads it for so long = it is cancelled; 0 = never */
	uint32_t pace; /* CLAW_PACE_… that it was opened with, or told since */
	uint8_t name[256];
};
