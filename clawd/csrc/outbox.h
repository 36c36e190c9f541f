/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_OUTBOX_H
#define CLAW_OUTBOX_H

#include <stddef.h>
#include <stdint.h>

#include "page.h"
#include "stream.h"
#include "ways.h"

#include "outbox.cdef.h"

enum {
	CLAW_QUEUES = 3, /* of a connection, by the best class that an attachment has to get: CRITICAL, HIGH, NORMAL */
	/*
	 * Frames in a row that a queue may wait through while HIGH goes before it, and that CRITICAL may go before such;
	 * then it is first, NORMAL before HIGH.
	 */
	CLAW_OVERTAKES = 3,
	CLAW_QUEUE_NONE = CLAW_QUEUES,
	CLAW_QUEUE_AWAITING, /* its stream has not opened */
	CLAW_QUEUE_DONE, /* CLOSE is in this turn's frames; freed by the next turn, when those are sent and accounted */
};

_Static_assert(CLAW_QUEUES == CLAW_NORMAL + 1, "a queue for each class");

/* One client's reading of one stream */
struct claw_attachment {
	uint32_t id; /* the client's own number; 0 = this entry is free */
	uint32_t connection; /* index */
	uint32_t stream;
	uint32_t next_in_hash; /* index + 1, also links free entries */
	uint32_t prev_of_stream, next_of_stream;
	uint32_t prev_of_connection, next_of_connection;
	uint32_t prev_queued, next_queued;
	uint8_t queue; /* which queue it is in */
	uint8_t opened; /* OPEN was sent */
	uint8_t cancel; /* cancelled before the stream opened */
	uint8_t admitted; /* it may read, where not everybody may */
	uint8_t observes;
	uint32_t grace_ms; /* of the attach */
	uint64_t next_seq; /* first sequence not sent yet */
	uint64_t block_serial; /* of the block under the cursor: another serial there means it was evicted */
	uint32_t block, offset;
	uint64_t credit_limit, credit_used; /* record bytes since attach */
	uint64_t deadline_ns; /* while awaiting */
	uint64_t sent_ns; /* its last token, 0 = none was */
	uint64_t timed_seq, timed_ns; /* a token whose time until it is sent is taken, and its release; 0 = none is */
};

struct claw_connection {
	uint32_t id; /* generation << 16 | index; 0 = free */
	uint32_t generation;
	uint32_t next_ready, next_free, next_unshown;
	uint8_t unshown; /* CLAW_UNSHOWN_…, 0 = the page has this row */
	uint8_t ready; /* is in the list of connections with something to send */
	uint8_t blocked; /* its socket took no more */
	uint8_t congested; /* its window was full when there was something to send */
	uint8_t compact; /* since then it has not caught up: its frames are packed */
	uint8_t laned; /* it has an express lane */
	uint8_t doubled; /* all its frames go there too */
	uint16_t frame_number; /* of the last frame */
	/* Frames in a row that each queue waited through; of CRITICAL: that it went before who waited. ≤ CLAW_OVERTAKES */
	uint8_t overtaken[CLAW_QUEUES];
	uint64_t charged, acked; /* window, in charged bytes since the connection came */
	uint64_t express_charged, express_acked; /* likewise of the express lane; the ones before are the bulk lane's */
	uint32_t attachments; /* first in its list */
	uint32_t attachment_count;
	struct claw_list queue[CLAW_QUEUES];
	struct claw_page_peer peer;
	struct claw_way way;
};

struct claw_outbox {
	struct claw_streams *streams;
	struct claw_connection *connections;
	struct claw_attachment *attachments;
	uint32_t *hash;
	uint32_t hash_mask;
	uint32_t connection_max, attachment_max;
	uint32_t attachments_per_user; /* 0 = no less than all */
	uint32_t connection_used, attachment_used; /* entries ever used */
	uint32_t connection_free, attachment_free;
	uint32_t attachment_count;
	struct claw_list ready, done, awaiting;
	uint32_t unshown; /* first of the connections whose row changed since the last turn */
	uint64_t unmet_ns; /* when to look for attachments that waited in vain, 0 = never as things stand */
	uint8_t *out;
	struct claw_frame *frames;
	uint32_t frame_count, out_bytes;
	uint64_t gaps; /* GAPs told to readers */
	uint32_t unproven; /* there may be attachments that wait for a verdict */
	uint32_t congested; /* a connection became so since anybody looked */
	uint32_t pressure; /* of the host, as told by claw_core_pressure */
	uint64_t copies; /* frames that went on the express lane */
	uint64_t saved_bytes; /* by compact encoding */
	uint8_t packed[CLAW_FRAME_MAX];
};

int claw_outbox_init(struct claw_outbox *ret_outbox, struct claw_streams *streams, uint32_t connection_max,
		     uint32_t attachment_max);
void claw_outbox_deinit(struct claw_outbox *outbox);
/* Queue the attachments of every stream that has news. */
void claw_outbox_wake(struct claw_outbox *outbox);
/* Build frames for what is queued. Returns 1 when there is more than fits now, else 0. */
int claw_outbox_build(struct claw_outbox *outbox);
/* Was any attachment of this stream cancelled before it opened? */
int claw_outbox_cancelled(const struct claw_outbox *outbox, uint32_t stream);

/* By its number; NULL: there is none. */
static inline struct claw_connection *claw_connection_of(const struct claw_outbox *outbox, uint32_t id)
{
	struct claw_connection *connection = &outbox->connections[id & UINT16_MAX];
	return id && (id & UINT16_MAX) < outbox->connection_used && connection->id == id ? connection : NULL;
}

uint32_t claw_connection_open(struct claw_outbox *outbox);
int claw_connection_close(struct claw_outbox *outbox, uint32_t connection, uint64_t now_ns);
int claw_connection_block(struct claw_outbox *outbox, uint32_t connection, int blocked);
int claw_connection_name(struct claw_outbox *outbox, uint32_t connection, const struct claw_page_peer *peer);
/* Its row changed, to this extent: show it after this turn. */
void claw_connection_touch(struct claw_outbox *outbox, uint32_t index, uint8_t unshown);
int claw_flow_take(struct claw_outbox *outbox, uint32_t connection, const uint8_t *message, size_t len);
int claw_attachment_open(struct claw_outbox *outbox, uint32_t connection, const struct claw_attach *attach,
			 uint64_t now_ns);
int claw_attachment_close(struct claw_outbox *outbox, uint32_t connection, uint32_t id, uint64_t now_ns);
/* Index of an attachment, or CLAW_NONE. */
uint32_t claw_attachment_find(struct claw_outbox *outbox, uint32_t connection, uint32_t id);
/* Put it in the queue that fits what it has to get next. */
void claw_attachment_queue(struct claw_outbox *outbox, uint32_t index);
void claw_attachment_unqueue(struct claw_outbox *outbox, uint32_t index);
void claw_attachment_done(struct claw_outbox *outbox, uint32_t index);
void claw_connection_ready(struct claw_outbox *outbox, uint32_t index);
/* Take out attachments that waited in vain, at most max. */
int claw_outbox_unmet(struct claw_outbox *outbox, uint64_t now_ns, struct claw_unmet *ret_unmet, int max);
/* Free the attachments whose CLOSE went out with the last turn. */
void claw_outbox_sweep(struct claw_outbox *outbox, uint64_t now_ns);

#endif
