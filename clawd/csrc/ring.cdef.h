/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring: the memory a producer and clawd share, and the two structs exchanged when a producer attaches.
 *
 * Two shared-memory objects a producer. DATA is written by the producer and mapped read-only by clawd: one page with
 * `head`, then the ring bytes, which each side maps twice in a row so that no record wraps. CTL is written by clawd and
 * mapped read-only by the producer. Positions are free-running byte counts; `position & (ring_bytes - 1)` is the offset.
 * Everything is little-endian and naturally aligned; each word with a writer of its own has a 128-byte line of its own,
 * because processors prefetch lines in pairs.
 */
enum {
	CLAW_MAGIC = 0x57414c43, /* "CLAW" */
	CLAW_LAYOUT = 1,
	CLAW_LINE = 128,
	CLAW_PAGE = 4096, /* where the ring bytes start in DATA, and stopped[] in CTL */
	CLAW_HANDLE_COUNT = 4096, /* streams a producer can have open at once */
	CLAW_RING_BYTES_MIN = 4096,
	CLAW_RING_BYTES_MAX = 0x4000000, /* 64 MiB */
	CLAW_RECORD_ALIGN = 32,
	CLAW_RECORD_MAX = 3584, /* payload bytes; also at most a quarter of the ring */
	CLAW_NAME_MAX = 255,
	CLAW_REASON_MAX = 255,
	CLAW_PRODUCER_NAME = 64,
	CLAW_ATTACHED_TEXT = 160,
};

/* kind of a record */
enum {
	CLAW_TOKEN = 1,
	CLAW_OPEN = 2, /* payload: struct claw_open, then name, readers, meta */
	CLAW_CLOSE = 3, /* payload: the reason */
	CLAW_GAP = 4, /* `count` tokens that the producer could not keep; payload: the reason */
};

/* flags of a record */
enum {
	CLAW_URGENT = 1,
};

/* how a stream's tokens are spread over time, in claw_open.pace */
enum {
	CLAW_PACE_DEFAULT = 0, /* as clawd is configured */
	CLAW_PACE_OFF = 1, /* as they come */
	CLAW_PACE_SMOOTH = 2, /* at the producer's own pace, without its jitter */
	CLAW_PACE_STEADY = 3, /* at a bounded rate */
};

/* state of a ring, in claw_ctl.state */
enum {
	CLAW_STATE_OPEN = 1,
	CLAW_STATE_QUARANTINED = 2, /* one way: the producer must attach anew */
	CLAW_STATE_CLOSED = 3, /* clawd has let go of this ring */
};

/* low byte of claw_ctl.stopped[handle]; the rest is the ring_seq of the OPEN it answers */
enum {
	CLAW_STOPPED_NOT = 0,
	CLAW_STOPPED_CANCELLED = 1, /* a reader cancelled */
	CLAW_STOPPED_EXISTS = 2, /* the name is live or still spooled */
	CLAW_STOPPED_LIMIT = 3, /* too many streams */
	CLAW_STOPPED_NO_SPACE = 4, /* the spool has no block */
	CLAW_STOPPED_DRAINING = 5, /* clawd is about to stop */
};

/* claw_ctl.hint_reason: why clawd would like less */
enum {
	CLAW_HINT_NONE = 0,
	CLAW_HINT_LAG = 1, /* a stream is made faster than its pace allows */
	CLAW_HINT_CONGESTED = 2, /* a reader does not take what is sent */
	CLAW_HINT_PRESSURE = 3, /* the host is short of processor time */
};

/* claw_attached.status */
enum {
	CLAW_ATTACH_OK = 0,
	CLAW_ATTACH_LAYOUT = 1, /* this clawd does not speak the producer's layout */
	CLAW_ATTACH_DENIED = 2,
	CLAW_ATTACH_LIMIT = 3,
	CLAW_ATTACH_NO_SPACE = 4,
	CLAW_ATTACH_BAD_REQUEST = 5,
	CLAW_ATTACH_STOPPING = 6,
	CLAW_ATTACH_LOST = 7, /* the ring to attach again is not known here */
};

