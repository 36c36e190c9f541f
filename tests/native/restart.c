/* SPDX-License-Identifier: Apache-2.0 */
#include "turn.h"

#include "barrier.h"
#include "restart.h"

/* Its records in the order of their places in the ring, and no number but by a record */
static const char *check_stream(const struct claw_core *core, const struct claw_stream *stream)
{
	const struct claw_spool *spool = &core->spool;
	uint64_t before = 0;
	for (uint32_t block = stream->first_block; block != CLAW_NONE; block = spool->slots[block].next) {
		const struct claw_slot *slot = &spool->slots[block];
		const uint8_t *records = claw_spool_records(spool, block);
		uint64_t seq = slot->first_seq;
		if (claw_spool_block(spool, block)->committed !=
		    claw_block_committed(slot->used, slot->next_seq - slot->first_seq))
			return "a block is not what it is taken for";
		for (uint32_t offset = 0; offset < slot->used;) {
			struct claw_spooled record;
			memcpy(&record, records + offset, sizeof(record));
			if (record.ring_seq && record.ring_seq <= before)
				return "a record was taken twice";
			before = record.ring_seq ? record.ring_seq : before;
			seq += record.kind == CLAW_TOKEN ? 1 : record.kind == CLAW_GAP ? record.count : 0;
			offset += claw_spooled_bytes(record.len);
		}
		if (seq != slot->next_seq)
			return "a number has no record";
	}
	return before == stream->ring_seq || stream->shut ? NULL : "a stream's last record is another";
}

static const char *check(const struct claw_core *core, const struct memory *memory, const struct expected *streams, int count)
{
	const struct claw_ring *ring = &core->rings[0];
	int found = 0;
	if (ring->violation)
		return "its producer is taken for a hostile one";
	if (ring->drain.pos != claw_load_relaxed(&memory->data->head))
		return "the ring is not drained";
	for (uint32_t i = 0; i < core->streams.used; i++) {
		const struct claw_stream *stream = &core->streams.table[i];
		if (stream->state != CLAW_STREAM_LIVE && stream->state != CLAW_STREAM_ENDED)
			continue;
		const struct expected *due = streams;
		while (due < streams + count && due->open_seq != stream->open_seq)
			due++;
		if (due == streams + count)
			return "a stream is not the producer's";
		if (stream->next_seq != due->next_seq)
			return stream->next_seq < due->next_seq ? "a record is lost" : "a number was given twice";
		if ((stream->state == CLAW_STREAM_ENDED) != due->ended)
			return "a stream's end is another";
		if (!due->ended && ring->handles[stream->handle] != i)
			return "a live stream is not known by its handle";
		const char *complaint = check_stream(core, stream);
		if (complaint)
			return complaint;
		found++;
	}
	return found == count ? NULL : "a stream is lost, or there twice";
}

const char *restart(const uint8_t *spool, uint64_t spool_bytes, const struct memory *memory,
		    const struct claw_limits *limits, const struct expected *streams, int count)
{
	static int spool_fd = -1, ctl_fd;
	static uint8_t *spool_copy;
	static struct claw_ctl *ctl_copy;
	struct claw_recovered found;
	int error;
	if (spool_fd < 0) {
		spool_fd = memory_file("spool copy", spool_bytes);
		ctl_fd = memory_file("ctl copy", sizeof(*ctl_copy));
		spool_copy = must(mmap(NULL, spool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, spool_fd, 0));
		ctl_copy = must(mmap(NULL, sizeof(*ctl_copy), PROT_READ | PROT_WRITE, MAP_SHARED, ctl_fd, 0));
	}
	memcpy(spool_copy, spool, spool_bytes);
	memcpy(ctl_copy, memory->ctl, sizeof(*ctl_copy));
	struct claw_core *core = must(claw_core_create(limits, -1, &error));
	const char *complaint = NULL;
	if (claw_core_map_spool(core, spool_fd, spool_bytes) || claw_core_recover(core, 6000, &found) || found.damaged)
		complaint = "the spool is damaged";
	else if (claw_ring_adopt(core, memory->data_fd, ctl_fd, memory->ring_bytes, ctl_copy->ring_id, 10, 6000) != 0)
		complaint = "the ring cannot be taken over";
	else if (claw_orphans_end(core, 0, "producer_lost", 6000))
		complaint = "a live stream has no ring";
	for (int i = 0; !complaint && claw_turn(core, 6000) && i < 10; i++)
		;
	if (!complaint)
		complaint = check(core, memory, streams, count);
	claw_core_destroy(core);
	return complaint;
}
