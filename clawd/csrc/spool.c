/* SPDX-License-Identifier: Apache-2.0 */
#include "spool.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "barrier.h"
#include "failpoint.h"

int claw_spool_init(struct claw_spool *ret_spool, uint64_t bytes)
{
	uint64_t blocks = bytes / CLAW_BLOCK_BYTES;
	if (!blocks || bytes % CLAW_BLOCK_BYTES || blocks >= CLAW_NONE)
		return -EINVAL;
	uint8_t *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (base == MAP_FAILED)
		return -errno;
	/* mmap, not malloc: a slot costs memory only once its block was used */
	struct claw_slot *slots = mmap(NULL, blocks * sizeof(*slots), PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (slots == MAP_FAILED) {
		int result = -errno;
		munmap(base, bytes);
		return result;
	}
	*ret_spool = (struct claw_spool){
		.base = base,
		.slots = slots,
		.reserved_bytes = bytes,
		.block_max = (uint32_t)blocks,
		.free_head = CLAW_NONE,
		.oldest = CLAW_NONE,
		.youngest = CLAW_NONE,
	};
	return 0;
}

void claw_spool_deinit(struct claw_spool *spool)
{
	if (!spool->base)
		return;
	munmap(spool->base, spool->reserved_bytes);
	munmap(spool->slots, spool->block_max * sizeof(*spool->slots));
	spool->base = NULL;
}

int claw_spool_map(struct claw_spool *spool, int fd, uint64_t bytes)
{
	struct stat stat;
	if (fstat(fd, &stat) < 0)
		return -errno;
	if (bytes % CLAW_BLOCK_BYTES || bytes / CLAW_BLOCK_BYTES > spool->block_max - spool->block_count ||
	    (uint64_t)stat.st_size != bytes)
		return -EINVAL;
	uint8_t *at = spool->base + (uint64_t)spool->block_count * CLAW_BLOCK_BYTES;
	if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		return -errno;
	madvise(at, bytes, MADV_DONTDUMP);
	spool->block_count += (uint32_t)(bytes / CLAW_BLOCK_BYTES);
	spool->free_count += (uint32_t)(bytes / CLAW_BLOCK_BYTES);
	return 0;
}

/* Blocks that were freed are used again first; below block_count the rest was never touched, in order. */
uint32_t claw_spool_take(struct claw_spool *spool, uint32_t stream, uint64_t first_seq)
{
	if (!spool->free_count)
		return CLAW_NONE;
	uint32_t index = spool->free_head;
	if (index != CLAW_NONE)
		spool->free_head = spool->slots[index].next;
	else
		index = spool->block_count - spool->free_count;
	spool->free_count--;
	spool->slots[index] = (struct claw_slot){
		.serial = ++spool->serial,
		.first_seq = first_seq,
		.next_seq = first_seq,
		.stream = stream,
		.prev = CLAW_NONE,
		.next = CLAW_NONE,
		.older = CLAW_NONE,
		.younger = CLAW_NONE,
	};
	return index;
}

static void age_remove(struct claw_spool *spool, uint32_t index)
{
	struct claw_slot *slot = &spool->slots[index];
	if (slot->older == CLAW_NONE && spool->oldest != index)
		return; /* not in it: a stream's first block */
	if (slot->older == CLAW_NONE)
		spool->oldest = slot->younger;
	else
		spool->slots[slot->older].younger = slot->younger;
	if (slot->younger == CLAW_NONE)
		spool->youngest = slot->older;
	else
		spool->slots[slot->younger].older = slot->older;
	slot->older = slot->younger = CLAW_NONE;
}

void claw_spool_free(struct claw_spool *spool, uint32_t index)
{
	age_remove(spool, index);
	/* Before anything else: a start after a crash must not find records of a stream that let go of them */
	claw_store_release(&claw_spool_block(spool, index)->committed, 0);
	CLAW_FAILPOINT("trimmed");
	struct claw_slot *slot = &spool->slots[index];
	slot->serial = 0;
	slot->stream = CLAW_NONE;
	slot->next = spool->free_head;
	spool->free_head = index;
	spool->free_count++;
}

void claw_spool_age_add(struct claw_spool *spool, uint32_t index)
{
	struct claw_slot *slot = &spool->slots[index];
	slot->older = spool->youngest;
	slot->younger = CLAW_NONE;
	if (spool->youngest == CLAW_NONE)
		spool->oldest = index;
	else
		spool->slots[spool->youngest].younger = index;
	spool->youngest = index;
}

void claw_spool_commit(struct claw_spool *spool, uint32_t index, uint32_t bytes, uint64_t next_seq)
{
	struct claw_slot *slot = &spool->slots[index];
	slot->used += (uint16_t)bytes;
	slot->next_seq = next_seq;
	/* The commit: header and record are in memory before the word that makes them count */
	claw_store_release(&claw_spool_block(spool, index)->committed,
			   claw_block_committed(slot->used, next_seq - slot->first_seq));
}
