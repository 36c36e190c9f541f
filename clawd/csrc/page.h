/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_PAGE_H
#define CLAW_PAGE_H

#include <stddef.h>
#include <stdint.h>

#include "hist.h"
#include "ring.h"

#include "page.cdef.h"

_Static_assert(sizeof(struct claw_page_header) == 496, "layout of a page's header");
_Static_assert(offsetof(struct claw_page_header, bytes) == 8, "the words every layout has");
_Static_assert(sizeof(struct claw_page_stream) == 464, "layout of a stream's row");
_Static_assert(offsetof(struct claw_page_stream, requested_ns) == 80, "what changes often comes first");
_Static_assert(offsetof(struct claw_page_ring, peer) == 64, "what changes often is one line");
_Static_assert(sizeof(struct claw_page_ring) == 152, "layout of a ring's row");
_Static_assert(sizeof(struct claw_page_connection) == 152, "layout of a connection's row");

/* How much of a row the page has not got yet */
enum {
	CLAW_UNSHOWN_PART = 1,
	CLAW_UNSHOWN_WHOLE = 2,
};

/* clawd's own side */
struct claw_page {
	struct claw_page_header *header;
	struct claw_totals *totals;
	struct claw_hist *hists;
	struct claw_page_stream *streams;
	struct claw_page_ring *rings;
	struct claw_page_connection *connections;
	struct claw_page_mark *marks;
	uint64_t mark_count; /* ever made */
	uint64_t mark_due_ns;
	uint64_t bytes;
};

/* Map a page of claw_page_bytes by its descriptor, -1 = private memory, and lay it out. Nobody takes it for a page until
 * claw_page_publish. */
int claw_page_init(struct claw_page *ret_page, int fd, uint32_t stream_count, uint32_t ring_count,
		   uint32_t connection_count);
void claw_page_deinit(struct claw_page *page);
void claw_page_publish(struct claw_page *page);
void claw_page_beat(struct claw_page *page, uint64_t now_ns);
/* Keep what the histograms are now */
void claw_page_mark(struct claw_page *page, uint64_t now_ns);
/* Write a row: all of it, or only what changes often. Its seq is not the caller's. */
void claw_page_put_stream(struct claw_page *page, uint32_t index, const struct claw_page_stream *row, int whole);
void claw_page_put_ring(struct claw_page *page, uint32_t index, const struct claw_page_ring *row, int whole);
void claw_page_put_connection(struct claw_page *page, uint32_t index, const struct claw_page_connection *row,
			      int whole);

#endif
