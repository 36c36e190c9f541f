/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a start takes on a full spool. Arguments: its bytes, streams, bytes a token. Half of the streams have ended.
 * Prints the milliseconds of recovery alone, and with mapping and unmapping.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>

#include "barrier.h"
#include "memory.h"
#include "turn.h"

enum { RING_BYTES = 1 << 22, HANDLES = 2048 };

static struct memory memory;
static struct claw_core *core;
static uint64_t head, seq;

static uint64_t now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return (uint64_t)at.tv_sec * 1000000000 + (uint64_t)at.tv_nsec;
}

static void put(uint8_t kind, uint32_t handle, const void *payload, uint32_t len)
{
	struct claw_record record = { .len = len, .kind = kind, .handle = (uint16_t)handle, .ring_seq = ++seq, .count = 1 };
	uint8_t *at = memory.ring + (head & (RING_BYTES - 1));
	while (head + claw_record_bytes(len) - memory.ctl->ack_pos > RING_BYTES)
		claw_turn(core, now());
	record.written_ns = now();
	memcpy(at, &record, sizeof(record));
	memcpy(at + sizeof(record), payload, len);
	head += claw_record_bytes(len);
	claw_store_release(&memory.data->head, head);
}

static void put_open(uint32_t handle, uint32_t number)
{
	char payload[sizeof(struct claw_open) + 32] = { 0 };
	char *name = payload + sizeof(struct claw_open);
	uint16_t len = (uint16_t)snprintf(name, 32, "chatcmpl-%020u", number);
	memcpy(payload, &(struct claw_open){ .name_len = len }, sizeof(struct claw_open));
	put(CLAW_OPEN, handle, payload, (uint32_t)sizeof(struct claw_open) + len);
}

int main(int argc, char **argv)
{
	static const char text[CLAW_RECORD_MAX] = "some text";
	if (argc != 4)
		return 2;
	uint64_t bytes = strtoull(argv[1], NULL, 0);
	uint32_t streams = (uint32_t)strtoul(argv[2], NULL, 0), token = (uint32_t)strtoul(argv[3], NULL, 0);
	struct claw_limits limits = {
		.spool_bytes = bytes,
		.stream_bytes = bytes,
		.keep_ns = 1ull << 60,
		.max_streams = streams,
		.max_rings = 2,
		.max_connections = 1,
		.max_attachments = 1,
	};
	int error, spool_fd = memory_file("spool", bytes), event_fd = eventfd(0, EFD_CLOEXEC);
	if (posix_fallocate(spool_fd, 0, (off_t)bytes))
		return 77;
	memory = memory_make(RING_BYTES);
	core = must(claw_core_create(&limits, -1, &error));
	if (claw_core_map_spool(core, spool_fd, bytes) ||
	    claw_ring_add(core, memory.data_fd, memory.ctl_fd, event_fd, RING_BYTES, 7, 9))
		return 1;
	/* In groups of as many as are open at once; each stream its share, so that the blocks of a group are mixed */
	uint64_t share = bytes / CLAW_BLOCK_BYTES / streams;
	uint64_t tokens = share * (CLAW_BLOCK_ROOM / claw_spooled_bytes(token)) - 2;
	for (uint32_t first = 0; first < streams; first += HANDLES / 2) {
		uint32_t base = first ? HANDLES / 2 : 0;
		uint32_t end = streams - first < HANDLES / 2 ? streams - first : HANDLES / 2;
		for (uint32_t i = 0; i < end; i++)
			put_open(base + i, first + i);
		for (uint64_t t = 0; t < tokens; t++)
			for (uint32_t i = 0; i < end; i++)
				put(CLAW_TOKEN, base + i, text, token);
		for (uint32_t i = 0; i < end; i++)
			if (first + HANDLES / 2 < streams || i % 2)
				put(CLAW_CLOSE, base + i, "stop", 4);
	}
	while (claw_turn(core, now()))
		;
	claw_core_destroy(core);

	struct claw_recovered found;
	uint64_t began = now();
	core = must(claw_core_create(&limits, -1, &error));
	if (claw_core_map_spool(core, spool_fd, bytes))
		return 1;
	uint64_t mapped = now();
	if (claw_core_recover(core, mapped, &found))
		return 1;
	uint64_t recovered = now();
	int ring = claw_ring_adopt(core, memory.data_fd, memory.ctl_fd, RING_BYTES, 7, 10, recovered);
	uint64_t adopted = now();
	printf("%u live, %u ended, %u of %u blocks, %u damaged: recovered in %.1f ms, with all around it %.1f ms\n", found.live,
	       found.ended, found.blocks, core->spool.block_count, found.damaged, (double)(recovered - mapped) / 1e6,
	       (double)(adopted - began) / 1e6);
	claw_core_destroy(core);
	return ring;
}
