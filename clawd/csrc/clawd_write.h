/* SPDX-License-Identifier: Apache-2.0 */
/* Writing records. A part of clawd_ring.h, which includes it; not for use alone. */
#ifndef CLAWD_WRITE_H
#define CLAWD_WRITE_H

/* How much of a text goes into one piece of at most max (≥ 4) bytes: back to the start of a character cut in two */
static inline size_t claw_text_cut(const char *text, size_t len, size_t max)
{
	const uint8_t *byte = (const uint8_t *)text;
	size_t back;

	if (len <= max)
		return len;
	if ((byte[max] & 0xc0) != 0x80)
		return max;
	for (back = 1; back <= 3; back++) {
		uint8_t lead = byte[max - back];

		if (lead >= 0xc0) {
			size_t whole = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;

			return back < whole ? max - back : max;
		}
		if (lead < 0x80)
			return max;
	}
	return max;
}

/* Bytes a text takes in the ring, over all its records */
static inline uint64_t claw_text_bytes(const struct claw_producer *p, const char *text, size_t len)
{
	uint64_t bytes = 0;

	while (len > p->record_max) {
		size_t piece = claw_text_cut(text, len, p->record_max);

		bytes += claw_record_bytes(piece);
		text += piece;
		len -= piece;
	}
	return len ? bytes + claw_record_bytes(len) : bytes;
}

/* Add a record's header; returns where its payload goes, contiguous: the ring is mapped twice, the overflow has room behind it */
static inline uint8_t *claw_add(struct claw_batch *batch, uint8_t kind, uint8_t flags, uint32_t handle, uint32_t count,
				size_t len)
{
	uint8_t *at = batch->bytes + (batch->pos & batch->mask);
	struct claw_record record;

	record.len = (uint32_t)len;
	record.kind = kind;
	record.flags = flags;
	record.handle = (uint16_t)handle;
	record.ring_seq = batch->seq++;
	record.written_ns = batch->now_ns;
	record.count = count;
	record.reserved = 0;
	memcpy(at, &record, sizeof(record));
	batch->pos += claw_record_bytes(len);
	return at + sizeof(record);
}

static inline int claw_add_text(const struct claw_producer *p, struct claw_batch *batch, uint8_t flags, uint32_t handle,
				uint32_t count, const char *text, size_t len)
{
	int records = 0;

	while (len) {
		size_t piece = claw_text_cut(text, len, p->record_max);

		memcpy(claw_add(batch, CLAW_TOKEN, flags, handle, records ? 0 : count, piece), text, piece);
		text += piece;
		len -= piece;
		records++;
	}
	return records;
}

/* Before a stream's next record: how many of its records were given up. Bytes that takes */
static inline uint64_t claw_gap_bytes(const struct claw_producer *p, uint32_t handle)
{
	return p->lost_streams && p->lost[handle] ? claw_record_bytes(sizeof(CLAW_LOST_REASON) - 1) : 0;
}

static inline void claw_add_gap(struct claw_producer *p, struct claw_batch *batch, uint32_t handle)
{
	if (!p->lost_streams || !p->lost[handle])
		return;
	memcpy(claw_add(batch, CLAW_GAP, 0, handle, p->lost[handle], sizeof(CLAW_LOST_REASON) - 1), CLAW_LOST_REASON,
	       sizeof(CLAW_LOST_REASON) - 1);
	p->lost[handle] = 0;
	claw_store_relaxed(&p->lost_streams, p->lost_streams - 1); /* claw_wait_room() of another thread reads it */
}

/*
 * A text that met -EAGAIN is given up: before the stream's next record its readers are told that so much is missing there
 * (a GAP with reason `ring_full`), where else they would see a hole as text. Returns the number of its records.
 */
