/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <string.h>

static int is_reason(const uint8_t *payload, uint32_t len)
{
	return len && len <= CLAW_REASON_MAX && claw_is_text(payload, len);
}

int claw_block_look(const struct claw_spool *spool, uint32_t block, int is_first, int is_last, struct claw_tale *ret_tale)
{
	const struct claw_slot *slot = &spool->slots[block];
	const uint8_t *records = claw_spool_records(spool, block);
	struct claw_tale tale = { .close = CLAW_NONE };
	uint64_t seq = slot->first_seq;
	for (uint32_t offset = 0; offset < slot->used;) {
		struct claw_spooled record;
		if (slot->used - offset < sizeof(record) || tale.close != CLAW_NONE)
			return 0;
		memcpy(&record, records + offset, sizeof(record));
		const uint8_t *payload = records + offset + sizeof(record);
		uint32_t bytes = claw_spooled_bytes(record.len);
		if (bytes > slot->used - offset || record.klass > CLAW_NORMAL ||
		    (record.kind == CLAW_OPEN) != (is_first && !offset))
			return 0;
		if (record.kind != CLAW_CLOSE && record.ring_seq <= tale.ring_seq)
			return 0;
		switch (record.kind) {
		case CLAW_TOKEN:
			if (record.len > CLAW_RECORD_MAX)
				return 0;
			if (!tale.tokens++) {
				tale.first_seq = seq;
				tale.first_written_ns = record.written_ns;
			}
			tale.text_bytes += record.len;
			seq++;
			break;
		case CLAW_GAP:
			if (!record.count || !is_reason(payload, record.len))
				return 0;
			seq += record.count;
			break;
		case CLAW_OPEN:
			if (record.len > CLAW_RECORD_MAX || record.count > record.len || record.ring_seq != claw_spool_block(spool, block)->open_seq)
				return 0;
			tale.opened_ns = record.written_ns;
			break;
		case CLAW_CLOSE:
			if (!is_last || !is_reason(payload, record.len))
				return 0;
			tale.close = offset;
			break;
		default:
			return 0;
		}
		if (record.ring_seq > tale.ring_seq)
			tale.ring_seq = record.ring_seq;
		offset += bytes;
	}
	*ret_tale = tale;
	return seq == slot->next_seq;
}

int claw_stream_check_block(struct claw_streams *streams, uint32_t block)
{
	struct claw_slot *slot = &streams->spool->slots[block];
	struct claw_tale tale;
	if (!slot->unchecked)
		return 1;
	slot->unchecked = 0;
	if (claw_block_look(streams->spool, block, 0, 0, &tale))
		return 1;
	streams->evicted_blocks++;
	claw_stream_free_block(streams, slot->stream, block);
	return 0;
}
