/* SPDX-License-Identifier: Apache-2.0 */
#include "page.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "barrier.h"
#include "guard.h"

enum {
	ALIGN = 64,
	LOOKS = 200, /* at a row, without a pause: many times what writing one takes */
	PAUSES = 50, /* for a writer that was taken off its processor just then, 100 us each */
};

static uint64_t words(uint64_t bytes)
{
	return (bytes + 7) / 8;
}

/* --- layout --- */

static void place(struct claw_page_table *table, uint64_t *at, uint64_t row_bytes, uint32_t count)
{
	*table = (struct claw_page_table){ .offset = *at, .row_bytes = (uint32_t)row_bytes, .count = count };
	*at = (*at + row_bytes * count + ALIGN - 1) / ALIGN * ALIGN;
}

static void lay_out(struct claw_page_header *ret_header, uint32_t streams, uint32_t rings, uint32_t connections)
{
	uint64_t at = (sizeof(*ret_header) + ALIGN - 1) / ALIGN * ALIGN;
	memset(ret_header, 0, sizeof(*ret_header));
	place(&ret_header->totals, &at, sizeof(struct claw_totals), 1);
	place(&ret_header->hists, &at, sizeof(struct claw_hist), CLAW_HIST_COUNT);
	place(&ret_header->streams, &at, sizeof(struct claw_page_stream), streams);
	place(&ret_header->rings, &at, sizeof(struct claw_page_ring), rings);
	place(&ret_header->connections, &at, sizeof(struct claw_page_connection), connections);
	place(&ret_header->marks, &at, sizeof(struct claw_page_mark), CLAW_PAGE_MARKS);
	ret_header->layout = CLAW_PAGE_LAYOUT;
	ret_header->bytes = at;
}

uint64_t claw_page_bytes(uint32_t stream_count, uint32_t ring_count, uint32_t connection_count)
{
	struct claw_page_header header;
	lay_out(&header, stream_count, ring_count, connection_count);
	return header.bytes <= CLAW_PAGE_BYTES_MAX ? header.bytes : 0;
}

/* --- writing --- */

