/* SPDX-License-Identifier: Apache-2.0 */
#include "grace.h"

#include <errno.h>
#include <sys/mman.h>

#include "reserve.h"
#include "turn.h"

static const uint64_t ms_ns = 1000000;
/* How long a name is remembered whose time was over before it opened: an OPEN that comes within it is cancelled */
static const uint64_t doomed_ns = 30000000000;

enum {
	AWAITED_SHARE = 8, /* of the table, one part at most for names that nobody reads and nobody has opened */
};

int claw_grace_init(struct claw_grace *ret_grace, uint32_t max)
{
	*ret_grace = (struct claw_grace){ .heap = claw_reserve((uint64_t)max * sizeof(uint32_t)) };
	return ret_grace->heap ? 0 : -ENOMEM;
}

void claw_grace_deinit(struct claw_grace *grace, uint32_t max)
{
	if (grace->heap)
		munmap(grace->heap, (uint64_t)max * sizeof(uint32_t));
	grace->heap = NULL;
}

/* Streams know their place + 1, so that 0 = not in the heap */
static void put(struct claw_streams *streams, uint32_t place, uint32_t index)
{
	streams->grace.heap[place] = index;
	streams->table[index].grace_at = place + 1;
}

static uint64_t deadline(const struct claw_streams *streams, uint32_t place)
{
	return streams->table[streams->grace.heap[place]].grace_ns;
}

static void rise(struct claw_streams *streams, uint32_t place)
{
	uint32_t index = streams->grace.heap[place];
	for (; place && deadline(streams, (place - 1) / 2) > streams->table[index].grace_ns; place = (place - 1) / 2)
		put(streams, place, streams->grace.heap[(place - 1) / 2]);
	put(streams, place, index);
}

static void sink(struct claw_streams *streams, uint32_t place)
{
	uint32_t index = streams->grace.heap[place];
	for (uint32_t child; (child = 2 * place + 1) < streams->grace.count; place = child) {
		if (child + 1 < streams->grace.count && deadline(streams, child + 1) < deadline(streams, child))
			child++;
		if (deadline(streams, child) >= streams->table[index].grace_ns)
			break;
		put(streams, place, streams->grace.heap[child]);
	}
	put(streams, place, index);
}

static void insert(struct claw_streams *streams, uint32_t index, uint64_t until_ns)
{
	streams->table[index].grace_ns = until_ns;
	put(streams, streams->grace.count, index);
	rise(streams, streams->grace.count++);
	streams->grace.awaited += streams->table[index].state == CLAW_STREAM_AWAITED;
}

void claw_grace_stop(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	stream->doomed = 0;
	if (!stream->grace_at)
		return;
	uint32_t place = stream->grace_at - 1;
	uint32_t last = streams->grace.heap[--streams->grace.count];
	stream->grace_at = 0;
	streams->grace.awaited -= stream->state == CLAW_STREAM_AWAITED;
	if (last == index)
		return;
	put(streams, place, last);
	rise(streams, place);
	sink(streams, streams->table[last].grace_at - 1);
}

void claw_stream_grace(struct claw_streams *streams, uint32_t index, uint32_t grace_ms)
{
	struct claw_stream *stream = &streams->table[index];
	stream->grace_ms = grace_ms;
	if (stream->first_block != CLAW_NONE) /* a start after a crash goes by it */
		claw_spool_block(streams->spool, stream->first_block)->grace_ms = grace_ms;
}

void claw_grace_start(struct claw_streams *streams, uint32_t index, uint64_t now_ns)
{
	struct claw_stream *stream = &streams->table[index];
	claw_grace_stop(streams, index);
	if (!stream->grace_ms || (stream->state != CLAW_STREAM_LIVE && stream->state != CLAW_STREAM_AWAITED))
		return;
	/* Names that clients make up and leave must not crowd out those that are read */
	if (stream->state == CLAW_STREAM_AWAITED && streams->grace.awaited >= (streams->max + AWAITED_SHARE - 1) / AWAITED_SHARE)
		return;
	insert(streams, index, now_ns + stream->grace_ms * ms_ns);
}

uint64_t claw_grace_due(const struct claw_streams *streams)
{
	return streams->grace.count ? deadline(streams, 0) : 0;
}

void claw_grace_expire(struct claw_core *core, uint64_t now_ns)
{
	struct claw_streams *streams = &core->streams;
	while (streams->grace.count && deadline(streams, 0) <= now_ns) {
		uint32_t index = streams->grace.heap[0];
		uint8_t doomed = streams->table[index].doomed;
		claw_grace_stop(streams, index);
		if (streams->table[index].state == CLAW_STREAM_LIVE) {
			claw_stream_unread(core, index, now_ns);
		} else if (doomed) {
			claw_stream_release(streams, index);
		} else {
			insert(streams, index, now_ns + doomed_ns);
			streams->table[index].doomed = 1;
		}
	}
}
