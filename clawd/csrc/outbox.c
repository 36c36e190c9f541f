/* SPDX-License-Identifier: Apache-2.0 */
#include "outbox.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "reserve.h"
#include "share.h"

int claw_outbox_init(struct claw_outbox *ret_outbox, struct claw_streams *streams, uint32_t connection_max,
		     uint32_t attachment_max)
{
	if (!connection_max || connection_max > UINT16_MAX + 1 || !attachment_max || attachment_max > 1u << 24)
		return -EINVAL;
	uint32_t buckets = 1;
	while (buckets < attachment_max)
		buckets *= 2;
	*ret_outbox = (struct claw_outbox){
		.streams = streams,
		.hash_mask = buckets - 1,
		.connection_max = connection_max,
		.attachment_max = attachment_max,
		.connection_free = CLAW_NONE,
		.attachment_free = CLAW_NONE,
		.ready = { CLAW_NONE, CLAW_NONE },
		.done = { CLAW_NONE, CLAW_NONE },
		.awaiting = { CLAW_NONE, CLAW_NONE },
		.unshown = CLAW_NONE,
		.connections = claw_reserve((uint64_t)connection_max * sizeof(struct claw_connection)),
		.attachments = claw_reserve((uint64_t)attachment_max * sizeof(struct claw_attachment)),
		.hash = claw_reserve((uint64_t)buckets * sizeof(uint32_t)),
		.out = claw_reserve(CLAW_OUT_BYTES),
		.frames = claw_reserve(CLAW_FRAME_COUNT * sizeof(struct claw_frame)),
	};
	if (ret_outbox->connections && ret_outbox->attachments && ret_outbox->hash && ret_outbox->out &&
	    ret_outbox->frames)
		return 0;
	claw_outbox_deinit(ret_outbox);
	return -ENOMEM;
}

void claw_outbox_deinit(struct claw_outbox *outbox)
{
	if (outbox->connections)
		munmap(outbox->connections, (uint64_t)outbox->connection_max * sizeof(struct claw_connection));
	if (outbox->attachments)
		munmap(outbox->attachments, (uint64_t)outbox->attachment_max * sizeof(struct claw_attachment));
	if (outbox->hash)
		munmap(outbox->hash, ((uint64_t)outbox->hash_mask + 1) * sizeof(uint32_t));
	if (outbox->out)
		munmap(outbox->out, CLAW_OUT_BYTES);
	if (outbox->frames)
		munmap(outbox->frames, CLAW_FRAME_COUNT * sizeof(struct claw_frame));
	*outbox = (struct claw_outbox){ 0 };
}

uint32_t claw_connection_open(struct claw_outbox *outbox)
{
	uint32_t index = outbox->connection_free;
	if (index != CLAW_NONE)
		outbox->connection_free = outbox->connections[index].next_free;
	else if (outbox->connection_used < outbox->connection_max)
		index = outbox->connection_used++;
	else
		return 0;
	struct claw_connection *connection = &outbox->connections[index];
	uint32_t generation = connection->generation + 1;
	/* Begins anywhere: what a client had said to an earlier clawd must not be taken for words about this connection */
	if (!connection->generation)
		generation = (uint32_t)claw_hash(outbox->streams->hash_key, (const uint8_t *)&index, sizeof(index)) | 1;
	*connection = (struct claw_connection){
		.id = (generation << 16) | index,
		.generation = generation,
		/* an entry can be used again while it is still in these lists */
		.ready = connection->ready,
		.next_ready = connection->next_ready,
		.unshown = connection->unshown,
		.next_unshown = connection->next_unshown,
		.attachments = CLAW_NONE,
		.queue = { { CLAW_NONE, CLAW_NONE }, { CLAW_NONE, CLAW_NONE }, { CLAW_NONE, CLAW_NONE } },
	};
	if (!connection->id) /* generation 65,536 of entry 0: 0 means free */
		connection->id = (++connection->generation << 16) | index;
	claw_connection_touch(outbox, index, CLAW_UNSHOWN_WHOLE);
	return connection->id;
}