static inline int claw_lose(struct claw_producer *p, struct claw_stream stream, const char *text, size_t len)
{
	uint32_t lost = 0;
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	if (!claw_is_open(p, stream))
		return -EBADF;
	while (len) {
		size_t piece = claw_text_cut(text, len, p->record_max);

		text += piece;
		len -= piece;
		lost++;
	}
	if (lost && !p->lost[stream.handle])
		claw_store_relaxed(&p->lost_streams, p->lost_streams + 1);
	/* at its end it stays: not a number that anybody reaches, but one that must not become 0 */
	p->lost[stream.handle] += lost < UINT32_MAX - p->lost[stream.handle] ? lost : UINT32_MAX - p->lost[stream.handle];
	return (int)lost;
}

/*
 * Open a stream. `name` is 1 to CLAW_NAME_MAX bytes of UTF-8 without control characters (clawd quarantines the ring over
 * others); `meta` is JSON for its readers, or NULL and 0; `requested_ns` is claw_now_ns() when the answer was asked for, 0
 * if not known; `pace` how its tokens are spread over time, CLAW_PACE_…; `readers` whom it is for, at most 255 bytes of
 * users, `@groups` and `key:NAME`s with spaces between, or NULL and 0 for everybody. clawd may still refuse it, which claw_stopped()
 * tells later. -EMFILE: CLAW_HANDLE_COUNT streams are open.
 */
static inline int claw_open_for(struct claw_producer *p, const char *name, size_t name_len, const char *readers,
				size_t readers_len, const char *meta, size_t meta_len, uint64_t requested_ns, uint32_t pace,
				struct claw_stream *ret_stream)
{
	struct claw_batch batch;
	struct claw_open open;
	size_t len;
	uint32_t handle;
	uint8_t *payload;
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	if (!name_len || name_len > CLAW_NAME_MAX || pace > CLAW_PACE_STEADY)
		return -EINVAL;
	if (readers_len > UINT8_MAX)
		return -EINVAL;
	if (meta_len > p->record_max || sizeof(open) + name_len + readers_len + meta_len > p->record_max)
		return -EMSGSIZE;
	if (!p->free_count)
		return -EMFILE;
	len = sizeof(open) + name_len + readers_len + meta_len;
	result = claw_begin(p, claw_record_bytes(len), &batch);
	if (result < 0)
		return result;

	handle = p->free_handles[--p->free_count];
	p->open_seq[handle] = batch.seq;
	ret_stream->open_seq = batch.seq;
	ret_stream->owner = p->owner;
	ret_stream->handle = handle;

	open.requested_ns = requested_ns;
	open.name_len = (uint16_t)name_len;
	open.meta_len = (uint16_t)meta_len;
	open.pace = (uint8_t)pace;
	open.readers_len = (uint8_t)readers_len;
	memset(open.reserved, 0, sizeof(open.reserved));
	payload = claw_add(&batch, CLAW_OPEN, 0, handle, 0, len);
	memcpy(payload, &open, sizeof(open));
	memcpy(payload + sizeof(open), name, name_len);
	if (readers_len)
		memcpy(payload + sizeof(open) + name_len, readers, readers_len);
	if (meta_len)
		memcpy(payload + sizeof(open) + name_len + readers_len, meta, meta_len);
	claw_commit(p, &batch);
	return 0;
}

/* The same, for everybody */
static inline int claw_open_paced(struct claw_producer *p, const char *name, size_t name_len, const char *meta,
				  size_t meta_len, uint64_t requested_ns, uint32_t pace, struct claw_stream *ret_stream)
{
	return claw_open_for(p, name, name_len, NULL, 0, meta, meta_len, requested_ns, pace, ret_stream);
}

/* The same, paced as clawd is configured */
static inline int claw_open_stream(struct claw_producer *p, const char *name, size_t name_len, const char *meta,
				   size_t meta_len, uint64_t requested_ns, struct claw_stream *ret_stream)
{
	return claw_open_paced(p, name, name_len, meta, meta_len, requested_ns, CLAW_PACE_DEFAULT, ret_stream);
}

