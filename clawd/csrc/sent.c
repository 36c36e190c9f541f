/* SPDX-License-Identifier: Apache-2.0 */
/* What went out, and when: the account of each token that a client was sent. */
#include <string.h>

#include "barrier.h"
#include "compact.h"
#include "failpoint.h"
#include "turn.h"

/* Only the first reader's first token counts: one who comes later waited for nothing. */
static void first_sent(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t sent_ns)
{
	uint32_t at = claw_attachment_find(&core->outbox, connection, id);
	if (at == CLAW_NONE)
		return;
	struct claw_stream_row *row = &core->streams.table[core->outbox.attachments[at].stream].row;
	if (row->first_sent_ns)
		return;
	claw_stream_first_sent(&core->streams, core->outbox.attachments[at].stream, sent_ns);
	claw_account(core, CLAW_HIST_FIRST, row->requested_ns ? row->requested_ns : row->opened_ns, sent_ns);
	if (row->requested_ns)
		claw_account(core, CLAW_HIST_FIRST_REQUESTED, row->requested_ns, sent_ns);
	claw_tell_first(core);
}

/* Tokens of a stream went to a reader at once; end_seq: after the last of them, or of a gap */
static void segment_sent(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t tokens, uint64_t end_seq,
			 uint64_t sent_ns)
{
	struct claw_hist *hists = core->page.hists;
	uint32_t at = claw_attachment_find(&core->outbox, connection, id);
	if (at == CLAW_NONE)
		return;
	struct claw_attachment *attachment = &core->outbox.attachments[at];
	if (tokens) {
		if (attachment->sent_ns)
			claw_hist_add(&hists[CLAW_HIST_GAP_SENT], sent_ns - attachment->sent_ns);
		if (tokens > 1)
			claw_hist_add_many(&hists[CLAW_HIST_GAP_SENT], 0, tokens - 1);
		attachment->sent_ns = sent_ns;
	}
	if (attachment->timed_ns && attachment->timed_seq < end_seq) {
		/* A turn's time is when it began */
		uint64_t took_ns = sent_ns > attachment->timed_ns ? sent_ns - attachment->timed_ns : 0;
		claw_hist_add(&hists[CLAW_HIST_QUEUED], took_ns);
		if (attachment->timed_seq == 0)
			claw_hist_add(&hists[CLAW_HIST_QUEUED_FIRST], took_ns);
		attachment->timed_ns = 0;
	}
}

/* A frame of ours: built by claw_outbox_build and kept in private memory since, so nothing needs checking. */
void claw_sent(struct claw_core *core, const uint8_t *frame, uint32_t len, uint64_t sent_ns)
{
	struct claw_frame_header frame_header;
	if (frame[0] == CLAW_FRAME_PACKED) {
		len = (uint32_t)claw_frame_unpack(frame, len, core->unpacked, sizeof(core->unpacked));
		frame = core->unpacked;
	}
	memcpy(&frame_header, frame, sizeof(frame_header));
	uint32_t at = sizeof(frame_header);
	while (at < len) {
		struct claw_segment segment;
		memcpy(&segment, frame + at, sizeof(segment));
		at += sizeof(segment);
		uint64_t seq = segment.first_seq, tokens = 0;
		for (uint32_t end = at + segment.len; at < end;) {
			struct claw_spooled record;
			memcpy(&record, frame + at, sizeof(record));
			at += claw_spooled_bytes(record.len);
			if (record.kind == CLAW_GAP)
				seq += record.count;
			if (record.kind != CLAW_TOKEN)
				continue;
			tokens++;
			claw_count(&core->totals->sent, 1);
			int64_t took_ns = claw_account(core, CLAW_HIST_SEND, record.written_ns, sent_ns);
			CLAW_FAILPOINT("sent");
			if (seq++ == 0) {
				if (took_ns >= 0)
					claw_hist_add(&core->page.hists[CLAW_HIST_SEND_FIRST], (uint64_t)took_ns);
				first_sent(core, frame_header.connection, segment.attachment, sent_ns);
			}
		}
		segment_sent(core, frame_header.connection, segment.attachment, tokens, seq, sent_ns);
		claw_count(&core->totals->segments, tokens != 0);
		if (tokens > core->totals->segment_max)
			claw_store_relaxed(&core->totals->segment_max, tokens);
	}
}

void claw_sent_frame(struct claw_core *core, uint32_t number, uint64_t sent_ns)
{
	const struct claw_frame *frame = &core->outbox.frames[number];
	if (number < core->outbox.frame_count)
		claw_sent(core, core->outbox.out + frame->offset, frame->len, sent_ns);
}