static uint32_t *bucket_of(const struct claw_outbox *outbox, uint32_t connection, uint32_t id)
{
	uint32_t key[2] = { connection, id };
	return &outbox->hash[claw_hash(outbox->streams->hash_key, (const uint8_t *)key, sizeof(key)) & outbox->hash_mask];
}

static uint32_t find(const struct claw_outbox *outbox, uint32_t connection, uint32_t id)
{
	for (uint32_t link = *bucket_of(outbox, connection, id); link; link = outbox->attachments[link - 1].next_in_hash) {
		const struct claw_attachment *attachment = &outbox->attachments[link - 1];
		if (attachment->connection == connection && attachment->id == id)
			return link - 1;
	}
	return CLAW_NONE;
}

static struct claw_list *list_of(struct claw_outbox *outbox, const struct claw_attachment *attachment)
{
	if (attachment->queue == CLAW_QUEUE_DONE)
		return &outbox->done;
	if (attachment->queue == CLAW_QUEUE_AWAITING)
		return &outbox->awaiting;
	return &outbox->connections[attachment->connection].queue[attachment->queue];
}

void claw_attachment_unqueue(struct claw_outbox *outbox, uint32_t index)
{
	struct claw_attachment *attachment = &outbox->attachments[index];
	if (attachment->queue == CLAW_QUEUE_NONE)
		return;
	struct claw_list *list = list_of(outbox, attachment);
	if (attachment->prev_queued == CLAW_NONE)
		list->head = attachment->next_queued;
	else
		outbox->attachments[attachment->prev_queued].next_queued = attachment->next_queued;
	if (attachment->next_queued == CLAW_NONE)
		list->tail = attachment->prev_queued;
	else
		outbox->attachments[attachment->next_queued].prev_queued = attachment->prev_queued;
	attachment->queue = CLAW_QUEUE_NONE;
}

void claw_connection_ready(struct claw_outbox *outbox, uint32_t index)
{
	struct claw_connection *connection = &outbox->connections[index];
	if (connection->ready)
		return;
	connection->ready = 1;
	connection->next_ready = CLAW_NONE;
	if (outbox->ready.tail == CLAW_NONE)
		outbox->ready.head = index;
	else
		outbox->connections[outbox->ready.tail].next_ready = index;
	outbox->ready.tail = index;
}

void claw_connection_touch(struct claw_outbox *outbox, uint32_t index, uint8_t unshown)
{
	struct claw_connection *connection = &outbox->connections[index];
	if (!connection->unshown) {
		connection->next_unshown = outbox->unshown;
		outbox->unshown = index;
	}
	if (connection->unshown < unshown)
		connection->unshown = unshown;
}

static void append(struct claw_outbox *outbox, uint32_t index, uint8_t queue)
{
	struct claw_attachment *attachment = &outbox->attachments[index];
	claw_attachment_unqueue(outbox, index);
	attachment->queue = queue;
	struct claw_list *list = list_of(outbox, attachment);
	attachment->prev_queued = list->tail;
	attachment->next_queued = CLAW_NONE;
	if (list->tail == CLAW_NONE)
		list->head = index;
	else
		outbox->attachments[list->tail].next_queued = index;
	list->tail = index;
}

void claw_attachment_queue(struct claw_outbox *outbox, uint32_t index)
{
	struct claw_attachment *attachment = &outbox->attachments[index];
	const struct claw_stream *stream = &outbox->streams->table[attachment->stream];
	/* OPEN goes ahead of the first token, so on the express lane too */
	int opens = !attachment->opened && outbox->connections[attachment->connection].laned;
	uint8_t queue = opens || attachment->next_seq < stream->critical_until ? CLAW_CRITICAL :
			attachment->next_seq < stream->high_until ? CLAW_HIGH :
			CLAW_NORMAL;
	if (stream->state == CLAW_STREAM_AWAITED || attachment->queue == CLAW_QUEUE_DONE || attachment->queue <= queue ||
	    (stream->restricted && !attachment->admitted))
		return;
	append(outbox, index, queue);
	claw_connection_ready(outbox, attachment->connection);
}

void claw_attachment_done(struct claw_outbox *outbox, uint32_t index)
{
	append(outbox, index, CLAW_QUEUE_DONE);
}

