/* SPDX-License-Identifier: Apache-2.0 */
#include "grace.h"

#include "turn.h"

static const uint64_t ms_ns = 1000000;
/* How long a name is remembered whose time was over before it opened: an OPEN that comes within it is cancelled */
static const uint64_t doomed_ns = 30000000000;

enum {
	AWAITED_SHARE = 8, /* of the table, one part at most for names that nobody reads and nobody has opened */
};

int claw_grace_init(struct claw_grace *ret_grace, uint32_t max)
{
	ret_grace->awaited = 0;
	return claw_timers_init(&ret_grace->timers, max);
}

void claw_grace_deinit(struct claw_grace *grace)
{
	claw_timers_deinit(&grace->timers);
}

static void start(struct claw_streams *streams, uint32_t index, uint64_t until_ns)
{
	claw_timers_set(&streams->grace.timers, index, until_ns);
	streams->grace.awaited += streams->table[index].state == CLAW_STREAM_AWAITED;
}

int claw_grace_runs(const struct claw_streams *streams, uint32_t index)
{
	return streams->grace.timers.due_ns[index] != 0;
}

void claw_grace_stop(struct claw_streams *streams, uint32_t index)
{
	struct claw_stream *stream = &streams->table[index];
	stream->doomed = 0;
	if (!claw_grace_runs(streams, index))
		return;
	claw_timers_set(&streams->grace.timers, index, 0);
	streams->grace.awaited -= stream->state == CLAW_STREAM_AWAITED;
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
	start(streams, index, now_ns + stream->grace_ms * ms_ns);
}

uint64_t claw_grace_due(const struct claw_streams *streams)
{
	return claw_timers_next(&streams->grace.timers);
}

void claw_grace_expire(struct claw_core *core, uint64_t now_ns)
{
	struct claw_streams *streams = &core->streams;
	for (;;) {
		uint32_t index = claw_timers_due(&streams->grace.timers, now_ns);
		if (index == UINT32_MAX)
			break;
		uint8_t doomed = streams->table[index].doomed;
		claw_grace_stop(streams, index);
		if (streams->table[index].state == CLAW_STREAM_LIVE) {
			claw_stream_unread(core, index, now_ns);
		} else if (doomed) {
			claw_stream_release(streams, index);
		} else {
			start(streams, index, now_ns + doomed_ns);
			streams->table[index].doomed = 1;
		}
	}
}