int claw_page_init(struct claw_page *ret_page, int fd, uint32_t stream_count, uint32_t ring_count,
		   uint32_t connection_count)
{
	struct claw_page_header header;
	lay_out(&header, stream_count, ring_count, connection_count);
	if (header.bytes > CLAW_PAGE_BYTES_MAX)
		return -EINVAL;
	struct stat status;
	if (fd >= 0 && (fstat(fd, &status) < 0 || (uint64_t)status.st_size < header.bytes))
		return -EINVAL;
	uint8_t *base = mmap(NULL, header.bytes, PROT_READ | PROT_WRITE,
			     fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return -errno;
	memcpy(base, &header, sizeof(header));
	*ret_page = (struct claw_page){
		.header = (struct claw_page_header *)base,
		.totals = (struct claw_totals *)(base + header.totals.offset),
		.hists = (struct claw_hist *)(base + header.hists.offset),
		.streams = (struct claw_page_stream *)(base + header.streams.offset),
		.rings = (struct claw_page_ring *)(base + header.rings.offset),
		.connections = (struct claw_page_connection *)(base + header.connections.offset),
		.marks = (struct claw_page_mark *)(base + header.marks.offset),
		.bytes = header.bytes,
	};
	return 0;
}

void claw_page_deinit(struct claw_page *page)
{
	if (page->header)
		munmap(page->header, page->bytes);
	*page = (struct claw_page){ 0 };
}

void claw_page_publish(struct claw_page *page)
{
	/* Pairs with the acquire load in claw_view_open: who sees the magic sees the tables' places */
	claw_store_release(&page->header->magic, CLAW_PAGE_MAGIC);
}

void claw_page_beat(struct claw_page *page, uint64_t now_ns)
{
	claw_store_relaxed(&page->header->beat_ns, now_ns);
	claw_count(&page->header->beat, 1);
}

static inline void put_words(uint64_t *to, const void *from, uint64_t bytes)
{
	const uint8_t *at = from;
	for (uint64_t i = 0; i < words(bytes); i++) {
		uint64_t word;
		memcpy(&word, at + 8 * i, sizeof(word));
		claw_store_relaxed(&to[i], word);
	}
}

/*
 * A row is written between these two. The release fence keeps the words behind the odd seq: a reader whose acquire fence
 * stands between its copy of one of them and its second look at seq then sees that seq has changed. The release store
 * keeps them before the even seq: a reader whose acquire load saw that one sees them all.
 */
static uint64_t begin(uint64_t *seq)
{
	uint64_t odd = *seq | 1;
	claw_store_relaxed(seq, odd);
	claw_fence_release();
	return odd;
}

static void end(uint64_t *seq, uint64_t odd)
{
	claw_store_release(seq, odd + 1);
}

static void use(struct claw_page_table *table, uint32_t index)
{
	if (index >= table->used)
		claw_store_relaxed(&table->used, index + 1); /* a row that is not written yet is a free one */
}

void claw_page_put_stream(struct claw_page *page, uint32_t index, const struct claw_page_stream *row, int whole)
{
	enum { OFTEN = offsetof(struct claw_page_stream, requested_ns), NAME = offsetof(struct claw_page_stream, name) };
	struct claw_page_stream *to = &page->streams[index];
	uint64_t odd = begin(&to->seq);
	put_words(&to->seq + 1, &row->seq + 1, OFTEN - 8);
	if (whole) {
		put_words(&to->requested_ns, &row->requested_ns, NAME - OFTEN);
		put_words((uint64_t *)to->name, row->name, row->name_len);
		put_words((uint64_t *)to->reason, row->reason, row->reason_len);
	}
	end(&to->seq, odd);
	use(&page->header->streams, index);
}

void claw_page_put_ring(struct claw_page *page, uint32_t index, const struct claw_page_ring *row, int whole)
{
	struct claw_page_ring *to = &page->rings[index];
	uint64_t odd = begin(&to->seq);
	put_words(&to->seq + 1, &row->seq + 1, offsetof(struct claw_page_ring, peer) - 8);
	if (whole)
		put_words((uint64_t *)&to->peer, &row->peer, sizeof(row->peer));
	end(&to->seq, odd);
	use(&page->header->rings, index);
}

void claw_page_put_connection(struct claw_page *page, uint32_t index, const struct claw_page_connection *row, int whole)
{
	struct claw_page_connection *to = &page->connections[index];
	uint64_t odd = begin(&to->seq);
	put_words(&to->seq + 1, &row->seq + 1, offsetof(struct claw_page_connection, peer) - 8);
	if (whole)
		put_words((uint64_t *)&to->peer, &row->peer, sizeof(row->peer));
	end(&to->seq, odd);
	use(&page->header->connections, index);
}

void claw_page_mark(struct claw_page *page, uint64_t now_ns)
{
	struct claw_page_mark *to = &page->marks[page->mark_count++ % CLAW_PAGE_MARKS];
	uint64_t odd = begin(&to->seq);
	claw_store_relaxed(&to->at_ns, now_ns);
	put_words((uint64_t *)to->hists, page->hists, sizeof(to->hists));
	end(&to->seq, odd);
}

uint32_t claw_page_cut(const uint8_t *text, uint32_t len, uint32_t room)
{
	if (len <= room)
		return len;
	while (room && (text[room] & 0xc0) == 0x80)
		room--;
	return room;
}

/* --- reading --- */

struct claw_view {
	const uint8_t *base;
	uint64_t bytes;
	uint32_t faulted; /* set by the guard: the page was truncated, what was read since are zeros */
	struct claw_page_header header; /* checked, so that nothing is believed twice */
};

static void get_words(void *to, const void *from, uint64_t bytes)
{
	const uint64_t *at = from;
	for (uint64_t i = 0; i < words(bytes); i++) {
		uint64_t word = claw_load_relaxed(&at[i]);
		memcpy((uint8_t *)to + 8 * i, &word, sizeof(word));
	}
}

static int is_gone(const struct claw_view *view)
{
	return claw_load_relaxed(&view->faulted) != 0;
}

static int is_placed(const struct claw_page_table *table, uint64_t bytes, uint64_t row_bytes)
{
	return table->row_bytes == row_bytes && table->offset % 8 == 0 && table->offset >= sizeof(struct claw_page_header) &&
	       table->offset <= bytes && table->count <= (bytes - table->offset) / row_bytes;
}

static int is_sound(const struct claw_page_header *header, uint64_t bytes)
{
	return header->layout == CLAW_PAGE_LAYOUT && header->bytes == bytes &&
	       is_placed(&header->totals, bytes, sizeof(struct claw_totals)) && header->totals.count == 1 &&
	       is_placed(&header->hists, bytes, sizeof(struct claw_hist)) && header->hists.count == CLAW_HIST_COUNT &&
	       is_placed(&header->streams, bytes, sizeof(struct claw_page_stream)) &&
	       is_placed(&header->rings, bytes, sizeof(struct claw_page_ring)) &&
	       is_placed(&header->connections, bytes, sizeof(struct claw_page_connection)) &&
	       is_placed(&header->marks, bytes, sizeof(struct claw_page_mark)) &&
	       memchr(header->version, 0, sizeof(header->version)) &&
	       memchr(header->runtime_dir, 0, sizeof(header->runtime_dir));
}

struct claw_view *claw_view_open(int fd, int *ret_error)
{
	struct stat status;
	struct claw_view *view = NULL;
	*ret_error = -EBADMSG;
	if (fstat(fd, &status) < 0) {
		*ret_error = -errno;
		return NULL;
	}
	if (!S_ISREG(status.st_mode) || status.st_size < (off_t)sizeof(struct claw_page_header) ||
	    status.st_size > CLAW_PAGE_BYTES_MAX)
		return NULL;
	uint64_t bytes = (uint64_t)status.st_size;
	const uint8_t *base = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED) {
		*ret_error = -errno;
		return NULL;
	}
	view = calloc(1, sizeof(*view));
	int result = view ? claw_guard_add((void *)base, bytes, PROT_READ, &view->faulted) : -ENOMEM;
	if (result < 0) {
		*ret_error = result;
		munmap((void *)base, bytes);
		free(view);
		return NULL;
	}
	view->base = base;
	view->bytes = bytes;
	/* Pairs with claw_page_publish */
	uint32_t magic = claw_load_acquire(&((const struct claw_page_header *)base)->magic);
	get_words(&view->header, base, sizeof(view->header));
	if (magic == CLAW_PAGE_MAGIC && !is_gone(view) && is_sound(&view->header, bytes))
		return view;
	if (!magic)
		*ret_error = -EAGAIN;
	claw_view_close(view);
	return NULL;
}

