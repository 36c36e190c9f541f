/* SPDX-License-Identifier: Apache-2.0 */
#include "ways.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "barrier.h"
#include "turn.h"

static int is_within(const struct claw_rows_layout *layout, uint32_t at, uint32_t size)
{
	return at % size == 0 && at <= layout->row_bytes - size;
}

static int is_sound(const struct claw_rows_layout *layout)
{
	return layout->entries && !(layout->entries & (layout->entries - 1)) && layout->entries <= CLAW_ROWS_MAX &&
	       layout->row_bytes >= 8 && layout->row_bytes <= CLAW_ROW_BYTES_MAX && layout->row_bytes % 8 == 0 &&
	       is_within(layout, layout->cookie, 8) && is_within(layout, layout->updated_ns, 8) &&
	       is_within(layout, layout->rtt_us, 4) && is_within(layout, layout->jitter_us, 4) &&
	       is_within(layout, layout->segments, 4) && is_within(layout, layout->again, 4);
}

int claw_rows_map(struct claw_core *core, int fd, const struct claw_rows_layout *layout)
{
	struct stat stat;
	if (!is_sound(layout))
		return -EINVAL;
	if (fstat(fd, &stat) < 0)
		return -errno;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t bytes = ((uint64_t)layout->entries * layout->row_bytes + page - 1) / page * page;
	/* The kernel itself maps no more of a BPF map than there is; of a file it would, and reading that is fatal */
	if (S_ISREG(stat.st_mode) && (uint64_t)stat.st_size < bytes)
		return -EINVAL;
	void *base = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return -errno;
	claw_rows_deinit(&core->rows);
	core->rows = (struct claw_rows){ .base = base, .bytes = bytes, .layout = *layout };
	return 0;
}

void claw_rows_unmap(struct claw_core *core)
{
	claw_rows_deinit(&core->rows);
}

void claw_rows_deinit(struct claw_rows *rows)
{
	if (rows->base)
		munmap((void *)rows->base, rows->bytes);
	*rows = (struct claw_rows){ 0 };
}

static uint32_t load_u32(const uint8_t *row, uint32_t at)
{
	return claw_load_relaxed((const uint32_t *)(const void *)(row + at));
}

static uint64_t load_u64(const uint8_t *row, uint32_t at)
{
	return claw_load_relaxed((const uint64_t *)(const void *)(row + at));
}

/*
 * The kernel writes while we read. Each number is whole, but some may be of one ACK and some of the next; then the next
 * look finds others than this one. Returns 0 when the row is another socket's or nobody's, which ends it and begins it.
 */
static int read_row(const struct claw_rows *rows, uint32_t slot, uint64_t cookie, struct claw_told *ret_told)
{
	const struct claw_rows_layout *layout = &rows->layout;
	if (slot >= layout->entries)
		return 0;
	const uint8_t *row = rows->base + (uint64_t)slot * layout->row_bytes;
	if (load_u64(row, layout->cookie) != cookie)
		return 0;
	/* The kernel stores the cookie last of a row that begins and first of one that ends: look before and after */
	claw_fence_acquire();
	ret_told->at_ns = load_u64(row, layout->updated_ns);
	ret_told->rtt_us = load_u32(row, layout->rtt_us);
	ret_told->jitter_us = load_u32(row, layout->jitter_us);
	ret_told->segments = load_u32(row, layout->segments);
	ret_told->again = load_u32(row, layout->again);
	claw_fence_acquire();
	return load_u64(row, layout->cookie) == cookie;
}

static void find_row(const struct claw_rows *rows, struct claw_way *way)
{
	struct claw_told told;
	way->slot = 0;
	for (uint32_t probe = 0; way->cookie && rows->base && probe < CLAW_WAY_PROBES; probe++) {
		uint32_t slot = (uint32_t)(way->cookie + probe) & (rows->layout.entries - 1);
		if (read_row(rows, slot, way->cookie, &told)) {
			way->slot = slot + 1;
			return;
		}
	}
}

/*
 * The mean over the last CLAW_WAY_SEGMENTS, of which those before the new ones are taken to have been lost evenly: a segment
 * that is sent again counts at once, as one of so many, however few were sent since the last look.
 */
static uint32_t loss_after(uint32_t loss_ppm, const struct claw_told *before, const struct claw_told *now)
{
	uint64_t sent = now->segments - before->segments;
	uint64_t again = now->again - before->again;
	if (sent > INT32_MAX || again > INT32_MAX)
		return loss_ppm; /* counters do not go back: what this is a count of is not what it was */
	if (again > sent)
		again = sent;
	if (sent >= CLAW_WAY_SEGMENTS)
		return (uint32_t)(again * 1000000 / sent);
	return (uint32_t)((again * 1000000 + (CLAW_WAY_SEGMENTS - sent) * loss_ppm) / CLAW_WAY_SEGMENTS);
}

static void learn(struct claw_core *core, uint32_t index, const struct claw_told *told, uint64_t now_ns)
{
	struct claw_way *way = &core->outbox.connections[index].way;
	if (told->rtt_us > CLAW_WAY_US_MAX || told->jitter_us > CLAW_WAY_US_MAX ||
	    !memcmp(told, &way->told, sizeof(*told)))
		return;
	way->loss_ppm = loss_after(way->loss_ppm, &way->told, told);
	way->told = *told;
	way->seen_ns = now_ns;
	claw_connection_touch(&core->outbox, index, CLAW_UNSHOWN_PART);
}

void claw_way_refresh(struct claw_core *core, uint32_t index, uint64_t now_ns)
{
	struct claw_way *way = &core->outbox.connections[index].way;
	struct claw_told told;
	if (!way->slot)
		return; /* who looks once a second finds it; to search at each token would cost */
	if (read_row(&core->rows, way->slot - 1, way->cookie, &told))
		learn(core, index, &told, now_ns);
	else
		way->slot = 0;
}

int claw_way_open(struct claw_core *core, uint32_t id, uint64_t cookie)
{
	struct claw_connection *connection = claw_connection_of(&core->outbox, id);
	if (!connection)
		return -ENOENT;
	connection->way = (struct claw_way){ .cookie = cookie, .far = 1 };
	return 0;
}

int claw_way_look(struct claw_core *core, uint32_t id, uint64_t now_ns)
{
	struct claw_connection *connection = claw_connection_of(&core->outbox, id);
	if (!connection)
		return -ENOENT;
	struct claw_way *way = &connection->way;
	if (way->slot)
		claw_way_refresh(core, id & UINT16_MAX, now_ns);
	if (!way->slot) {
		find_row(&core->rows, way);
		claw_way_refresh(core, id & UINT16_MAX, now_ns);
	}
	return way->slot ? (int)way->loss_ppm : -ENODATA;
}

int claw_way_tell(struct claw_core *core, uint32_t id, const struct claw_told *told, uint64_t now_ns)
{
	struct claw_connection *connection = claw_connection_of(&core->outbox, id);
	if (!connection)
		return -ENOENT;
	learn(core, id & UINT16_MAX, told, now_ns);
	return (int)connection->way.loss_ppm;
}
