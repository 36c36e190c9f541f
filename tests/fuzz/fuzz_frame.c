/* SPDX-License-Identifier: Apache-2.0 */
/* The client's splitter on any bytes: parts lie within the frame, hold whole records, and no byte beyond is read. */
#include <stdlib.h>
#include <string.h>

#include "frame.h"

#define CHECK(truth) ((truth) ? (void)0 : abort())

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct claw_part parts[CLAW_FRAME_MAX / sizeof(struct claw_segment)];
	static uint8_t joined[CLAW_FRAME_MAX];
	static uint64_t written_ns[1024];
	uint32_t connection = 0;
	if (size < 2)
		return 0;
	/* first byte: put the header right, so that what follows is reached; second: room for parts */
	uint8_t mode = data[0];
	int room = mode & 2 ? (int)(sizeof(parts) / sizeof(*parts)) : data[1];
	size_t len = size - 2;
	uint8_t *frame = malloc(len + 1);
	CHECK(frame);
	uint8_t *start = frame + (mode & 4 ? 1 : 0); /* at any alignment; ASan watches its end */
	memcpy(start, data + 2, len - (len && mode & 4 ? 1 : 0));
	len -= len && mode & 4 ? 1 : 0;
	if (mode & 1 && len >= sizeof(struct claw_frame_header)) {
		struct claw_frame_header header;
		memcpy(&header, start, sizeof(header));
		header.kind = CLAW_FRAME_DATA;
		header.version = CLAW_FRAME_VERSION;
		header.len = (uint32_t)len;
		memcpy(start, &header, sizeof(header));
	}
	int count = claw_frame_split(start, len, parts, room, &connection);
	CHECK(count <= room);
	size_t behind = 0;
	for (int i = 0; i < count; i++) {
		const struct claw_part *part = &parts[i];
		CHECK(part->offset > behind && part->len <= len - part->offset);
		CHECK(part->first_seq <= part->end_seq && part->end_seq <= INT64_MAX);
		behind = part->offset + part->len;
		uint64_t seq = part->first_seq;
		uint32_t tokens = 0;
		/* every record of it by itself, and all runs of TOKENs */
		for (size_t at = part->offset; at < behind;) {
			struct claw_spooled record;
			uint32_t run = 0;
			CHECK(behind - at >= sizeof(record));
			memcpy(&record, start + at, sizeof(record));
			CHECK(record.kind >= CLAW_TOKEN && record.kind <= CLAW_GAP && record.klass <= CLAW_NORMAL);
			int bytes = claw_records_run(start + at, behind - at, &run);
			CHECK(bytes >= 0 && (size_t)bytes <= behind - at && (bytes > 0) == (record.kind == CLAW_TOKEN));
			int used = claw_records_join(start + at, behind - at, joined, sizeof(joined), written_ns, 1024);
			CHECK(used >= 0 && used <= bytes);
			/* too little room, and records that are cut */
			CHECK(claw_records_join(start + at, behind - at, joined, mode & 8 ? 16 : sizeof(joined), written_ns,
						mode & 16 ? 1 : 1024) <= used);
			CHECK(claw_records_run(start + at, (behind - at) / 2, &run) <= bytes);
			tokens += record.kind == CLAW_TOKEN;
			seq += record.kind == CLAW_TOKEN ? 1 : record.kind == CLAW_GAP ? record.count : 0;
			at += claw_spooled_bytes(record.len);
		}
		CHECK(seq == part->end_seq && tokens == part->tokens);
	}
	uint32_t run = 0; /* and what was not checked */
	claw_records_run(start, len, &run);
	claw_records_join(start, len, joined, sizeof(joined), written_ns, 1024);
	free(frame);
	return 0;
}