void claw_view_close(struct claw_view *view)
{
	if (!view)
		return;
	claw_guard_remove((void *)view->base);
	munmap((void *)view->base, view->bytes);
	free(view);
}

static uint32_t used_of(const struct claw_page_table *shared, const struct claw_page_table *checked)
{
	uint32_t used = claw_load_relaxed(&shared->used);
	return used < checked->count ? used : checked->count;
}

int claw_view_header(struct claw_view *view, struct claw_page_header *ret_header)
{
	const struct claw_page_header *shared = (const struct claw_page_header *)view->base;
	struct claw_page_header header = view->header;
	header.beat = claw_load_relaxed(&shared->beat);
	header.beat_ns = claw_load_relaxed(&shared->beat_ns);
	header.clients = claw_load_relaxed(&shared->clients);
	header.streams.used = used_of(&shared->streams, &header.streams);
	header.rings.used = used_of(&shared->rings, &header.rings);
	header.connections.used = used_of(&shared->connections, &header.connections);
	if (is_gone(view))
		return -EFAULT;
	*ret_header = header;
	return 0;
}

int claw_view_totals(struct claw_view *view, struct claw_totals *ret_totals)
{
	get_words(ret_totals, view->base + view->header.totals.offset, sizeof(*ret_totals));
	return is_gone(view) ? -EFAULT : 0;
}

int claw_view_hist(struct claw_view *view, uint32_t which, struct claw_hist *ret_hist)
{
	if (which >= CLAW_HIST_COUNT)
		return -ERANGE;
	get_words(ret_hist, view->base + view->header.hists.offset + which * sizeof(*ret_hist), sizeof(*ret_hist));
	return is_gone(view) ? -EFAULT : 0;
}

/* A copy of a row as it was at one moment. The fences' other halves are at begin(). */
static int read_row(struct claw_view *view, const struct claw_page_table *table, uint32_t index, void *ret_row)
{
	if (index >= table->count)
		return -ERANGE;
	const uint64_t *row = (const uint64_t *)(view->base + table->offset + (uint64_t)index * table->row_bytes);
	for (int look = 0; look < LOOKS * PAUSES; look++) {
		if (look && look % LOOKS == 0)
			nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
		uint64_t seq = claw_load_acquire(row);
		if (seq & 1)
			continue;
		get_words(ret_row, row, table->row_bytes);
		claw_fence_acquire();
		if (claw_load_relaxed(row) == seq)
			return is_gone(view) ? -EFAULT : 1;
	}
	return -EAGAIN;
}

static int is_peer(const struct claw_page_peer *peer)
{
	return peer->label_len <= CLAW_PAGE_LABEL;
}

int claw_view_stream(struct claw_view *view, uint32_t index, struct claw_page_stream *ret_row)
{
	int result = read_row(view, &view->header.streams, index, ret_row);
	if (result <= 0)
		return result;
	if (ret_row->name_len > CLAW_NAME_MAX || ret_row->reason_len > CLAW_PAGE_REASON)
		return -EBADMSG;
	return ret_row->state != 0;
}

int claw_view_ring(struct claw_view *view, uint32_t index, struct claw_page_ring *ret_row)
{
	int result = read_row(view, &view->header.rings, index, ret_row);
	if (result <= 0)
		return result;
	return is_peer(&ret_row->peer) ? ret_row->state != 0 : -EBADMSG;
}

int claw_view_connection(struct claw_view *view, uint32_t index, struct claw_page_connection *ret_row)
{
	int result = read_row(view, &view->header.connections, index, ret_row);
	if (result <= 0)
		return result;
	return is_peer(&ret_row->peer) ? ret_row->number != 0 : -EBADMSG;
}

int claw_view_mark(struct claw_view *view, uint32_t index, struct claw_page_mark *ret_row)
{
	int result = read_row(view, &view->header.marks, index, ret_row);
	return result <= 0 ? result : ret_row->at_ns != 0;
}
