/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Page: what clawd says of itself in shared memory, for everyone who may read it and without being asked. One writer.
 *
 * Totals and histograms are counters that stand for themselves: each is loaded whole, and none says anything about
 * another's memory, so they need no fence. A row has several words that belong together and is a seqlock: `seq` is odd
 * while it is written. Times are CLOCK_MONOTONIC.
 */
enum {
	CLAW_PAGE_MAGIC = 0x53574c43, /* "CLWS" */
	CLAW_PAGE_LAYOUT = 5,
	CLAW_PAGE_REASON = 96, /* bytes; what is longer is cut at a character */
	CLAW_PAGE_LABEL = 64,
	CLAW_PAGE_VERSION = 32,
	CLAW_PAGE_PATH = 256,
	CLAW_PAGE_BYTES_MAX = 0x40000000,
	CLAW_PAGE_MARKS = 2,
	CLAW_PAGE_MARK_S = 300,
	CLAW_PAGE_SETTLE_S = 10, /* until a clawd that took over rings has made good what waited for it */
};

/* Where a table is and how much of it was ever used */
struct claw_page_table {
	uint64_t offset; /* bytes from the start of the page */
	uint32_t row_bytes;
	uint32_t count;
	uint32_t used;
	uint32_t reserved;
};

struct claw_page_header {
	uint32_t magic; /* stored last: whoever sees it sees all that does not change below */
	uint32_t layout;
	uint64_t bytes; /* of the whole page */
	uint64_t daemon_epoch;
	uint64_t started_ns;
	uint64_t spool_bytes; /* as configured */
	uint32_t pid;
	uint32_t clients; /* that said hello on the control socket, or joined by tcp */
	char version[CLAW_PAGE_VERSION]; /* of clawd, NUL-terminated, as is */
	char runtime_dir[CLAW_PAGE_PATH]; /* where it serves; empty when that is too long */
	struct claw_page_table totals, hists, streams, rings, connections, marks;
	uint64_t beat; /* one more each turn, and a turn comes at least each second */
	uint64_t beat_ns; /* when */
};

struct claw_totals {
	uint64_t turns;
	uint64_t sleeps; /* times claw_wait went to sleep */
	uint64_t rescued; /* data found by a timeout and not by a signal: a bug */
	uint64_t storms; /* times a ring that kept waking us for nothing was not listened to for a while */
	uint64_t records;
	uint64_t tokens; /* tokens committed */
	uint64_t text_bytes;
	uint64_t discarded; /* tokens of streams that clawd had ended before: cancelled, refused */
	uint64_t opened;
	uint64_t ended;
	uint64_t refused;
	uint64_t cancelled;
	uint64_t quarantined;
	uint64_t dropped; /* tokens the spool had no room for: readers get a GAP */
	uint64_t evicted_blocks;
	uint64_t gaps; /* GAPs told to readers */
	uint64_t frames;
	uint64_t frame_bytes;
	uint64_t compact_saved_bytes; /* what frames would have had more without compact encoding */
	uint64_t copied_frames; /* that went on the express lane too */
	uint64_t sent; /* tokens handed to ZeroMQ, once a reader */
	uint64_t paced_slower, paced_high_water, paced_low_water, paced_delay_jump; /* what pacers noticed: CLAW_PACED_… */
	uint64_t segments; /* runs of one stream's tokens in frames: sent ÷ segments is how many a reader gets at once */
	uint64_t segment_max; /* tokens, the most in one */
	uint64_t odd_clock; /* written times that are not of the past hour, nor of the turn: left out of the histograms */
	uint64_t events_missed;
	uint64_t streams_live;
	uint64_t streams_ended;
	uint64_t streams_awaited;
	uint64_t streams_gone;
	uint64_t attachments;
	uint64_t spool_blocks;
	uint64_t spool_free;
	uint64_t recovered_streams; /* taken over at the start, and how many blocks and rings */
	uint64_t recovered_blocks;
	uint64_t recovered_rings;
	uint64_t first_count; /* streams whose first token is waited for, by CLAW_FIRST_WAIT_MS */
	uint64_t boost; /* CLAW_BOOST_…: what clawd asks for now */
	uint64_t boosts; /* times it asked for CLAW_BOOST_FIRST */
	uint64_t pressure; /* as engines are told, 0 … CLAW_DEGRADE_MAX */
	uint64_t run_delay_ns; /* that clawd's threads waited for a processor; 0 = not known */
};

enum {
	CLAW_HIST_COMMIT = 0, /* written → committed */
	CLAW_HIST_SEND = 1, /* written → sent, each token and reader */
	CLAW_HIST_FIRST = 2, /* requested (else OPEN) → sent, first tokens */
	CLAW_HIST_HELD = 3, /* committed → released: what the pacer added, 0 where it is off */
	CLAW_HIST_GAP_RAW = 4, /* between a stream's tokens, as they were committed */
	CLAW_HIST_GAP = 5, /* as they were released */
	CLAW_HIST_RELEASE = 6, /* how far from when it was due a token was released */
	CLAW_HIST_FIRST_REQUESTED = 7, /* those of FIRST whose producer told when it was requested */
	CLAW_HIST_WRITTEN = 8, /* requested (else OPEN) → written, first tokens: the engine's part */
	CLAW_HIST_COMMIT_FIRST = 9, /* of COMMIT, HELD and SEND those that are sequence 0: what is left is the rest */
	CLAW_HIST_HELD_FIRST = 10,
	CLAW_HIST_SEND_FIRST = 11,
	CLAW_HIST_GAP_SENT = 12, /* between a stream's tokens, as they were sent to each reader */
	CLAW_HIST_QUEUED = 13, /* released → sent, one token at a time for each reader */
	CLAW_HIST_QUEUED_FIRST = 14, /* those of QUEUED that are sequence 0 */
	CLAW_HIST_COUNT = 15,
};

