/* SPDX-License-Identifier: Apache-2.0 */
/* The client's parser on any bytes: items lie within the frame, the sequence never goes back, no byte beyond is read. */
#include <stdlib.h>
#include <string.h>

#include "frame.h"

#define CHECK(truth) ((truth) ? (void)0 : abort())

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct claw_item items[1024];
	static uint8_t joined[CLAW_FRAME_MAX];
	static uint64_t written_ns[1024];
	uint32_t connection = 0;
	if (size < 2)
		return 0;
	/* first byte: put the header right, so that what follows is reached; second: room for items */
	uint8_t mode = data[0];
	int room = mode & 2 ? 1024 : data[1];
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
	int count = claw_frame_parse(start, len, items, room, &connection);
	CHECK(count <= room);
	size_t behind = 0;
	for (int i = 0; i < count; i++) {
		CHECK(items[i].offset >= behind && items[i].len <= len - items[i].offset);
		CHECK(items[i].kind >= CLAW_TOKEN && items[i].kind <= CLAW_GAP && items[i].klass <= CLAW_NORMAL);
		CHECK(items[i].seq <= INT64_MAX && items[i].bytes % CLAW_SPOOLED_ALIGN == 0);
		behind = items[i].offset + items[i].len;
	}
	size_t used = 0;
	for (int i = 0; i < count; i++) {
		int taken = claw_frame_gather(start, len, 0, items + i, count - i, joined, sizeof(joined), written_ns, &used);
		CHECK(taken >= 0 && used <= len);
		/* a part of the frame, and items that are not all in it */
		uint32_t base = mode % 64;
		size_t part = len > base ? (len - base) / 2 : 0;
		taken = claw_frame_gather(start + (len > base ? base : 0), part, base, items + i, count - i, joined,
					  mode & 8 ? 16 : sizeof(joined), written_ns, &used);
		CHECK(taken <= count - i);
		i += taken > 0 ? taken : 0;
	}
	free(frame);
	return 0;
}