/* A reader came or went: what is to become of the stream is for the newest one to say, or for the last. */
static void count_reader(struct claw_outbox *outbox, uint32_t index, int change, uint32_t grace_ms, uint64_t now_ns)
{
	struct claw_stream *stream = &outbox->streams->table[index];
	stream->readers += (uint32_t)change;
	for (uint32_t at = stream->attachments; at != CLAW_NONE; at = outbox->attachments[at].next_of_stream) {
		if (!outbox->attachments[at].observes) {
			grace_ms = outbox->attachments[at].grace_ms;
			break;
		}
	}
	claw_stream_grace(outbox->streams, index, grace_ms);
	if (stream->readers)
		claw_grace_stop(outbox->streams, index);
	else
		claw_grace_start(outbox->streams, index, now_ns);
}

static void free_attachment(struct claw_outbox *outbox, uint32_t index, uint64_t now_ns)
{
	struct claw_attachment *entry = &outbox->attachments[index];
	struct claw_connection *connection = &outbox->connections[entry->connection];
	struct claw_stream *stream = &outbox->streams->table[entry->stream];
	claw_attachment_unqueue(outbox, index);

	uint32_t *link = bucket_of(outbox, entry->connection, entry->id);
	while (*link != index + 1)
		link = &outbox->attachments[*link - 1].next_in_hash;
	*link = entry->next_in_hash;

	if (entry->prev_of_stream == CLAW_NONE)
		stream->attachments = entry->next_of_stream;
	else
		outbox->attachments[entry->prev_of_stream].next_of_stream = entry->next_of_stream;
	if (entry->next_of_stream != CLAW_NONE)
		outbox->attachments[entry->next_of_stream].prev_of_stream = entry->prev_of_stream;
	stream->attachment_count--;
	stream->row.attachments--;
	if (!entry->observes)
		count_reader(outbox, entry->stream, -1, entry->grace_ms, now_ns);
	claw_stream_touch(outbox->streams, entry->stream, CLAW_UNSHOWN_PART);
	claw_connection_touch(outbox, entry->connection, CLAW_UNSHOWN_PART);

	if (entry->prev_of_connection == CLAW_NONE)
		connection->attachments = entry->next_of_connection;
	else
		outbox->attachments[entry->prev_of_connection].next_of_connection = entry->next_of_connection;
	if (entry->next_of_connection != CLAW_NONE)
		outbox->attachments[entry->next_of_connection].prev_of_connection = entry->prev_of_connection;
	connection->attachment_count--;

	entry->id = 0;
	entry->next_in_hash = outbox->attachment_free;
	outbox->attachment_free = index;
	outbox->attachment_count--;
	if (stream->state == CLAW_STREAM_AWAITED)
		claw_stream_release(outbox->streams, (uint32_t)(stream - outbox->streams->table));
}

void claw_outbox_sweep(struct claw_outbox *outbox, uint64_t now_ns)
{
	while (outbox->done.head != CLAW_NONE)
		free_attachment(outbox, outbox->done.head, now_ns);
}

int claw_outbox_unmet(struct claw_outbox *outbox, uint64_t now_ns, struct claw_unmet *ret_unmet, int max)
{
	const uint64_t pause_ns = 10000000; /* waits differ, so this walks them all: not more often than every 10 ms */
	if (!outbox->unmet_ns || now_ns < outbox->unmet_ns)
		return 0;
	int count = 0;
	uint64_t next_ns = 0;
	for (uint32_t at = outbox->awaiting.head; at != CLAW_NONE && count < max;) {
		struct claw_attachment *attachment = &outbox->attachments[at];
		uint32_t after = attachment->next_queued;
		if (attachment->deadline_ns <= now_ns) {
			ret_unmet[count++] = (struct claw_unmet){
				.connection = outbox->connections[attachment->connection].id,
				.id = attachment->id,
			};
			free_attachment(outbox, at, now_ns);
		} else if (!next_ns || attachment->deadline_ns < next_ns) {
			next_ns = attachment->deadline_ns;
		}
		at = after;
	}
	if (count == max)
		next_ns = now_ns;
	else if (next_ns && next_ns < now_ns + pause_ns)
		next_ns = now_ns + pause_ns;
	outbox->unmet_ns = next_ns;
	return count;
}

