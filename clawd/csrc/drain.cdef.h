/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drain: clawd's private side of one ring. Takes records out of memory that a hostile producer may change at any moment:
 * every shared word is loaded once, into private memory, and checked against sizes kept here.
 */

/* What a producer did wrong. One of these quarantines its ring. */
enum {
	CLAW_BAD_HEAD = 1, /* head went back, or further ahead than the ring is long, or is not aligned */
	CLAW_BAD_LEN = 2, /* longer than record_max or than what is published */
	CLAW_BAD_SEQ = 3, /* not the next ring_seq */
	CLAW_BAD_KIND = 4,
	CLAW_BAD_FLAGS = 5, /* unknown flag, or reserved not 0 */
	CLAW_BAD_HANDLE = 6, /* out of range, opened twice, or not open */
	CLAW_BAD_OPEN = 7, /* OPEN's lengths or name */
	CLAW_BAD_CLOSE = 8, /* CLOSE or GAP with a reason that is empty, too long or not printable */
	CLAW_BAD_COUNT = 9, /* GAP of nothing */
	CLAW_BAD_MEMORY = 10, /* the ring's memory went away under our eyes: truncated */
};

struct claw_drain {
	struct claw_data *data; /* mapped read-only */
	const uint8_t *bytes; /* the ring, mapped twice in a row */
	struct claw_ctl *ctl;
	uint64_t ring_bytes;
	uint64_t pos; /* next record to take */
	uint64_t head; /* as loaded by the last begin */
	uint64_t next_seq; /* 0 = take the first one as it comes */
	uint64_t wake; /* what need_wake holds: odd = asleep */
	uint32_t record_max;
	uint32_t faulted; /* set by the guard: what was read since may be zeros that nobody wrote */
};

/*
 * Map a ring by its descriptors, which may be closed after. 0, or -errno with nothing left mapped. Give the struct its
 * final place first: the guard marks it there.
 */
int claw_drain_init(struct claw_drain *ret_drain, int data_fd, int ctl_fd, uint64_t ring_bytes);
void claw_drain_deinit(struct claw_drain *drain);
/* Load head, once for this turn. 0, -CLAW_BAD_HEAD or -CLAW_BAD_MEMORY. */
int claw_drain_begin(struct claw_drain *drain);
/*
 * Look at the next record: 1 with the header copied and checked in *ret_record, 0 when there is none, or -CLAW_BAD_….
 * Checks what one record can tell; handles and payloads are the caller's.
 */
int claw_drain_next(struct claw_drain *drain, struct claw_record *ret_record);
/* Copy that record's payload, record->len bytes, to dst. 0, or -CLAW_BAD_MEMORY: then dst means nothing. */
int claw_drain_copy(const struct claw_drain *drain, const struct claw_record *record, uint8_t *dst);
/* Go past it. */
void claw_drain_advance(struct claw_drain *drain, const struct claw_record *record);
/* Give the ring bytes of all records taken back to the producer. */
void claw_drain_ack(struct claw_drain *drain);
/* Sleep handshake: say asleep, full fence by the caller over all rings, look again; then awake. */
void claw_drain_sleep(struct claw_drain *drain);
int claw_drain_has_data(const struct claw_drain *drain);
void claw_drain_awake(struct claw_drain *drain);
