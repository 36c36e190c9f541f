/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turn: one pass of the relay loop. claw_wait sleeps until there is something to do; claw_turn takes what every ring
 * holds into the spool and builds the frames to send. Everything between (sockets, policy) is Python's.
 */
struct claw_core; /* everything clawd holds in private memory */

struct claw_limits {
	uint64_t spool_bytes;
	uint64_t stream_bytes;
	uint64_t keep_ns;
	uint32_t max_streams;
	uint32_t max_rings;
	uint32_t max_connections;
	uint32_t max_attachments;
	uint32_t user_streams; /* live ones; 0 = as many as there may be */
	uint32_t user_attachments; /* likewise */
};

enum {
	CLAW_EVENT_OPENED = 1, /* stream: index */
	CLAW_EVENT_ENDED = 2,
	CLAW_EVENT_REFUSED = 3, /* detail: CLAW_STOPPED_… */
	CLAW_EVENT_UNREAD = 4, /* is cancelled now, as nobody reads it */
	CLAW_EVENT_COUNT = 1024, /* events until they are taken; more are counted in events_missed */
	CLAW_TURN_RECORDS = 1024, /* records a ring may bring in one turn */
	CLAW_TURN_BYTES = 0x20000, /* and bytes */
};

/* For the log, not for deciding: a busy turn may leave some out */
struct claw_event {
	uint32_t kind;
	uint32_t stream;
	uint32_t ring;
	uint32_t detail;
};

/* What a turn came to: at the same address for the core's life, so that looking costs no call */
struct claw_outcome {
	uint32_t frame_count;
	uint32_t event_count; /* since they were taken last, which sets it to 0 */
	uint32_t rings_settled; /* rings that became DONE or BROKEN, since the start */
	uint32_t more; /* the turn left something to do at once */
	uint32_t unproven; /* claw_unproven has something to look for */
	uint32_t first_count; /* streams whose first token is waited for */
	uint64_t unmet_ns; /* when claw_unmet has something to look for, 0 = not as things stand */
	uint64_t first_until_ns; /* a first token is waited for so long, 0 = none is */
};

/* state of a ring, on clawd's side */
enum {
	CLAW_RING_FREE = 0,
	CLAW_RING_LIVE = 1,
	CLAW_RING_LEFT = 2, /* its producer is gone; what it published is still being taken */
	CLAW_RING_DONE = 3, /* drained and its streams ended: drop it */
	CLAW_RING_BROKEN = 4, /* quarantined: drop it */
};

struct claw_ring_row {
	uint64_t ring_bytes;
	uint64_t used_bytes; /* published and not taken yet */
	uint64_t records;
	uint64_t tokens;
	uint64_t bytes;
	uint32_t state;
	uint32_t violation; /* CLAW_BAD_… */
	uint32_t streams; /* live ones */
	uint32_t reserved;
};

/* page_fd: where its figures go, an object of claw_page_bytes; -1 = nobody reads them. May be closed after. */
struct claw_core *claw_core_create(const struct claw_limits *limits, int page_fd, int *ret_error);
/* Unmap everything. Spool and rings stay as they are, for the next clawd. */
void claw_core_destroy(struct claw_core *core);
int claw_core_map_spool(struct claw_core *core, int fd, uint64_t bytes);
/*
 * Change these two while it runs. keep_ns counts for streams that ended before, too; a stream that holds more than
 * stream_bytes lets go of it as it writes on. 0, or -EINVAL with nothing changed.
 */
int claw_core_limit(struct claw_core *core, uint64_t stream_bytes, uint64_t keep_ns);

/* From now on no stream opens: each OPEN is refused with CLAW_STOPPED_DRAINING. Those that live go on. */
void claw_core_drain(struct claw_core *core);

/* What a start found in the spool */
struct claw_recovered {
	uint32_t live; /* streams, each waiting for its ring */
	uint32_t ended;
	uint32_t blocks; /* that hold records */
	uint32_t damaged; /* blocks given up: what they hold is not what a clawd writes */
	uint32_t beyond; /* streams given up: more than max_streams */
	uint32_t reserved;
};

/*
 * Take over what the spool's objects hold, once all are mapped and before anything else comes. 0, or -ENOMEM. Whatever is
 * in them, nothing of it is believed before it was checked.
 */
int claw_core_recover(struct claw_core *core, uint64_t now_ns, struct claw_recovered *ret_found);
/*
 * Take over a ring that an earlier clawd made, with the streams that came from it; the descriptors may be closed after. It
 * is polled until its producer attaches it again. Returns its index, or -EBADMSG for one that no clawd left so.
 */
int claw_ring_adopt(struct claw_core *core, int data_fd, int ctl_fd, uint64_t ring_bytes, uint64_t ring_id,
		    uint64_t daemon_epoch, uint64_t now_ns);