int claw_connection_close(struct claw_outbox *outbox, uint32_t id, uint64_t now_ns)
{
	struct claw_connection *connection = claw_connection_of(outbox, id);
	if (!connection)
		return -ENOENT;
	while (connection->attachments != CLAW_NONE)
		free_attachment(outbox, connection->attachments, now_ns);
	connection->id = 0;
	claw_connection_touch(outbox, (uint32_t)(connection - outbox->connections), CLAW_UNSHOWN_PART);
	connection->next_free = outbox->connection_free;
	outbox->connection_free = (uint32_t)(connection - outbox->connections);
	return 0;
}

int claw_connection_block(struct claw_outbox *outbox, uint32_t id, int blocked)
{
	struct claw_connection *connection = claw_connection_of(outbox, id);
	if (!connection)
		return -ENOENT;
	connection->blocked = blocked != 0;
	claw_connection_touch(outbox, (uint32_t)(connection - outbox->connections), CLAW_UNSHOWN_PART);
	if (!blocked)
		claw_connection_ready(outbox, (uint32_t)(connection - outbox->connections));
	return 0;
}

int claw_connection_name(struct claw_outbox *outbox, uint32_t id, const struct claw_page_peer *peer)
{
	struct claw_connection *connection = claw_connection_of(outbox, id);
	if (!connection)
		return -ENOENT;
	connection->peer = *peer;
	claw_connection_touch(outbox, (uint32_t)(connection - outbox->connections), CLAW_UNSHOWN_WHOLE);
	return 0;
}

int claw_flow_take(struct claw_outbox *outbox, uint32_t id, const uint8_t *message, size_t len)
{
	struct claw_connection *connection = claw_connection_of(outbox, id);
	if (!connection)
		return -ENOENT;
	struct claw_flow flow;
	if (len < sizeof(flow))
		return -EBADMSG;
	memcpy(&flow, message, sizeof(flow));
	if (flow.kind != CLAW_FRAME_FLOW || flow.version != CLAW_FRAME_VERSION ||
	    len != sizeof(flow) + (size_t)flow.credits * sizeof(struct claw_credit))
		return -EBADMSG;
	if (flow.connection != connection->id)
		return 0; /* about an earlier connection of this client */
	/* Nobody can have received what was not sent */
	if (flow.acked > connection->charged)
		return -EBADMSG;
	uint32_t index = (uint32_t)(connection - outbox->connections);
	if (flow.acked > connection->acked) {
		connection->acked = flow.acked;
		claw_connection_touch(outbox, index, CLAW_UNSHOWN_PART);
		claw_connection_ready(outbox, index);
	}
	for (uint32_t i = 0; i < flow.credits; i++) {
		struct claw_credit credit;
		memcpy(&credit, message + sizeof(flow) + i * sizeof(credit), sizeof(credit));
		uint32_t at = credit.attachment ? find(outbox, index, credit.attachment) : CLAW_NONE;
		if (at == CLAW_NONE || credit.limit <= outbox->attachments[at].credit_limit)
			continue; /* ended meanwhile, or an old message */
		outbox->attachments[at].credit_limit = credit.limit;
		claw_attachment_queue(outbox, at);
	}
	return 0;
}

