/* SPDX-License-Identifier: Apache-2.0 */
#ifndef RACE_H
#define RACE_H

#include <stdint.h>

#include "memory.h"

enum { RACE_LEN_MAX = 300 };

struct race {
	uint64_t duration_ns;
	int in_step; /* write only once clawd has taken the last one: one sleep for each token */
};

static inline uint32_t race_len(uint64_t number)
{
	return 1 + (uint32_t)(number * 37 % RACE_LEN_MAX);
}

static inline uint8_t race_byte(uint64_t number, uint32_t at)
{
	return (uint8_t)(number * 11 + at);
}

void race_producer_init(const struct memory *memory, int event_fd);
/* Thread; returns how many it wrote, plus one. */
void *race_producer(void *race);

#endif
