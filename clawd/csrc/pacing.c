/* SPDX-License-Identifier: Apache-2.0 */
/* Between the intake and the outbox: which of the tokens that came may readers have by now? */
#include <errno.h>
#include <sys/mman.h>

#include "barrier.h"
#include "reserve.h"
#include "turn.h"

enum {
	EARLY_NS = 500000, /* what is due so soon goes now: no reader can tell, and it bounds the wake-ups a second */
	LAG_NS = 1000000000, /* of which the engine should hear */
	RATE_MAX = 1000000000, /* a million tokens a second */
};

int claw_pacing_init(struct claw_pacing *ret_pacing, uint32_t max_streams)
{
	/* O2, O7 and W7, until the configuration comes */
	ret_pacing->mode = CLAW_PACE_OFF;
	ret_pacing->pace = (struct claw_pace){
		.max_delay_ns = 200000000,
		.timeout_ns = 50000000,
		.prefetch = 3,
		.bucket = 50,
		.refill_rate = 30000,
		.leak_rate = 45000,
		.burst_rate = 80000,
		.burst = 8,
	};
	ret_pacing->pacers = claw_reserve((uint64_t)max_streams * sizeof(struct claw_pacer));
	int result = claw_timers_init(&ret_pacing->timers, max_streams);
	return ret_pacing->pacers ? result : -ENOMEM;
}

void claw_pacing_deinit(struct claw_pacing *pacing, uint32_t max_streams)
{
	if (pacing->pacers)
		munmap(pacing->pacers, (uint64_t)max_streams * sizeof(struct claw_pacer));
	claw_timers_deinit(&pacing->timers);
	pacing->pacers = NULL;
}

static void count_noticed(struct claw_core *core, uint32_t noticed)
{
	if (!noticed)
		return;
	claw_count(&core->totals->paced_slower, !!(noticed & CLAW_PACED_SLOWER));
	claw_count(&core->totals->paced_high_water, !!(noticed & CLAW_PACED_HIGH_WATER));
	claw_count(&core->totals->paced_low_water, !!(noticed & CLAW_PACED_LOW_WATER));
	claw_count(&core->totals->paced_delay_jump, !!(noticed & CLAW_PACED_DELAY_JUMP));
}

/* A token goes out as fast as the worst way to any of its stream's readers allows. Who only watches slows nobody down. */
static struct claw_network network_of(struct claw_core *core, const struct claw_stream *stream, uint64_t now_ns)
{
	const struct claw_outbox *outbox = &core->outbox;
	struct claw_network worst = { 0 };
	for (uint32_t at = stream->attachments; at != CLAW_NONE; at = outbox->attachments[at].next_of_stream) {
		if (outbox->attachments[at].observes)
			continue;
		const struct claw_connection *connection = &outbox->connections[outbox->attachments[at].connection];
		const struct claw_way *way = &connection->way;
		claw_way_refresh(core, outbox->attachments[at].connection, now_ns);
		if (way->loss_ppm > worst.loss_ppm)
			worst.loss_ppm = way->loss_ppm;
		if (way->told.jitter_us > worst.jitter_us)
			worst.jitter_us = way->told.jitter_us;
		worst.congested |= connection->congested;
	}
	return worst;
}

static uint32_t mode_of(const struct claw_core *core, const struct claw_stream *stream)
{
	return stream->pace != CLAW_PACE_DEFAULT ? stream->pace : core->pacing.mode;
}

static void start(const struct claw_core *core, struct claw_stream *stream, struct claw_pacer *pacer, uint64_t now_ns)
{
	const struct claw_pacing *pacing = &core->pacing;
	uint32_t mode = mode_of(core, stream);
	if (!stream->paced) {
		claw_pacer_init(pacer, mode, &pacing->pace, now_ns);
		stream->paced = 1;
	} else if (pacer->mode != mode) {
		claw_pacer_mode(pacer, mode, &pacing->pace, now_ns);
	}
}

/* Of tokens that came, or went, together the first one ends a gap */
static void count_gaps(struct claw_core *core, int hist, uint64_t *last_ns, uint64_t count, uint64_t now_ns)
{
	if (*last_ns)
		claw_hist_add(&core->page.hists[hist], now_ns - *last_ns);
	if (count > 1)
		claw_hist_add_many(&core->page.hists[hist], 0, count - 1);
	*last_ns = now_ns;
}