int claw_attachment_open(struct claw_outbox *outbox, uint32_t id, const struct claw_attach *attach, uint64_t now_ns)
{
	struct claw_connection *connection = claw_connection_of(outbox, id);
	struct claw_streams *streams = outbox->streams;
	if (!connection)
		return -ENOENT;
	if (!attach->id || !attach->name_len || attach->name_len > CLAW_NAME_MAX || attach->after < -1)
		return -EINVAL;
	uint32_t owner = (uint32_t)(connection - outbox->connections);
	uint32_t at = find(outbox, owner, attach->id);
	if (at != CLAW_NONE) /* said again */
		free_attachment(outbox, at, now_ns);

	uint32_t index = claw_stream_find(streams, attach->name, attach->name_len);
	uint32_t state = index == CLAW_NONE ? CLAW_STREAM_FREE : streams->table[index].state;
	int resumes = attach->after >= 0 || attach->has_incarnation;
	if (state == CLAW_STREAM_GONE)
		return -ESTALE;
	if (state == CLAW_STREAM_LIVE || state == CLAW_STREAM_ENDED) {
		const struct claw_stream *stream = &streams->table[index];
		if ((attach->has_incarnation && attach->incarnation != stream->incarnation) ||
		    (attach->after >= 0 && (uint64_t)attach->after >= stream->next_seq))
			return -EREMCHG;
		if (stream->restricted && !attach->admitted)
			return -EACCES;
	} else if (resumes) {
		return -EREMCHG;
	} else if (!attach->deadline_ns) {
		return -ENOENT;
	}
	if ((outbox->attachment_free == CLAW_NONE && outbox->attachment_used == outbox->attachment_max) ||
	    !claw_share_attachment(outbox, connection))
		return -EDQUOT;
	if (index == CLAW_NONE) {
		/* Names that nobody has opened may not fill the table */
		if (streams->count[CLAW_STREAM_AWAITED] >= streams->max / 2)
			return -EDQUOT;
		index = claw_stream_await(streams, attach->name, attach->name_len);
		if (index == CLAW_NONE)
			return -EDQUOT;
	}

	at = outbox->attachment_free;
	if (at != CLAW_NONE)
		outbox->attachment_free = outbox->attachments[at].next_in_hash;
	else
		at = outbox->attachment_used++;
	struct claw_stream *stream = &streams->table[index];
	uint32_t *bucket = bucket_of(outbox, owner, attach->id);
	outbox->attachments[at] = (struct claw_attachment){
		.id = attach->id,
		.connection = owner,
		.stream = index,
		.next_in_hash = *bucket,
		.prev_of_stream = CLAW_NONE,
		.next_of_stream = stream->attachments,
		.prev_of_connection = CLAW_NONE,
		.next_of_connection = connection->attachments,
		.queue = CLAW_QUEUE_NONE,
		.cancel = attach->cancel,
		.observes = attach->observes,
		.admitted = attach->admitted,
		.grace_ms = attach->grace_ms,
		.next_seq = (uint64_t)(attach->after + 1),
		.block = CLAW_NONE,
		.credit_limit = attach->credit,
		.deadline_ns = attach->deadline_ns,
	};
	*bucket = at + 1;
	if (stream->attachments != CLAW_NONE)
		outbox->attachments[stream->attachments].prev_of_stream = at;
	stream->attachments = at;
	stream->attachment_count++;
	stream->row.attachments++;
	if (!attach->observes)
		count_reader(outbox, index, 1, attach->grace_ms, now_ns);
	claw_stream_touch(streams, index, CLAW_UNSHOWN_PART);
	claw_connection_touch(outbox, owner, CLAW_UNSHOWN_PART);
	if (connection->attachments != CLAW_NONE)
		outbox->attachments[connection->attachments].prev_of_connection = at;
	connection->attachments = at;
	connection->attachment_count++;
	outbox->attachment_count++;
	if (stream->state == CLAW_STREAM_AWAITED) {
		append(outbox, at, CLAW_QUEUE_AWAITING);
		if (!outbox->unmet_ns || attach->deadline_ns < outbox->unmet_ns)
			outbox->unmet_ns = attach->deadline_ns;
		return 1;
	}
	claw_attachment_queue(outbox, at);
	return 0;
}

uint32_t claw_attachment_find(struct claw_outbox *outbox, uint32_t connection, uint32_t id)
{
	struct claw_connection *owner = claw_connection_of(outbox, connection);
	return owner ? find(outbox, (uint32_t)(owner - outbox->connections), id) : CLAW_NONE;
}

int claw_attachment_close(struct claw_outbox *outbox, uint32_t connection, uint32_t id, uint64_t now_ns)
{
	uint32_t at = claw_attachment_find(outbox, connection, id);
	if (at == CLAW_NONE)
		return 0;
	free_attachment(outbox, at, now_ns);
	return 1;
}

int claw_outbox_cancelled(const struct claw_outbox *outbox, uint32_t stream)
{
	for (uint32_t at = outbox->streams->table[stream].attachments; at != CLAW_NONE;
	     at = outbox->attachments[at].next_of_stream)
		if (outbox->attachments[at].cancel)
			return 1;
	return 0;
}
