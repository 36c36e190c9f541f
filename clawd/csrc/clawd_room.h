/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Room for records: the ring and, behind it, the overflow. A part of clawd_ring.h, which includes it; not for use alone.
 *
 * The overflow holds records as the ring will have them, numbers included, in a mapping of this process alone. Positions
 * run on from the ring's: what is accepted but not in the ring lies at head … tail. Its size is a power of two with room
 * for one more record behind it, so that each lies in one piece wherever it starts.
 */
#ifndef CLAWD_ROOM_H
#define CLAWD_ROOM_H

/* Records being written: nothing is seen before claw_commit() */
struct claw_batch {
	uint8_t *bytes; /* the ring's, or the overflow's */
	uint64_t mask;
	uint64_t pos;
	uint64_t seq;
	uint64_t now_ns;
};

/* Where the records are that clawd has not acknowledged */
struct claw_backlog {
	uint64_t accepted; /* records in the overflow: they die with this process */
	uint64_t in_ring; /* bytes in the ring, not yet in clawd's spool */
};

/* Bytes a record takes in the ring */
static inline uint64_t claw_record_bytes(uint64_t len)
{
	return sizeof(struct claw_record) + ((len + CLAW_RECORD_ALIGN - 1) & ~(uint64_t)(CLAW_RECORD_ALIGN - 1));
}

/* Signal clawd if it sleeps and was not signalled for this sleep. One system call at most */
static inline void claw_wake(struct claw_producer *p)
{
	uint64_t one = 1;
	uint64_t generation;

	/* Pairs with the full fence clawd has between storing an odd need_wake and its last look at head: either it sees
	   our head, or we see it asleep. */
	claw_fence_full();
	generation = claw_load_relaxed(&p->ctl->need_wake);
	/* An eventfd write can only fail if somebody closed the descriptor; then the next call tries again */
	if ((generation & 1) && generation != p->signalled && write(p->event_fd, &one, sizeof(one)) == (ssize_t)sizeof(one))
		p->signalled = generation;
}

/* Let the records before `pos` be seen */
static inline void claw_publish(struct claw_producer *p, uint64_t pos)
{
	claw_store_relaxed(&p->head, pos); /* claw_wait_room() of another thread may be reading it */
	/* Pairs with clawd's acquire load of head: it sees the records whole */
	claw_store_release(&p->data->head, pos);
	claw_wake(p);
}

/* See how far clawd came */
static inline int claw_take_ack(struct claw_producer *p)
{
	/* Pairs with clawd's release store of ack_pos: it has copied these bytes, so they may be overwritten */
	uint64_t ack_pos = claw_load_acquire(&p->ctl->ack_pos);

	if (p->head - ack_pos > p->ring_bytes)
		return -EPROTO;
	p->ack_pos = ack_pos;
	return 0;
}

/* Move on what fits the ring, at most CLAW_MOVE_BYTES, so that no call takes long */
static inline int claw_move(struct claw_producer *p)
{
	uint32_t left = p->overflow_count;
	uint64_t pos = p->head;
	int result = claw_take_ack(p);

	if (result < 0)
		return result;
	while (left && pos - p->head < CLAW_MOVE_BYTES) {
		const uint8_t *from = p->overflow + (pos & (p->overflow_bytes - 1));
		struct claw_record record;
		uint64_t bytes;

		memcpy(&record, from, sizeof(record));
		bytes = claw_record_bytes(record.len);
		if (pos + bytes - p->ack_pos > p->ring_bytes)
			break;
		memcpy(p->ring + (pos & (p->ring_bytes - 1)), from, (size_t)bytes);
		pos += bytes;
		left--;
	}
	if (pos == p->head) {
		claw_wake(p); /* the ring is full: clawd must not sleep on it */
		return 0;
	}
	claw_publish(p, pos);
	/* After head: with the count at 0, claw_wait_room() of another thread takes head for all there is */
	claw_store_relaxed(&p->overflow_count, left);
	return 0;
}

static inline int claw_map_overflow(struct claw_producer *p)
{
	size_t bytes = (size_t)p->overflow_bytes + CLAW_PAGE;
	void *overflow;

	if (p->overflow)
		return 0;
	overflow = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (overflow == MAP_FAILED)
		return -errno;
	/* A child has no part in what is not sent yet, and must not cost copies of it */
	if (madvise(overflow, bytes, MADV_DONTFORK)) {
		int result = -errno;

		munmap(overflow, bytes);
		return result;
	}
	p->overflow = (uint8_t *)overflow;
	return 0;
}

static inline void claw_unmap_overflow(struct claw_producer *p)
{
	if (p->overflow)
		munmap(p->overflow, (size_t)p->overflow_bytes + CLAW_PAGE);
	p->overflow = NULL;
}

/* Where the ring alone does not do: order first, so what is in the overflow goes before, or takes the batch in too */
static inline int claw_begin_behind(struct claw_producer *p, uint64_t bytes, struct claw_batch *ret_batch)
{
	int result = claw_move(p);

	if (result < 0)
		return result;
	if (bytes > p->capacity)
		return -EMSGSIZE;
	ret_batch->seq = p->ring_seq;
	ret_batch->now_ns = claw_now_ns();
	if (!p->overflow_count) {
		p->tail = p->head;
		if (p->head - p->ack_pos + bytes <= p->ring_bytes) {
			ret_batch->bytes = p->ring;
			ret_batch->mask = p->ring_bytes - 1;
			ret_batch->pos = p->head;
			return 0;
		}
	}
	if (p->tail - p->head + bytes > p->overflow_bytes || claw_map_overflow(p) < 0)
		return -EAGAIN;
	ret_batch->bytes = p->overflow;
	ret_batch->mask = p->overflow_bytes - 1;
	ret_batch->pos = p->tail;
	return 0;
}