static void arrive(struct claw_core *core, struct claw_stream *stream, struct claw_pacer *pacer, uint64_t now_ns)
{
	if (stream->arrived_seq >= stream->next_seq)
		return;
	uint64_t count = stream->next_seq - stream->arrived_seq;
	stream->arrived_seq = stream->next_seq;
	count_gaps(core, CLAW_HIST_GAP_RAW, &stream->last_arrived_ns, count, now_ns);
	count_noticed(core, claw_pacer_arrive(pacer, now_ns, (uint32_t)count, 0));
}

/* One token of those that arrived goes to readers */
static void release(struct claw_core *core, struct claw_stream *stream, struct claw_pacer *pacer,
		    const struct claw_network *network, uint64_t now_ns)
{
	uint64_t held_ns;
	count_noticed(core, claw_pacer_release(pacer, &core->pacing.pace, network, now_ns, &held_ns));
	claw_hist_add(&core->page.hists[CLAW_HIST_HELD], held_ns);
	if (stream->released_seq++ == 0)
		claw_hist_add(&core->page.hists[CLAW_HIST_HELD_FIRST], held_ns);
	count_gaps(core, CLAW_HIST_GAP, &stream->last_released_ns, 1, now_ns);
	if (held_ns > stream->row.lag_ns)
		stream->row.lag_ns = held_ns;
	/* Smooth is behind because it was told to be, and never for good: a slower engine would gain nothing */
	int lags = pacer->mode == CLAW_PACE_STEADY && held_ns >= LAG_NS;
	if (stream->ring != CLAW_NONE && (lags || network->congested)) {
		struct claw_hints *hints = &core->rings[stream->ring].hints;
		if (lags && held_ns > hints->lag_ns)
			hints->lag_ns = held_ns;
		if (lags && (!hints->refill || pacer->refill < hints->refill))
			hints->refill = pacer->refill;
		if (!core->hints_due_ns)
			core->hints_due_ns = now_ns;
	}
}

/* Tokens that its pacer never knew of, for they go as they come */
static void pass(struct claw_core *core, struct claw_stream *stream, uint64_t from_seq, uint64_t now_ns)
{
	uint64_t count = stream->flush_seq - from_seq;
	count_gaps(core, CLAW_HIST_GAP_RAW, &stream->last_arrived_ns, count, now_ns);
	count_gaps(core, CLAW_HIST_GAP, &stream->last_released_ns, count, now_ns);
	claw_hist_add_many(&core->page.hists[CLAW_HIST_HELD], 0, count);
	if (from_seq == 0)
		claw_hist_add(&core->page.hists[CLAW_HIST_HELD_FIRST], 0);
}

/*
 * Whatever is before flush_seq goes, held or not. What came after the last gap is accounted; a gap may be of any length, and
 * what came with it and before it is not told from it.
 */
static void flush(struct claw_core *core, struct claw_stream *stream, struct claw_pacer *pacer, uint64_t now_ns)
{
	const struct claw_network quiet = { 0 };
	while (pacer->queued && stream->released_seq < stream->flush_seq)
		release(core, stream, pacer, &quiet, now_ns);
	if (stream->released_seq < stream->flush_seq)
		stream->released_seq = stream->flush_seq;
	if (stream->arrived_seq < stream->flush_seq) {
		uint64_t from_seq = stream->arrived_seq > stream->gap_seq ? stream->arrived_seq : stream->gap_seq;
		if (from_seq < stream->flush_seq)
			pass(core, stream, from_seq, now_ns);
		stream->arrived_seq = stream->flush_seq;
		pacer->released_ns = now_ns;
	}
}

static void step(struct claw_core *core, uint32_t index, uint64_t now_ns)
{
	struct claw_stream *stream = &core->streams.table[index];
	struct claw_pacing *pacing = &core->pacing;
	struct claw_pacer *pacer = &pacing->pacers[index];
	if (stream->state != CLAW_STREAM_LIVE && stream->state != CLAW_STREAM_ENDED) {
		stream->arrived_seq = stream->released_seq = stream->next_seq;
		claw_timers_set(&pacing->timers, index, 0);
		return;
	}
	/* What arrives, or a change of mode, can make due what was not: that is no lateness */
	uint64_t was_due_ns = claw_pacer_due(pacer, &pacing->pace);
	start(core, stream, pacer, now_ns);
	if (stream->released_seq < stream->flush_seq)
		flush(core, stream, pacer, now_ns);
	arrive(core, stream, pacer, now_ns);
	uint64_t due_ns = claw_pacer_due(pacer, &pacing->pace);
	uint64_t since_ns = was_due_ns < now_ns ? was_due_ns : now_ns;
	if (due_ns <= now_ns + EARLY_NS) {
		struct claw_network network = { 0 };
		if (pacer->mode == CLAW_PACE_STEADY)
			network = network_of(core, stream, now_ns);
		stream->row.lag_ns = 0;
		do {
			uint64_t from_ns = due_ns > since_ns ? due_ns : since_ns;
			claw_hist_add(&core->page.hists[CLAW_HIST_RELEASE],
				      now_ns > from_ns ? now_ns - from_ns : from_ns - now_ns);
			release(core, stream, pacer, &network, now_ns);
			due_ns = claw_pacer_due(pacer, &pacing->pace);
		} while (due_ns <= now_ns + EARLY_NS);
	}
	claw_timers_set(&pacing->timers, index, pacer->queued ? due_ns : 0);
}

