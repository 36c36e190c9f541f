/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_STREAM_H
#define CLAW_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "pacer.h"
#include "page.h"
#include "first.h"
#include "grace.h"
#include "hash.h"
#include "spool.h"
#include "text.h"

#include "stream.cdef.h"

struct claw_list {
	uint32_t head, tail;
};

struct claw_stream {
	uint32_t state;
	uint32_t next_in_hash; /* also links free streams */
	uint32_t older, younger; /* ENDED: in the order of their ends; GONE: likewise */
	uint64_t stream_id;
	uint64_t next_seq;
	uint64_t arrived_seq; /* after the last token its pacer knows of */
	uint64_t last_arrived_ns, last_released_ns; /* tokens, for the gaps */
	uint64_t flush_seq; /* what is before is not held: an urgent token, a gap */
	uint64_t gap_seq; /* after the last gap */
	uint64_t released_seq; /* readers may have what is before */
	uint64_t told_seq; /* as of when its attachments were woken last */
	uint64_t critical_until; /* sequence after the last CRITICAL token */
	uint64_t high_until; /* and the last HIGH one */
	struct claw_text text; /* as far as it was written */
	uint64_t open_seq;
	uint64_t ring_seq; /* of the last record taken: those up to it come again when a ring is drained again */
	uint64_t ring_id;
	uint32_t ring; /* index, CLAW_NONE once ended */
	uint32_t incarnation;
	uint16_t handle;
	uint8_t dirty; /* has records that its attachments were not woken for */
	uint8_t shut; /* the last block takes no more: what came after it was dropped or evicted */
	uint8_t pace; /* CLAW_PACE_… that it was opened with, or told since */
	uint8_t restricted; /* not for everybody: its OPEN says for whom */
	uint8_t paced; /* its pacer has started */
	uint8_t told; /* its attachments were woken once: for OPEN */
	uint8_t unshown; /* CLAW_UNSHOWN_…, 0 = the page has this row */
	uint32_t next_dirty, next_unshown;
	uint32_t first_block, last_block;
	uint32_t block_count;
	uint32_t attachments; /* first in its list */
	uint32_t attachment_count;
	uint32_t readers; /* of these attachments, those that are no observer's */
	uint32_t grace_ms; /* nobody reads it for so long = it is cancelled; 0 = never */
	uint8_t doomed; /* AWAITED, and cancelled when it opens */
	uint64_t first_until_ns; /* its first token is waited for so long; 0 = not waited for */
	uint32_t prev_first, next_first;
	uint64_t deadline_ns; /* ENDED: when its blocks go; GONE: when its name goes */
	struct claw_stream_row row;
};

struct claw_streams {
	struct claw_spool *spool;
	struct claw_stream *table;
	uint32_t *hash;
	uint32_t hash_mask;
	uint32_t max;
	uint32_t used; /* slots ever used: the rest was never touched */
	uint32_t free_head;
	uint32_t count[CLAW_STREAM_GONE + 1]; /* by state */
	struct claw_list ended, gone;
	struct claw_list dirty; /* streams with news for their attachments, in the order it came */
	struct claw_grace grace; /* timers of those that nobody reads */
	struct claw_list first; /* streams whose first token is waited for, in the order of their OPENs */
	uint32_t first_count;
	uint32_t unshown; /* first of those whose row changed since the last turn */
	uint64_t hash_key[2];
	uint64_t ids; /* stream ids given */
	uint64_t random; /* state of the incarnation generator */
	uint64_t keep_ns;
	uint32_t stream_blocks; /* a stream holds at most so many */
	uint64_t evicted_blocks, dropped_tokens; /* counters */
};

int claw_streams_init(struct claw_streams *ret_streams, struct claw_spool *spool, uint32_t max, uint64_t keep_ns,
		      uint64_t stream_bytes);
/* Change both for all streams, those that ended before included. 0, or -EINVAL with nothing changed. */
int claw_streams_limit(struct claw_streams *streams, uint64_t keep_ns, uint64_t stream_bytes);
void claw_streams_deinit(struct claw_streams *streams);
void claw_stream_set_state(struct claw_streams *streams, uint32_t index, uint32_t state);
uint32_t claw_stream_find(const struct claw_streams *streams, const uint8_t *name, uint32_t name_len);
/* A new stream in AWAITED. Forgets the oldest GONE or ENDED one to make room; CLAW_NONE when all are in use. */
uint32_t claw_stream_await(struct claw_streams *streams, const uint8_t *name, uint32_t name_len);
/*
 * AWAITED → LIVE with a block and its OPEN record, or -ENOSPC and nothing changed. `meta` starts with `readers_len` bytes
 * that say whom the stream is for.
 */
int claw_stream_open(struct claw_streams *streams, uint32_t index, uint32_t ring, uint64_t ring_id,
		     const struct claw_record *record, uint64_t requested_ns, const uint8_t *meta, uint32_t meta_len,
		     uint32_t readers_len);
/*
 * Where the next record goes, its payload after it, or NULL when neither a free block nor an evictable one is there.
 * Fill both in there (a header that is copied from elsewhere stalls the copy on its bytes), then claw_stream_commit; or
 * claw_stream_drop. Sequence numbers move on in both cases: readers of what was not stored get a GAP.
 */
struct claw_spooled *claw_stream_reserve(struct claw_streams *streams, uint32_t index, uint32_t len);
void claw_stream_commit(struct claw_streams *streams, uint32_t index, const struct claw_spooled *spooled);
void claw_stream_drop(struct claw_streams *streams, uint32_t index, uint32_t count, uint64_t ring_seq);
/* ring_seq: of the producer's CLOSE, 0 when it is clawd that ends the stream. */
void claw_stream_end(struct claw_streams *streams, uint32_t index, uint64_t ring_seq, const uint8_t *reason,
		     uint32_t reason_len, uint64_t now_ns);
/* Its first token was sent, for the first time. */
void claw_stream_first_sent(struct claw_streams *streams, uint32_t index, uint64_t sent_ns);
/* Whether a block that a start found holds what it should. One that does not is taken out of its stream. */
int claw_stream_check_block(struct claw_streams *streams, uint32_t block);
/* Take a block out of a stream and free it. */
void claw_stream_free_block(struct claw_streams *streams, uint32_t index, uint32_t block);
/*
 * A stream that a start found, whose blocks are in its chain: what AWAITED becomes. An ended one goes on where it was in its
 * time; they are to come in the order of their ends.
 */
void claw_stream_revive(struct claw_streams *streams, uint32_t index);
void claw_stream_conclude(struct claw_streams *streams, uint32_t index, const uint8_t *reason, uint32_t reason_len,
			  uint64_t ended_ns);
void claw_stream_mark(struct claw_streams *streams, uint32_t index);
/* Its row changed, to this extent: show it after this turn. */
void claw_stream_touch(struct claw_streams *streams, uint32_t index, uint8_t unshown);
/* Take a stream out of the table once nobody reads or awaits it. */
void claw_stream_release(struct claw_streams *streams, uint32_t index);
/* Let go of what is past its time. */
void claw_streams_expire(struct claw_streams *streams, uint64_t now_ns);
/* When there is more to let go of, 0 = never as things stand. */
uint64_t claw_streams_due(const struct claw_streams *streams, uint64_t now_ns);
/* First block of the stream that holds sequence seq or a later one, CLAW_NONE when none does. */
uint32_t claw_stream_seek(const struct claw_streams *streams, uint32_t index, uint64_t seq);

#endif