/* Page 0 of DATA. Only `head` is read by clawd, once a turn; the rest is for people with a hex dump. */
struct claw_data {
	uint32_t magic;
	uint32_t layout;
	uint64_t ring_bytes;
	uint64_t ring_id;
	uint8_t pad0[104];
	uint64_t head; /* producer, release store: the commit of every record before it */
	uint8_t pad1[120];
};

struct claw_record {
	uint32_t len; /* payload bytes; records are padded to CLAW_RECORD_ALIGN */
	uint8_t kind;
	uint8_t flags;
	uint16_t handle; /* chosen by the producer, below CLAW_HANDLE_COUNT */
	uint64_t ring_seq; /* from 1, one more each record: zeroed memory is never valid */
	uint64_t written_ns; /* CLOCK_MONOTONIC of write() */
	uint32_t count; /* tokens in this record, as told by the engine: metadata only */
	uint32_t reserved; /* 0 */
};

/* Payload of OPEN, followed by name_len bytes of UTF-8 name, readers_len bytes of whom it is for, meta_len bytes of JSON */
struct claw_open {
	uint64_t requested_ns; /* CLOCK_MONOTONIC when the answer was asked for; 0 = not known */
	uint16_t name_len;
	uint16_t meta_len;
	uint8_t pace; /* CLAW_PACE_… */
	uint8_t readers_len; /* 0 = it is for everybody */
	uint8_t reserved[2]; /* 0 */
};

struct claw_ctl {
	uint32_t magic;
	uint32_t layout;
	uint32_t size; /* bytes of this struct */
	uint32_t compatible; /* feature bits a peer may ignore */
	uint32_t incompatible; /* feature bits a peer must know */
	uint32_t record_max;
	uint64_t ring_bytes;
	uint64_t ring_id;
	uint8_t boot_id[16];
	uint8_t pad0[72];
	uint64_t ack_pos; /* clawd, release store: everything before is in the spool, its ring bytes are free */
	uint8_t pad1[120];
	uint64_t need_wake; /* clawd: a generation; odd = asleep. A producer signals its eventfd once for each odd value */
	uint8_t pad2[120];
	uint32_t state;
	uint32_t state_reason;
	uint64_t daemon_epoch;
	uint8_t pad3[112];
	uint32_t hint_seq; /* odd while the three words below change */
	uint32_t hint_reason;
	uint32_t target_rate; /* tokens per 1,000 s a stream should make; 0 = no wish */
	uint32_t degrade; /* 0 none … 3 most */
	/* Whose ring it is, for a clawd that takes it over: as told and as seen when it was attached first */
	uint32_t producer_uid;
	uint32_t producer_pid;
	char producer_name[CLAW_PRODUCER_NAME];
	uint8_t pad4[3496];
	uint64_t stopped[CLAW_HANDLE_COUNT]; /* open_seq << 8 | CLAW_STOPPED_… */
};

/* producer → clawd, one packet on the control socket */
struct claw_hello {
	uint32_t magic;
	uint32_t layout;
	uint32_t size; /* bytes of this struct */
	uint32_t compatible;
	uint32_t incompatible;
	uint32_t reserved; /* 0 */
	uint64_t ring_bytes; /* wanted; 0 = clawd's default */
	uint64_t ring_id; /* of the ring to attach again; 0 = a new one */
	char name[CLAW_PRODUCER_NAME]; /* label for people, NUL-terminated */
};

/*
 * clawd → producer, when status is 0 with descriptors. A new ring's are DATA (read-write), CTL (read-only), eventfd; for one
 * that is attached again, to a clawd that started meanwhile, the new eventfd alone.
 */
struct claw_attached {
	uint32_t magic;
	uint32_t layout;
	uint32_t size;
	uint32_t compatible;
	uint32_t incompatible;
	uint32_t status;
	uint64_t ring_bytes;
	uint64_t ring_id;
	uint64_t daemon_epoch;
	uint32_t record_max;
	uint32_t reserved;
	char text[CLAW_ATTACHED_TEXT]; /* why, when status is not 0 */
};
