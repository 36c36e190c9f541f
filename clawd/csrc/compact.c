/* SPDX-License-Identifier: Apache-2.0 */
#include "compact.h"

#include <errno.h>
#include <string.h>

enum {
	KIND_MASK = 7,
	CLASS_SHIFT = 3,
	CLASS_MASK = 3,
	COUNTED = 0x80,
	VARINT_MAX = 10, /* bytes of 64 bits */
	RECORD_MAX = 1 + 3 * VARINT_MAX, /* before the payload */
};

struct writer {
	uint8_t *at, *end;
};

struct reader {
	const uint8_t *at, *end;
};

static void put_varint(struct writer *writer, uint64_t value)
{
	while (value >= 0x80) {
		*writer->at++ = (uint8_t)(value | 0x80);
		value >>= 7;
	}
	*writer->at++ = (uint8_t)value;
}

static int get_varint(struct reader *reader, uint64_t *ret_value)
{
	*ret_value = 0;
	for (int i = 0; i < VARINT_MAX && reader->at < reader->end; i++) {
		uint8_t byte = *reader->at++;
		if (i == VARINT_MAX - 1 && byte > 1)
			return -EBADMSG;
		*ret_value |= (uint64_t)(byte & 0x7f) << (7 * i);
		if (byte < 0x80)
			return 0;
	}
	return -EBADMSG;
}

static uint64_t zigzag(uint64_t difference)
{
	return difference << 1 ^ -(difference >> 63);
}

static uint64_t unzigzag(uint64_t value)
{
	return value >> 1 ^ -(value & 1);
}

/* 0, or -ENOBUFS */
static int pack_records(struct writer *writer, const uint8_t *records, uint32_t len)
{
	uint64_t before_ns = 0;
	for (uint32_t at = 0; at < len;) {
		struct claw_spooled record;
		memcpy(&record, records + at, sizeof(record));
		if ((size_t)(writer->end - writer->at) < RECORD_MAX + (size_t)record.len)
			return -ENOBUFS;
		*writer->at++ = (uint8_t)(record.kind | record.klass << CLASS_SHIFT | (record.count != 1 ? COUNTED : 0));
		put_varint(writer, record.len);
		if (record.count != 1)
			put_varint(writer, record.count);
		put_varint(writer, zigzag(record.written_ns - before_ns));
		before_ns = record.written_ns;
		memcpy(writer->at, records + at + sizeof(record), record.len);
		writer->at += record.len;
		at += claw_spooled_bytes(record.len);
	}
	return 0;
}

int claw_frame_pack(const uint8_t *frame, size_t len, uint8_t *ret_packed, size_t ret_len)
{
	struct claw_frame_header header;
	struct writer writer = { ret_packed, ret_packed + (ret_len < len ? ret_len : len) };
	memcpy(&header, frame, sizeof(header));
	writer.at += sizeof(header);
	for (size_t at = sizeof(header); at < len;) {
		struct claw_segment segment;
		memcpy(&segment, frame + at, sizeof(segment));
		at += sizeof(segment);
		if ((size_t)(writer.end - writer.at) < sizeof(segment))
			return 0;
		uint8_t *place = writer.at;
		writer.at += sizeof(segment);
		if (pack_records(&writer, frame + at, segment.len) < 0)
			return 0;
		at += segment.len;
		segment.len = (uint32_t)(writer.at - place - (ptrdiff_t)sizeof(segment));
		memcpy(place, &segment, sizeof(segment));
	}
	header.kind = CLAW_FRAME_PACKED;
	header.len = (uint32_t)(writer.at - ret_packed);
	memcpy(ret_packed, &header, sizeof(header));
	return header.len < len ? (int)header.len : 0;
}

static int unpack_record(struct reader *reader, struct writer *writer, uint64_t *before_ns)
{
	uint64_t len, count = 1, difference;
	if (reader->at == reader->end)
		return -EBADMSG;
	uint8_t first = *reader->at++;
	if (get_varint(reader, &len) < 0 || (first & COUNTED && get_varint(reader, &count) < 0) ||
	    get_varint(reader, &difference) < 0 || first & 0x60 || count > UINT32_MAX ||
	    len > (size_t)(reader->end - reader->at) || len > UINT16_MAX)
		return -EBADMSG;
	uint32_t bytes = claw_spooled_bytes((uint32_t)len);
	if ((size_t)(writer->end - writer->at) < bytes)
		return -EBADMSG;
	*before_ns += unzigzag(difference);
	struct claw_spooled record = {
		.len = (uint16_t)len,
		.kind = first & KIND_MASK,
		.klass = first >> CLASS_SHIFT & CLASS_MASK,
		.count = (uint32_t)count,
		.written_ns = *before_ns,
	};
	memset(writer->at + bytes - CLAW_SPOOLED_ALIGN, 0, CLAW_SPOOLED_ALIGN);
	memcpy(writer->at, &record, sizeof(record));
	memcpy(writer->at + sizeof(record), reader->at, len);
	writer->at += bytes;
	reader->at += len;
	return 0;
}

int claw_frame_unpack(const uint8_t *packed, size_t len, uint8_t *ret_frame, size_t ret_len)
{
	struct claw_frame_header header;
	struct writer writer = { ret_frame, ret_frame + (ret_len < CLAW_FRAME_MAX ? ret_len : CLAW_FRAME_MAX) };
	struct reader reader = { packed + sizeof(header), packed + len };
	if (len < sizeof(header) || len > CLAW_FRAME_MAX || (size_t)(writer.end - writer.at) < sizeof(header))
		return -EBADMSG;
	memcpy(&header, packed, sizeof(header));
	if (header.kind != CLAW_FRAME_PACKED || header.len != len)
		return -EBADMSG;
	writer.at += sizeof(header);
	for (uint32_t i = 0; i < header.segments; i++) {
		struct claw_segment segment;
		if ((size_t)(reader.end - reader.at) < sizeof(segment) || (size_t)(writer.end - writer.at) < sizeof(segment))
			return -EBADMSG;
		memcpy(&segment, reader.at, sizeof(segment));
		reader.at += sizeof(segment);
		if (segment.len > (size_t)(reader.end - reader.at))
			return -EBADMSG;
		struct reader part = { reader.at, reader.at + segment.len };
		uint8_t *place = writer.at;
		uint64_t before_ns = 0;
		writer.at += sizeof(segment);
		while (part.at < part.end)
			if (unpack_record(&part, &writer, &before_ns) < 0)
				return -EBADMSG;
		reader.at = part.end;
		segment.len = (uint32_t)(writer.at - place - (ptrdiff_t)sizeof(segment));
		memcpy(place, &segment, sizeof(segment));
	}
	if (reader.at != reader.end)
		return -EBADMSG;
	header.kind = CLAW_FRAME_DATA;
	header.len = (uint32_t)(writer.at - ret_frame);
	memcpy(ret_frame, &header, sizeof(header));
	return (int)header.len;
}
