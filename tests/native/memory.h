/* SPDX-License-Identifier: Apache-2.0 */
/* The two shared-memory objects of a ring, mapped as producers and clawd do. Everything is kept by the one who calls. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef CLAW_RING_H
#include "ring.h"
#endif

struct memory {
	int data_fd, ctl_fd;
	uint64_t ring_bytes;
	struct claw_data *data;
	uint8_t *ring; /* twice in a row */
	struct claw_ctl *ctl;
};

static inline void *must(void *at)
{
	if (at == MAP_FAILED || !at) {
		perror("memory");
		exit(1);
	}
	return at;
}

static inline int memory_file(const char *name, uint64_t bytes)
{
	int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) {
		perror("memfd");
		exit(1);
	}
	return fd;
}

static inline struct memory memory_make(uint64_t ring_bytes)
{
	struct memory memory = {
		.data_fd = memory_file("data", CLAW_PAGE + ring_bytes),
		.ctl_fd = memory_file("ctl", sizeof(struct claw_ctl)),
		.ring_bytes = ring_bytes,
	};
	uint8_t *base = must(mmap(NULL, CLAW_PAGE + 2 * ring_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	must(mmap(base, CLAW_PAGE + ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.data_fd, 0));
	must(mmap(base + CLAW_PAGE + ring_bytes, ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
		  memory.data_fd, CLAW_PAGE));
	memory.data = (struct claw_data *)base;
	memory.ring = base + CLAW_PAGE;
	memory.ctl = must(mmap(NULL, sizeof(struct claw_ctl), PROT_READ | PROT_WRITE, MAP_SHARED, memory.ctl_fd, 0));
	memory.ctl->state = CLAW_STATE_OPEN;
	return memory;
}

#endif
