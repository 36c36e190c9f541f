/* SPDX-License-Identifier: Apache-2.0 */
#include "first.h"

#include "barrier.h"
#include "turn.h"

static const uint64_t ms_ns = 1000000;

void claw_first_start(struct claw_streams *streams, uint32_t index, uint64_t now_ns)
{
	struct claw_stream *stream = &streams->table[index];
	claw_first_stop(streams, index);
	stream->first_until_ns = now_ns + CLAW_FIRST_WAIT_MS * ms_ns;
	stream->next_first = CLAW_NONE;
	stream->prev_first = streams->first.tail;
	if (streams->first.tail == CLAW_NONE)
		streams->first.head = index;
	else
		streams->table[streams->first.tail].next_first = index;
	streams->first.tail = index;
	streams->first_count++;
}

void claw_first_stop(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	if (!stream->first_until_ns)
		return;
	stream->first_until_ns = 0;
	if (stream->prev_first == CLAW_NONE)
		streams->first.head = stream->next_first;
	else
		streams->table[stream->prev_first].next_first = stream->next_first;
	if (stream->next_first == CLAW_NONE)
		streams->first.tail = stream->prev_first;
	else
		streams->table[stream->next_first].prev_first = stream->prev_first;
	streams->first_count--;
}

void claw_first_expire(struct claw_streams *streams, uint64_t now_ns)
{
	while (streams->first.head != CLAW_NONE && streams->table[streams->first.head].first_until_ns <= now_ns)
		claw_first_stop(streams, streams->first.head);
}

uint64_t claw_first_until(const struct claw_streams *streams)
{
	return streams->first.tail == CLAW_NONE ? 0 : streams->table[streams->first.tail].first_until_ns;
}

void claw_core_boost(struct claw_core *core, uint32_t level, uint64_t run_delay_ns)
{
	struct claw_totals *totals = core->totals;
	if (level == CLAW_BOOST_FIRST && totals->boost != CLAW_BOOST_FIRST)
		claw_count(&totals->boosts, 1);
	claw_store_relaxed(&totals->boost, level);
	claw_store_relaxed(&totals->run_delay_ns, run_delay_ns);
}