/* Make sure of room for `bytes`, and start a batch there */
static inline int claw_begin(struct claw_producer *p, uint64_t bytes, struct claw_batch *ret_batch)
{
	if (p->overflow_count || p->head - p->ack_pos + bytes > p->ring_bytes)
		return claw_begin_behind(p, bytes, ret_batch);
	ret_batch->bytes = p->ring;
	ret_batch->mask = p->ring_bytes - 1;
	ret_batch->pos = p->head;
	ret_batch->seq = p->ring_seq;
	ret_batch->now_ns = claw_now_ns();
	return 0;
}

static inline void claw_commit(struct claw_producer *p, const struct claw_batch *batch)
{
	if (batch->seq == p->ring_seq)
		return;
	if (batch->bytes == p->ring) {
		p->ring_seq = batch->seq;
		claw_publish(p, batch->pos);
		return;
	}
	p->tail = batch->pos;
	claw_store_relaxed(&p->overflow_count, p->overflow_count + (uint32_t)(batch->seq - p->ring_seq));
	p->ring_seq = batch->seq;
	claw_move(p); /* a batch that is longer than the ring may find it empty; clawd's words were looked at just now */
}

/*
 * Move on what fits of the overflow. Returns the number of records left in it: 0 = none. To be called once a step while it
 * is not 0, as every other writing call does by itself; and before claw_detach(), see above. A call that finds nothing to
 * move gives the overflow's memory back.
 */
static inline int claw_flush(struct claw_producer *p)
{
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	if (!p->overflow_count) {
		claw_unmap_overflow(p);
		return 0;
	}
	result = claw_move(p);
	return result < 0 ? result : (int)p->overflow_count;
}

/*
 * How much this process keeps for a ring that is full: a power of two from CLAW_RING_BYTES_MIN to CLAW_OVERFLOW_BYTES_MAX,
 * CLAW_OVERFLOW_BYTES unless told; 0 = nothing, then a full ring is -EAGAIN at once. Memory is taken when it is needed.
 * -EBUSY: something is in it.
 */
static inline int claw_set_overflow(struct claw_producer *p, uint64_t bytes)
{
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	if (bytes && (bytes < CLAW_RING_BYTES_MIN || bytes > CLAW_OVERFLOW_BYTES_MAX || (bytes & (bytes - 1))))
		return -EINVAL;
	if (p->overflow_count)
		return -EBUSY;
	claw_unmap_overflow(p);
	p->overflow_bytes = bytes;
	p->capacity = bytes > p->ring_bytes ? bytes : p->ring_bytes;
	return 0;
}

/* How much is still to be acknowledged, and where it is */
static inline int claw_look_backlog(const struct claw_producer *p, struct claw_backlog *ret_backlog)
{
	int result = claw_check(p);

	if (result < 0)
		return result;
	ret_backlog->accepted = p->overflow_count;
	ret_backlog->in_ring = p->head - claw_load_relaxed(&p->ctl->ack_pos);
	return 0;
}

/*
 * Sleep until a call that met -EAGAIN is worth another try, at most timeout_ns (0 = only look). -EAGAIN: it is not, in that
 * time. `bytes` is claw_text_bytes() for a text (the sum of them for claw_write_many()), claw_record_bytes() of a reason
 * for claw_close_stream(), claw_record_bytes(record_max) for claw_open_stream() and claw_flush(). It looks every 100 us, less
 * often the longer it lasts, and needs no wake-up: the call that met the full ring has woken clawd.
 */
static inline int claw_wait_room(const struct claw_producer *p, uint64_t bytes, uint64_t timeout_ns)
{
	struct timespec look = { 0, CLAW_ROOM_LOOK_NS };
	uint64_t start_ns = claw_now_ns();

	for (;;) {
		uint64_t need = bytes;
		uint64_t used, waited_ns;
		int result = claw_check_open(p);

		if (result < 0)
			return result;
		if (bytes > p->capacity)
			return -EMSGSIZE;
		/* Texts of a stream with a loss to tell take a GAP along */
		need += claw_load_relaxed(&p->lost_streams) * claw_record_bytes(sizeof(CLAW_LOST_REASON));
		if (need > p->ring_bytes)
			need = p->ring_bytes;
		/* With something in the overflow a try moves that on first: enough that it moves at all, and that the sleep
		   was worth it */
		if (claw_load_relaxed(&p->overflow_count)) {
			if (need > p->ring_bytes / 2)
				need = p->ring_bytes / 2;
			if (need < claw_record_bytes(p->record_max))
				need = claw_record_bytes(p->record_max);
		}
		/* A look only: the acquire that guards the ring bytes is claw_take_ack()'s. ack_pos first, or another
		   thread's commit in between makes `used` negative. */
		used = claw_load_acquire(&p->ctl->ack_pos);
		used = claw_load_relaxed(&p->head) - used;
		if (used <= p->ring_bytes && used + need <= p->ring_bytes)
			return 0;
		waited_ns = claw_now_ns() - start_ns;
		if (waited_ns >= timeout_ns)
			return -EAGAIN;
		/* a clawd that stands still costs nothing, and what has waited long can wait a sixteenth longer */
		waited_ns /= 16;
		if (waited_ns > CLAW_ROOM_LOOK_NS_MAX)
			look.tv_nsec = CLAW_ROOM_LOOK_NS_MAX;
		else if (waited_ns > CLAW_ROOM_LOOK_NS)
			look.tv_nsec = (long)waited_ns;
		clock_nanosleep(CLOCK_MONOTONIC, 0, &look, NULL); /* cut short by a signal: one more look */
	}
}

#endif