/*
 * Write text of `len` bytes that stands for `count` tokens; a token may begin or end inside a character. `flags` is 0 or
 * CLAW_URGENT (it goes before other streams' tokens, as a first token does). Longer than a record, it goes into several,
 * cut between characters, all of them or none. Returns the number of records: 0 for an empty text.
 * -ECANCELED: the stream was stopped, claw_stopped() says why, the text is dropped.
 */
static inline int claw_write(struct claw_producer *p, struct claw_stream stream, const char *text, size_t len,
			     uint32_t flags, uint32_t count)
{
	struct claw_batch batch;
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	if (!claw_is_open(p, stream))
		return -EBADF;
	if (flags & ~(uint32_t)CLAW_URGENT)
		return -EINVAL;
	if (claw_is_stopped(p, stream))
		return -ECANCELED;
	if (len > p->capacity)
		return -EMSGSIZE;
	if (!len)
		return 0;
	result = claw_begin(p, claw_gap_bytes(p, stream.handle) + claw_text_bytes(p, text, len), &batch);
	if (result < 0)
		return result;
	claw_add_gap(p, &batch, stream.handle);
	result = claw_add_text(p, &batch, (uint8_t)flags, stream.handle, count, text, len);
	claw_commit(p, &batch);
	return result;
}

/*
 * Write one text to each of `n` streams, an engine's step: text i is the next lens[i] bytes of `texts`. One commit, at most
 * one wake-up; all or nothing, but texts for stopped streams are dropped. `flags` and `count` are of each text, as in
 * claw_write(). Returns how many were not dropped.
 */
static inline int claw_write_many(struct claw_producer *p, const struct claw_stream *streams, const uint32_t *lens,
				  const char *texts, uint32_t n, uint32_t flags, uint32_t count)
{
	struct claw_batch batch;
	const char *text = texts;
	uint64_t bytes = 0;
	uint32_t i;
	int kept = 0;
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	if (flags & ~(uint32_t)CLAW_URGENT || n > INT32_MAX)
		return -EINVAL;
	for (i = 0; i < n; i++) {
		if (!claw_is_open(p, streams[i]))
			return -EBADF;
		if (lens[i] > p->capacity || bytes > p->capacity)
			return -EMSGSIZE;
		bytes += claw_gap_bytes(p, streams[i].handle) + claw_text_bytes(p, text, lens[i]);
		text += lens[i];
	}
	result = claw_begin(p, bytes, &batch);
	if (result < 0)
		return result;
	for (i = 0, text = texts; i < n; text += lens[i], i++) {
		if (claw_is_stopped(p, streams[i]))
			continue;
		if (lens[i])
			claw_add_gap(p, &batch, streams[i].handle);
		claw_add_text(p, &batch, (uint8_t)flags, streams[i].handle, count, text, lens[i]);
		kept++;
	}
	claw_commit(p, &batch);
	return kept;
}

/*
 * End a stream, for a reason of 1 to CLAW_REASON_MAX bytes, text as the name is ("stop", "length", "error:…"). Stopped
 * streams too: that is what frees their handle. Later calls with it return -EBADF; after -EAGAIN it is still open.
 */
static inline int claw_close_stream(struct claw_producer *p, struct claw_stream stream, const char *reason,
				    size_t reason_len)
{
	struct claw_batch batch;
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	if (!claw_is_open(p, stream))
		return -EBADF;
	if (!reason_len || reason_len > CLAW_REASON_MAX)
		return -EINVAL;
	result = claw_begin(p, claw_gap_bytes(p, stream.handle) + claw_record_bytes(reason_len), &batch);
	if (result < 0)
		return result;
	claw_add_gap(p, &batch, stream.handle);
	memcpy(claw_add(&batch, CLAW_CLOSE, 0, stream.handle, 0, reason_len), reason, reason_len);
	p->open_seq[stream.handle] = 0;
	p->free_handles[p->free_count++] = (uint16_t)stream.handle;
	claw_commit(p, &batch);
	return 0;
}

#endif
