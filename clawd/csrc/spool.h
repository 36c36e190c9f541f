/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_SPOOL_H
#define CLAW_SPOOL_H

#include <stddef.h>
#include <stdint.h>

#include "frame.h"

#include "spool.cdef.h"

_Static_assert(sizeof(struct claw_block) == CLAW_BLOCK_HEADER, "layout of a block header");
_Static_assert(sizeof(struct claw_spooled) + CLAW_RECORD_MAX <= CLAW_BLOCK_ROOM, "the longest record fits a block");

#define CLAW_NONE UINT32_MAX

/* What clawd knows of a block in private memory. Blocks of a stream are a chain; all but the first are also in age order. */
struct claw_slot {
	uint64_t serial; /* new each time the block is taken: a cursor that holds an old one knows the block is gone */
	uint64_t first_seq;
	uint64_t next_seq; /* after the last token in the block */
	uint32_t stream; /* index, CLAW_NONE = free */
	uint32_t prev, next; /* in the stream's chain; next also links free blocks */
	uint32_t older, younger;
	uint16_t used; /* bytes of records, as committed */
	uint8_t unchecked; /* found by a start: its records were not looked at yet */
	uint8_t reserved;
};

struct claw_spool {
	uint8_t *base; /* all objects mapped one behind the other */
	struct claw_slot *slots;
	uint64_t serial;
	uint64_t reserved_bytes;
	uint32_t block_count; /* mapped */
	uint32_t block_max; /* reserved */
	uint32_t free_count;
	uint32_t free_head;
	uint32_t oldest, youngest;
};

int claw_spool_init(struct claw_spool *ret_spool, uint64_t bytes);
void claw_spool_deinit(struct claw_spool *spool);
/* Map one more object of the spool behind the others. */
int claw_spool_map(struct claw_spool *spool, int fd, uint64_t bytes);

static inline uint64_t claw_block_committed(uint32_t bytes, uint64_t seqs)
{
	return bytes | seqs << CLAW_BLOCK_SEQ_SHIFT;
}

static inline uint32_t claw_block_bytes(uint64_t committed)
{
	return committed & ((1u << CLAW_BLOCK_SEQ_SHIFT) - 1);
}

static inline struct claw_block *claw_spool_block(const struct claw_spool *spool, uint32_t index)
{
	return (struct claw_block *)(spool->base + (uint64_t)index * CLAW_BLOCK_BYTES);
}

static inline uint8_t *claw_spool_records(const struct claw_spool *spool, uint32_t index)
{
	return (uint8_t *)claw_spool_block(spool, index) + CLAW_BLOCK_HEADER;
}

/* Take a free block for a stream, last in no chain yet; CLAW_NONE when there is none. */
uint32_t claw_spool_take(struct claw_spool *spool, uint32_t stream, uint64_t first_seq);
void claw_spool_free(struct claw_spool *spool, uint32_t index);
/* Age order, oldest first: what is evicted when the spool is full. */
void claw_spool_age_add(struct claw_spool *spool, uint32_t index);
/* Make the record that was written behind the committed ones count. */
void claw_spool_commit(struct claw_spool *spool, uint32_t index, uint32_t bytes, uint64_t next_seq);

#endif