/* Its producer attached it again: from the first signal on event_fd on it is not polled any more. May be closed after. */
int claw_ring_hear_again(struct claw_core *core, int ring, int event_fd);
/* End the streams of this ring that wait for it in vain; 0 = of all rings: no more are adopted. Returns how many. */
int claw_orphans_end(struct claw_core *core, uint64_t ring_id, const char *reason, uint64_t now_ns);

/* Watch a descriptor of Python's in claw_wait; tag > 0 comes back when it is readable. Level-triggered. */
int claw_core_watch(struct claw_core *core, int fd, uint32_t tag);
int claw_core_unwatch(struct claw_core *core, int fd);

/* Take a ring in; the descriptors may be closed after. Returns its index. */
int claw_ring_add(struct claw_core *core, int data_fd, int ctl_fd, int event_fd, uint64_t ring_bytes, uint64_t ring_id,
		  uint64_t daemon_epoch);
/* Its producer is gone: take what is left, end its streams as producer_lost. */
int claw_ring_leave(struct claw_core *core, int ring);
/* Let go of it for good: its producer is told. */
int claw_ring_drop(struct claw_core *core, int ring);
int claw_ring_row(const struct claw_core *core, int ring, struct claw_ring_row *ret_row);

/*
 * Sleep until a ring has data, a watched descriptor is readable, a timer is due or timeout_ns is over. Returns how many
 * tags it wrote to ret_tags, or -errno (EINTR included).
 */
int claw_wait(struct claw_core *core, int64_t timeout_ns, uint32_t *ret_tags, int tag_max);
/*
 * Wait, and when no descriptor of Python's is readable, turn at once: between two tokens this is the one call of a pass.
 * As claw_wait; 0 = a turn was made.
 */
int claw_next(struct claw_core *core, int64_t timeout_ns, uint32_t *ret_tags, int tag_max);
/* One turn. Returns 1 when there is more to do at once, else 0. Frames and events are valid until the next turn. */
int claw_turn(struct claw_core *core, uint64_t now_ns);
/* Where a turn leaves its results */
const struct claw_outcome *claw_outcome(const struct claw_core *core);
const struct claw_frame *claw_frames(const struct claw_core *core);
const struct claw_event *claw_events(const struct claw_core *core);
const uint8_t *claw_out(const struct claw_core *core);
/* A frame went out at sent_ns: account its tokens. */
void claw_sent(struct claw_core *core, const uint8_t *frame, uint32_t len, uint64_t sent_ns);
/* The same for a frame of the last turn, by its number in claw_frames. */
void claw_sent_frame(struct claw_core *core, uint32_t number, uint64_t sent_ns);

/* Connections: 0 = no room. The others return 0 or -errno: ENOENT, no such connection. */
uint32_t claw_connect(struct claw_core *core);
int claw_disconnect(struct claw_core *core, uint32_t connection, uint64_t now_ns);
int claw_block(struct claw_core *core, uint32_t connection, int blocked);
/* A flow message. -EBADMSG: it breaks a rule. */
int claw_flow(struct claw_core *core, uint32_t connection, const uint8_t *message, size_t len);
/*
 * Attach: 0 reads, 1 waits for the stream to open, -ENOENT unknown and not to be waited for, -ESTALE ended long ago,
 * -EREMCHG not the incarnation or position that was read before, -EDQUOT too many, -EINVAL.
 */
int claw_attach_stream(struct claw_core *core, uint32_t connection, const struct claw_attach *attach, uint64_t now_ns);
/* 1 = there was one */
int claw_detach(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns);
/* Take out attachments whose stream did not open in time. Returns how many were written to ret_unmet. */
int claw_unmet(struct claw_core *core, uint64_t now_ns, struct claw_unmet *ret_unmet, int max);
/* End a stream for everybody, whoever asks: 0, -ENOENT no such stream is open, -ESTALE it ended before. */
int claw_cancel_stream(struct claw_core *core, const uint8_t *name, uint32_t name_len, uint64_t now_ns);
/* Cancel the stream of this attachment, now or when it opens. 0, or -ENOENT. Again = no change. */
int claw_cancel(struct claw_core *core, uint32_t connection, uint32_t id, uint64_t now_ns);

const struct claw_totals *claw_totals(struct claw_core *core);
const struct claw_hist *claw_hist(const struct claw_core *core, int which);
int claw_stream_at(const struct claw_core *core, uint32_t stream, struct claw_stream_row *ret_row);

/* Say who clawd is; from now on others can read the page. */
void claw_core_publish(struct claw_core *core, uint32_t pid, uint64_t daemon_epoch, uint64_t started_ns,
		       const char *version, const char *runtime_dir);
/* Say who is at the other end of a ring, of a connection; how many clients said hello. 0 or -ENOENT. */
int claw_ring_label(struct claw_core *core, int ring, const struct claw_page_peer *peer);
int claw_connection_label(struct claw_core *core, uint32_t connection, const struct claw_page_peer *peer);
void claw_core_clients(struct claw_core *core, uint32_t count);
