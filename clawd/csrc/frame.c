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

/* May this text end inside a UTF-8 character: is a byte that begins one among the last three, and are too few after it? */
static int ends_begun(const uint8_t *text, size_t len)
{
	for (size_t back = 1; back <= 3 && back <= len; back++) {
		uint8_t byte = text[len - back];

		if (byte < 0x80)
			return 0;
		if (byte >= 0xc0)
			return back < (byte >= 0xf0 ? 4u : byte >= 0xe0 ? 3u : 2u);
	}
	return len > 0 && len < 3; /* what came before decides */
}

/* The records of one segment, whose bytes start at `at` and are known to lie within the frame */
static int check_segment(const uint8_t *frame, size_t at, const struct claw_segment *segment, struct claw_part *ret_part)
{
	uint64_t seq = segment->first_seq;
	uint32_t left = segment->len, records = 0, tokens = 0, flags = CLAW_PART_BEGUN;

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
		seq += advance(&record);
		left -= bytes;
		records++;
		if (record.kind == CLAW_TOKEN) {
			tokens++;
			/* one without text tells nothing */
			if (record.len)
				flags = ends_begun(frame + at + sizeof(record), record.len) ? CLAW_PART_BEGUN : 0;
		} else if (record.kind == CLAW_CLOSE) {
			/* a stream says nothing after its end */
			if (left > 0)
				return -EBADMSG;
			flags |= CLAW_PART_CLOSES;
		}
		at += bytes;
	}
	if (records != segment->records)
		return -EBADMSG;
	*ret_part = (struct claw_part){
		.attachment = segment->attachment,
		.incarnation = segment->incarnation,
		.first_seq = segment->first_seq,
		.end_seq = seq,
		.offset = (uint32_t)(at - segment->len),
		.len = segment->len,
		.tokens = tokens,
		.flags = flags | (tokens && tokens == records ? CLAW_PART_PLAIN : 0),
	};
	return 0;
}

int claw_frame_split(const uint8_t *frame, size_t len, struct claw_part *ret_parts, int part_count,
		     uint32_t *ret_connection)
{
	struct claw_frame_header header;
	size_t at = sizeof(header);

	if (len < sizeof(header) || len > CLAW_FRAME_MAX)
		return -EBADMSG;
	memcpy(&header, frame, sizeof(header));
	if (header.kind != CLAW_FRAME_DATA || header.version != CLAW_FRAME_VERSION || header.len != len)
		return -EBADMSG;
	for (int i = 0; i < header.segments; i++) {
		struct claw_segment segment;

		if (len - at < sizeof(segment))
			return -EBADMSG;
		memcpy(&segment, frame + at, sizeof(segment));
		at += sizeof(segment);
		if (segment.len > len - at || segment.len % CLAW_SPOOLED_ALIGN != 0)
			return -EBADMSG;
		if (i >= part_count)
			return -ENOBUFS;
		int result = check_segment(frame, at, &segment, &ret_parts[i]);

		if (result < 0)
			return result;
		at += segment.len;
	}
	if (at != len)
		return -EBADMSG;
	*ret_connection = header.connection;
	return header.segments;
}

/* The TOKEN that starts at `at`: 1, or 0 = the end or another record is there, or -EBADMSG. */
static int token_at(const uint8_t *records, size_t len, size_t at, struct claw_spooled *ret_record)
{
	if (at == len)
		return 0;
	if (len - at < sizeof(*ret_record))
		return -EBADMSG;
	memcpy(ret_record, records + at, sizeof(*ret_record));
	if (claw_spooled_bytes(ret_record->len) > len - at)
		return -EBADMSG;
	return ret_record->kind == CLAW_TOKEN;
}

int claw_records_run(const uint8_t *records, size_t len, uint32_t *ret_tokens)
{
	struct claw_spooled record;
	size_t at = 0;
	int found;

	if (len > INT32_MAX)
		return -EBADMSG;
	*ret_tokens = 0;
	while ((found = token_at(records, len, at, &record)) > 0) {
		at += claw_spooled_bytes(record.len);
		++*ret_tokens;
	}
	return found < 0 ? found : (int)at;
}

int claw_records_join(const uint8_t *records, size_t len, uint8_t *ret_data, size_t data_len, uint64_t *ret_written_ns,
		      uint32_t token_count)
{
	struct claw_spooled record;
	size_t at = 0, used = 0;
	uint32_t taken = 0;
	int found;

	if (len > INT32_MAX)
		return -EBADMSG;
	while ((found = token_at(records, len, at, &record)) > 0) {
		if (record.len > data_len - used || taken == token_count)
			return -ENOBUFS;
		memcpy(ret_data + used, records + at + sizeof(record), record.len);
		ret_written_ns[taken++] = record.written_ns;
		used += record.len;
		at += claw_spooled_bytes(record.len);
	}
	return found < 0 ? found : (int)used;
}
