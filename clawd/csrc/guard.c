/* SPDX-License-Identifier: Apache-2.0 */
#include "guard.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "barrier.h"

enum { REGIONS = 8200 }; /* two for each of 4,096 rings, and the trial's */

struct region {
	uintptr_t base; /* 0 = free */
	size_t bytes;
	int protection;
	uint32_t *mark;
};

/* Only the thread that drains rings adds, removes and faults, so the handler never meets a half-made entry */
static struct region regions[REGIONS];
static uint32_t region_used;
static struct sigaction earlier;

static void on_sigbus(int number, siginfo_t *info, void *context)
{
	uintptr_t at = (uintptr_t)info->si_addr;
	int saved = errno;
	(void)context;

	for (uint32_t i = 0; i < region_used; i++) {
		struct region *region = &regions[i];
		if (!region->base || at - region->base >= region->bytes)
			continue;
		if (mmap((void *)region->base, region->bytes, region->protection,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
			break;
		claw_store_relaxed(region->mark, 1);
		errno = saved;
		return;
	}
	/* Not ours: with the earlier handler back in place, the same access faults again and ends as it would have */
	sigaction(number, &earlier, NULL);
	errno = saved;
}

int claw_guard_add(void *base, size_t bytes, int protection, uint32_t *mark)
{
	uint32_t index = 0;
	while (index < region_used && regions[index].base)
		index++;
	if (index == REGIONS)
		return -ENOSPC;
	regions[index] = (struct region){ (uintptr_t)base, bytes, protection, mark };
	if (index == region_used)
		region_used++;
	return 0;
}

void claw_guard_remove(void *base)
{
	for (uint32_t i = 0; i < region_used; i++)
		if (regions[i].base == (uintptr_t)base)
			regions[i] = (struct region){ 0 };
}

/* What a hostile producer would do, on a page of our own */
static int trial(void)
{
	uint32_t mark = 0;
	int fd = memfd_create("clawd-guard", MFD_CLOEXEC);
	if (fd < 0)
		return -errno;
	int result = 0;
	long page = sysconf(_SC_PAGESIZE);
	void *base = MAP_FAILED;
	if (ftruncate(fd, page) == 0)
		base = mmap(NULL, (size_t)page, PROT_READ, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED) {
		result = -errno;
		close(fd);
		return result;
	}
	result = claw_guard_add(base, (size_t)page, PROT_READ, &mark);
	if (!result && ftruncate(fd, 0) < 0)
		result = -errno;
	if (!result) {
		uint8_t value = *(volatile uint8_t *)base;
		if (value || !claw_load_relaxed(&mark))
			result = -EFAULT;
	}
	claw_guard_remove(base);
	munmap(base, (size_t)page);
	close(fd);
	return result;
}

int claw_guard_install(void)
{
	struct sigaction action = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO };
	struct sigaction before;
	sigemptyset(&action.sa_mask);
	if (sigaction(SIGBUS, &action, &before) < 0)
		return -errno;
	/* Installed twice: what was there first is still what a foreign fault goes back to */
	if (!(before.sa_flags & SA_SIGINFO) || before.sa_sigaction != on_sigbus)
		earlier = before;
	return trial();
}
