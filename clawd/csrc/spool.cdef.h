/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spool: shared memory of this clawd, cut into blocks of 4 KiB. A block belongs to one stream and holds its records as
 * they go on the wire (claw_spooled). `committed` is the one word that commits: what it does not cover is not there.
 */
enum {
	CLAW_BLOCK_BYTES = 4096,
	CLAW_BLOCK_HEADER = 384,
	CLAW_BLOCK_ROOM = CLAW_BLOCK_BYTES - CLAW_BLOCK_HEADER,
};

/* Header of a block in shared memory: all that a start after a crash needs to know about it */
struct claw_block {
	uint64_t committed; /* bytes of records, release store; 0 = the block is free */
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
	uint8_t reserved;
	uint64_t next_seq; /* in a stream's first block: no sequence below it is given again, though no block may hold it */
	uint8_t pad[56];
	uint8_t name[256];
};
