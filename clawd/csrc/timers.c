/* SPDX-License-Identifier: Apache-2.0 */
#include "timers.h"

#include <errno.h>
#include <sys/mman.h>

#include "reserve.h"

int claw_timers_init(struct claw_timers *ret_timers, uint32_t max)
{
	*ret_timers = (struct claw_timers){
		.due_ns = claw_reserve((uint64_t)max * sizeof(uint64_t)),
		.place = claw_reserve((uint64_t)max * sizeof(uint32_t)),
		.heap = claw_reserve((uint64_t)max * sizeof(uint32_t)),
		.max = max,
	};
	if (ret_timers->due_ns && ret_timers->place && ret_timers->heap)
		return 0;
	claw_timers_deinit(ret_timers);
	return -ENOMEM;
}

void claw_timers_deinit(struct claw_timers *timers)
{
	if (timers->due_ns)
		munmap(timers->due_ns, (uint64_t)timers->max * sizeof(uint64_t));
	if (timers->place)
		munmap(timers->place, (uint64_t)timers->max * sizeof(uint32_t));
	if (timers->heap)
		munmap(timers->heap, (uint64_t)timers->max * sizeof(uint32_t));
	*timers = (struct claw_timers){ 0 };
}

static void put(struct claw_timers *timers, uint32_t place, uint32_t stream)
{
	timers->heap[place] = stream;
	timers->place[stream] = place;
}

static void up(struct claw_timers *timers, uint32_t place)
{
	uint32_t stream = timers->heap[place];
	while (place) {
		uint32_t parent = (place - 1) / 2;
		if (timers->due_ns[timers->heap[parent]] <= timers->due_ns[stream])
			break;
		put(timers, place, timers->heap[parent]);
		place = parent;
	}
	put(timers, place, stream);
}

static void down(struct claw_timers *timers, uint32_t place)
{
	uint32_t stream = timers->heap[place];
	for (;;) {
		uint32_t child = 2 * place + 1;
		if (child >= timers->count)
			break;
		if (child + 1 < timers->count &&
		    timers->due_ns[timers->heap[child + 1]] < timers->due_ns[timers->heap[child]])
			child++;
		if (timers->due_ns[stream] <= timers->due_ns[timers->heap[child]])
			break;
		put(timers, place, timers->heap[child]);
		place = child;
	}
	put(timers, place, stream);
}

void claw_timers_set(struct claw_timers *timers, uint32_t stream, uint64_t due_ns)
{
	uint64_t before_ns = timers->due_ns[stream];
	if (before_ns == due_ns)
		return;
	timers->due_ns[stream] = due_ns;
	if (!before_ns) {
		timers->heap[timers->count++] = stream;
		up(timers, timers->count - 1);
		return;
	}
	uint32_t place = timers->place[stream];
	if (!due_ns) {
		uint32_t last = timers->heap[--timers->count];
		if (last == stream)
			return;
		put(timers, place, last);
		up(timers, place);
		down(timers, timers->place[last]);
	} else if (due_ns < before_ns) {
		up(timers, place);
	} else {
		down(timers, place);
	}
}

uint32_t claw_timers_due(const struct claw_timers *timers, uint64_t now_ns)
{
	return timers->count && timers->due_ns[timers->heap[0]] <= now_ns ? timers->heap[0] : UINT32_MAX;
}

uint64_t claw_timers_next(const struct claw_timers *timers)
{
	return timers->count ? timers->due_ns[timers->heap[0]] : 0;
}
