/* SPDX-License-Identifier: Apache-2.0 */
#include "readers.h"

#include <errno.h>
#include <string.h>

#include "turn.h"

uint32_t claw_stream_index(const struct claw_core *core, const uint8_t *name, uint32_t name_len)
{
	uint32_t index = claw_stream_find(&core->streams, name, name_len);
	uint32_t state = index == CLAW_NONE ? CLAW_STREAM_FREE : core->streams.table[index].state;
	return state == CLAW_STREAM_LIVE || state == CLAW_STREAM_ENDED ? index : UINT32_MAX;
}

int claw_stream_readers(const struct claw_core *core, uint32_t index, uint8_t *ret_readers)
{
	const struct claw_streams *streams = &core->streams;
	struct claw_spooled open;
	if (index >= streams->used || !streams->table[index].restricted)
		return 0;
	uint32_t block = streams->table[index].first_block;
	static const char nobody[] = "none";
	/* Its first block went with all others: nobody can be shown to be meant */
	memcpy(ret_readers, nobody, sizeof(nobody) - 1);
	if (block == CLAW_NONE)
		return sizeof(nobody) - 1;
	const uint8_t *first = claw_spool_records(streams->spool, block);
	memcpy(&open, first, sizeof(open));
	if (open.kind != CLAW_OPEN || !open.count || open.count > CLAW_READERS_MAX || open.count > open.len)
		return sizeof(nobody) - 1;
	memcpy(ret_readers, first + sizeof(open), open.count);
	return (int)open.count;
}

void claw_readers_open(struct claw_core *core, uint32_t index)
{
	struct claw_stream *stream = &core->streams.table[index];
	/* One who may not read it must not have it cancelled by having come, and gone, before */
	if (!stream->readers) {
		claw_grace_stop(&core->streams, index);
		claw_stream_grace(&core->streams, index, 0);
	}
	core->outbox.unproven |= stream->attachments != CLAW_NONE;
}

int claw_unproven(struct claw_core *core, struct claw_unproven *ret_unproven, int max)
{
	struct claw_outbox *outbox = &core->outbox;
	int count = 0;
	for (uint32_t i = 0; i < core->streams.used; i++) {
		const struct claw_stream *stream = &core->streams.table[i];
		if (!stream->restricted || (stream->state != CLAW_STREAM_LIVE && stream->state != CLAW_STREAM_ENDED))
			continue;
		for (uint32_t at = stream->attachments; at != CLAW_NONE; at = outbox->attachments[at].next_of_stream) {
			if (outbox->attachments[at].admitted)
				continue;
			if (count == max)
				return count;
			ret_unproven[count++] = (struct claw_unproven){
				.connection = outbox->connections[outbox->attachments[at].connection].id,
				.id = outbox->attachments[at].id,
				.stream = i,
			};
		}
	}
	outbox->unproven = 0;
	return count;
}

int claw_admit(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns)
{
	uint32_t at = claw_attachment_find(&core->outbox, connection, id);
	if (at == CLAW_NONE)
		return -ENOENT;
	struct claw_attachment *attachment = &core->outbox.attachments[at];
	attachment->admitted = 1;
	if (attachment->cancel)
		claw_stream_cancel(core, attachment->stream, now_ns);
	claw_attachment_queue(&core->outbox, at);
	core->pending = 1;
	return 0;
}

int claw_deny(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns)
{
	struct claw_outbox *outbox = &core->outbox;
	uint32_t at = claw_attachment_find(outbox, connection, id);
	if (at == CLAW_NONE)
		return -ENOENT;
	struct claw_attachment *attachment = &outbox->attachments[at];
	struct claw_stream *stream = &core->streams.table[attachment->stream];
	if (!attachment->observes) {
		/* What its grace would do counts no more than it does */
		attachment->observes = 1;
		stream->readers--;
		uint32_t grace_ms = 0;
		for (uint32_t i = stream->attachments; i != CLAW_NONE; i = outbox->attachments[i].next_of_stream) {
			if (!outbox->attachments[i].observes) {
				grace_ms = outbox->attachments[i].grace_ms;
				break;
			}
		}
		claw_stream_grace(&core->streams, attachment->stream, grace_ms);
	}
	core->pending = 1;
	claw_attachment_close(outbox, connection, id, now_ns);
	return 0;
}
