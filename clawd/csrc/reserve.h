/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_RESERVE_H
#define CLAW_RESERVE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

/* Zeroed memory that costs something only where it is touched: tables are made for the most there may be. munmap() it. */
static inline void *claw_reserve(uint64_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return at == MAP_FAILED ? NULL : at;
}

#endif
