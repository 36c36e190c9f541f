/* SPDX-License-Identifier: Apache-2.0 */
/* The client's half of the data frame: nothing in it is believed before it is checked, and it may lie at any address. */
#include "frame.h"

#include <errno.h>
#include <string.h>

static int check_record(const struct claw_spooled *record)
{
	if (record->klass > CLAW_NORMAL)
		return -EBADMSG;
	switch (record->kind) {
	case CLAW_TOKEN:
	case CLAW_OPEN:
		return record->len <= CLAW_RECORD_MAX ? 0 : -EBADMSG;
	case CLAW_GAP:
		return record->len <= CLAW_REASON_MAX && record->count > 0 ? 0 : -EBADMSG;
	case CLAW_CLOSE:
		return record->len <= CLAW_REASON_MAX ? 0 : -EBADMSG;
	default:
		return -EBADMSG;
	}
}

static uint64_t advance(const struct claw_spooled *record)
{
	if (record->kind == CLAW_TOKEN)
		return 1;
	return record->kind == CLAW_GAP ? record->count : 0;
}

/* The records of one segment, whose bytes start at `at` and are known to lie within the frame */
static int parse_segment(const uint8_t *frame, size_t at, const struct claw_segment *segment,
			 struct claw_item *ret_items, int item_count)
{
	uint64_t seq = segment->first_seq;
	size_t left = segment->len;
	int found = 0;

	/* a resume names the sequence as a signed 64-bit number, so the upper half is never reached */
	if (seq > INT64_MAX)
		return -EBADMSG;
	while (left > 0) {
		struct claw_spooled record;

		if (left < sizeof(record))
			return -EBADMSG;
		memcpy(&record, frame + at, sizeof(record));
		uint32_t bytes = claw_spooled_bytes(record.len);

		if (check_record(&record) < 0 || bytes > left || advance(&record) > INT64_MAX - seq)
			return -EBADMSG;
		if (found >= item_count)
			return -ENOBUFS;
		ret_items[found++] = (struct claw_item){
			.attachment = segment->attachment,
			.incarnation = segment->incarnation,
			.seq = seq,
			.written_ns = record.written_ns,
			.offset = (uint32_t)(at + sizeof(record)),
			.count = record.count,
			.len = record.len,
			.kind = record.kind,
			.klass = record.klass,
			.bytes = bytes,
		};
		seq += advance(&record);
		at += bytes;
		left -= bytes;
		/* a stream says nothing after its end */
		if (record.kind == CLAW_CLOSE && left > 0)
			return -EBADMSG;
	}
	return (uint32_t)found == segment->records ? found : -EBADMSG;
}

int claw_frame_parse(const uint8_t *frame, size_t len, struct claw_item *ret_items, int item_count,
		     uint32_t *ret_connection)
{
	struct claw_frame_header header;
	size_t at = sizeof(header);
	int found = 0;

	if (len < sizeof(header) || len > CLAW_FRAME_MAX)
		return -EBADMSG;
	memcpy(&header, frame, sizeof(header));
	if (header.kind != CLAW_FRAME_DATA || header.version != CLAW_FRAME_VERSION || header.len != len)
		return -EBADMSG;
	for (uint32_t i = 0; i < header.segments; i++) {
		struct claw_segment segment;

		if (len - at < sizeof(segment))
			return -EBADMSG;
		memcpy(&segment, frame + at, sizeof(segment));
		at += sizeof(segment);
		if (segment.len > len - at || segment.len % CLAW_SPOOLED_ALIGN != 0)
			return -EBADMSG;
		int result = parse_segment(frame, at, &segment, ret_items + found, item_count - found);

		if (result < 0)
			return result;
		found += result;
		at += segment.len;
	}
	if (at != len)
		return -EBADMSG;
	*ret_connection = header.connection;
	return found;
}

int claw_frame_gather(const uint8_t *frame, size_t len, uint32_t base, const struct claw_item *items, int item_count,
		      uint8_t *ret_data, size_t data_len, uint64_t *ret_written_ns, size_t *ret_data_len)
{
	size_t used = 0;
	int taken;

	for (taken = 0; taken < item_count && items[taken].kind == CLAW_TOKEN; taken++) {
		const struct claw_item *item = &items[taken];

		if (item->offset < base || item->offset - base > len || item->len > len - (item->offset - base))
			return -EBADMSG;
		if (item->len > data_len - used)
			return -ENOBUFS;
		memcpy(ret_data + used, frame + (item->offset - base), item->len);
		ret_written_ns[taken] = item->written_ns;
		used += item->len;
	}
	*ret_data_len = used;
	return taken;
}