/*
 * What the histograms were at one moment. There is a new one each CLAW_PAGE_MARK_S in place of the oldest, so what came
 * since the older of the two is what came lately.
 */
struct claw_page_mark {
	uint64_t seq;
	uint64_t at_ns; /* 0 = none */
	struct claw_hist hists[CLAW_HIST_COUNT];
};

/* What changes with each token is the first 80 bytes. Bytes of a name or a reason beyond their length mean nothing. */
struct claw_page_stream {
	uint64_t seq;
	uint32_t state; /* CLAW_STREAM_…; FREE = no stream here */
	uint32_t incarnation;
	uint32_t ring; /* index */
	uint32_t attachments;
	uint64_t next_seq;
	uint64_t tokens;
	uint64_t text_bytes;
	uint64_t spool_bytes;
	uint64_t first_sent_ns;
	uint64_t released_seq; /* from here on its pacer holds them */
	uint32_t lag_ms; /* how long it held what it released last */
	uint32_t pace; /* CLAW_PACE_… that counts for it, DEFAULT = before its first token */
	uint64_t requested_ns; /* 0 = not told */
	uint64_t opened_ns;
	uint64_t ended_ns;
	uint32_t name_len;
	uint32_t reason_len;
	uint8_t name[CLAW_NAME_MAX + 1];
	uint8_t reason[CLAW_PAGE_REASON];
};

/* Who is at the other end. The label is what the peer says of itself; the rest is the kernel's word. */
struct claw_page_peer {
	uint64_t since_ns;
	uint32_t pid;
	uint32_t uid;
	uint32_t role; /* CLAW_ROLE_… */
	uint32_t label_len;
	uint8_t label[CLAW_PAGE_LABEL];
};

enum {
	CLAW_ROLE_NONE = 0, /* a connection whose client has not attached yet */
	CLAW_ROLE_PRODUCER = 1,
	CLAW_ROLE_CONSUMER = 2,
	CLAW_ROLE_OBSERVER = 3,
	CLAW_ROLE_ADMIN = 4,
};

struct claw_page_ring {
	uint64_t seq;
	uint32_t state; /* CLAW_RING_…; FREE = no ring here */
	uint32_t violation; /* CLAW_BAD_… */
	uint32_t streams; /* live ones */
	uint32_t reserved;
	uint64_t ring_bytes;
	uint64_t used_bytes; /* published and not taken when the last turn was over */
	uint64_t records;
	uint64_t tokens;
	uint64_t bytes;
	struct claw_page_peer peer;
};

struct claw_page_connection {
	uint64_t seq;
	uint32_t number; /* 0 = no connection here */
	uint32_t attachments;
	uint32_t blocked; /* its socket takes no more */
	uint32_t loss_ppm; /* of the way to it: how many of a million segments were sent again lately */
	uint64_t charged; /* wire bytes sent, as its window counts them */
	uint64_t acked;
	uint32_t rtt_us, jitter_us; /* smoothed round trip, and its mean deviation */
	uint64_t way_ns; /* as of when the kernel said so of the way, 0 = nothing is known of it */
	uint64_t way_seen_ns; /* when pacers knew */
	struct claw_page_peer peer;
};

/* Bytes of a page with these tables; 0 = too many */
uint64_t claw_page_bytes(uint32_t stream_count, uint32_t ring_count, uint32_t connection_count);

/* How much of a text of len bytes fits into room, cut before a character */
uint32_t claw_page_cut(const uint8_t *text, uint32_t len, uint32_t room);

/* A reader's view of a page that somebody else may write, or shrink */
struct claw_view;

/* Map a page by its descriptor, which may be closed after. NULL: *ret_error is -EBADMSG for what is no page of this
 * layout, -EAGAIN for one that is not ready yet, or what the kernel said. */
struct claw_view *claw_view_open(int fd, int *ret_error);
void claw_view_close(struct claw_view *view);
/* The header, with beat, beat_ns, clients and the tables' `used` as they are now. 0, or -EFAULT: the page is gone. */
int claw_view_header(struct claw_view *view, struct claw_page_header *ret_header);
int claw_view_totals(struct claw_view *view, struct claw_totals *ret_totals);
int claw_view_hist(struct claw_view *view, uint32_t which, struct claw_hist *ret_hist);
/*
 * One row: 1, or 0 when nothing is there, -EAGAIN when it was being written at each of many looks (its writer may have
 * stopped there), -EFAULT when the page is gone, -EBADMSG for lengths that no clawd writes, -ERANGE.
 */
int claw_view_stream(struct claw_view *view, uint32_t index, struct claw_page_stream *ret_row);
int claw_view_ring(struct claw_view *view, uint32_t index, struct claw_page_ring *ret_row);
int claw_view_connection(struct claw_view *view, uint32_t index, struct claw_page_connection *ret_row);
int claw_view_mark(struct claw_view *view, uint32_t index, struct claw_page_mark *ret_row);