void claw_pacing_turn(struct claw_core *core, uint64_t now_ns)
{
	struct claw_pacing *pacing = &core->pacing;
	struct claw_streams *streams = &core->streams;
	for (;;) {
		uint32_t index = claw_timers_due(&pacing->timers, now_ns + EARLY_NS);
		if (index == UINT32_MAX)
			break;
		claw_timers_set(&pacing->timers, index, 0);
		claw_stream_mark(streams, index);
	}
	for (uint32_t at = streams->dirty.head; at != CLAW_NONE; at = streams->table[at].next_dirty)
		step(core, at, now_ns);
}

/* Whoever holds something looks again by the new rules in the next turn; who holds nothing shows them */
static void look_again(struct claw_core *core)
{
	const struct claw_timers *timers = &core->pacing.timers;
	for (uint32_t i = 0; i < timers->count; i++)
		claw_stream_mark(&core->streams, timers->heap[i]);
	for (uint32_t i = 0; i < core->streams.used; i++)
		if (core->streams.table[i].state == CLAW_STREAM_LIVE && core->streams.table[i].paced)
			claw_stream_mark(&core->streams, i);
	core->pending = 1;
}

static int is_rate(uint32_t rate)
{
	return rate >= 1000 && rate <= RATE_MAX;
}

int claw_core_pace(struct claw_core *core, uint32_t mode, const struct claw_pace *pace)
{
	const uint64_t hour_ns = 3600000000000;
	if (mode == CLAW_PACE_DEFAULT || mode > CLAW_PACE_STEADY || pace->max_delay_ns > hour_ns ||
	    pace->timeout_ns > hour_ns || !pace->prefetch || pace->prefetch > CLAW_PACER_RUNS || pace->bucket < 5 ||
	    pace->bucket > 1000000 || !is_rate(pace->refill_rate) || !is_rate(pace->leak_rate) ||
	    !is_rate(pace->burst_rate) || pace->burst > 1000000)
		return -EINVAL;
	core->pacing.mode = mode;
	core->pacing.pace = *pace;
	look_again(core);
	return 0;
}

int claw_core_pace_stream(struct claw_core *core, const uint8_t *name, uint32_t name_len, uint32_t mode)
{
	uint32_t index = claw_stream_find(&core->streams, name, name_len);
	if (index == CLAW_NONE || mode > CLAW_PACE_STEADY)
		return -ENOENT;
	struct claw_stream *stream = &core->streams.table[index];
	/* One that is only awaited is opened with a choice of its own, which would be the last word */
	if (stream->state != CLAW_STREAM_LIVE && stream->state != CLAW_STREAM_ENDED)
		return -ENOENT;
	stream->pace = (uint8_t)mode;
	if (stream->first_block != CLAW_NONE)
		claw_spool_block(&core->spool, stream->first_block)->pace = mode;
	claw_stream_mark(&core->streams, index);
	core->pending = 1;
	return 0;
}

int claw_connection_streams(const struct claw_core *core, uint32_t connection, uint32_t *ret_unpaced,
			    uint64_t *ret_bytes)
{
	const struct claw_outbox *outbox = &core->outbox;
	const struct claw_connection *found = claw_connection_of(outbox, connection);
	if (!found)
		return -ENOENT;
	int count = 0;
	uint32_t at = found->attachments;
	*ret_bytes = 0;
	for (*ret_unpaced = 0; at != CLAW_NONE; at = outbox->attachments[at].next_of_connection) {
		const struct claw_stream *stream = &core->streams.table[outbox->attachments[at].stream];
		if (stream->state != CLAW_STREAM_LIVE)
			continue;
		count++;
		*ret_bytes += sizeof(struct claw_segment) + sizeof(struct claw_spooled);
		if (stream->row.tokens)
			*ret_bytes += stream->row.text_bytes / stream->row.tokens;
		*ret_unpaced += mode_of(core, stream) == CLAW_PACE_OFF;
	}
	return count;
}
