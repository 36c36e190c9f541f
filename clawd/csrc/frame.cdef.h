/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data frame: what clawd sends to a client, one ZeroMQ frame of at most CLAW_FRAME_MAX bytes.
 *
 * A frame is a claw_frame_header, then segments. A segment is a claw_segment, then `len` bytes of records of one stream,
 * in sequence. A record is a claw_spooled, then its payload, padded to CLAW_SPOOLED_ALIGN: the same bytes as in the
 * spool, so that a frame is one copy. TOKEN takes one sequence number, GAP takes `count`, OPEN and CLOSE none.
 * Everything is little-endian.
 */
enum {
	CLAW_FRAME_DATA = 0xda, /* first byte of a data frame; JSON starts with '{' */
	CLAW_FRAME_FLOW = 0xf1, /* first byte of a flow message */
	CLAW_FRAME_VERSION = 1,
	CLAW_FRAME_MAX = 16384,
	CLAW_FRAME_CHARGE = 256, /* what a frame costs of its connection's window beyond its own bytes */
	CLAW_WINDOW = 65536, /* charged bytes a connection may have sent and not acked */
	CLAW_SPOOLED_ALIGN = 8,
};

/* class of a token */
enum {
	CLAW_CRITICAL = 0, /* a stream's first token, or urgent */
	CLAW_HIGH = 1,
	CLAW_NORMAL = 2,
};

struct claw_frame_header {
	uint8_t kind; /* CLAW_FRAME_DATA */
	uint8_t version;
	uint16_t segments;
	uint32_t connection; /* as told in hello: frames of an earlier connection do not count for ack */
	uint32_t len; /* bytes of the whole frame */
	uint32_t reserved;
};

struct claw_segment {
	uint32_t attachment; /* the id the client gave in attach */
	uint32_t incarnation;
	uint64_t first_seq; /* of the first TOKEN or GAP in this segment */
	uint32_t len; /* bytes of the records that follow, a multiple of CLAW_SPOOLED_ALIGN */
	uint32_t records;
};

struct claw_spooled {
	uint16_t len; /* payload bytes */
	uint8_t kind; /* CLAW_TOKEN … CLAW_GAP. OPEN: meta as payload. CLOSE and GAP: the reason */
	uint8_t klass;
	uint32_t count;
	uint64_t ring_seq; /* of the record it was copied from */
	uint64_t written_ns;
};

/* client → clawd: a claw_flow, then `credits` times claw_credit. Totals only grow, so a repeated message does no harm. */
struct claw_flow {
	uint8_t kind; /* CLAW_FRAME_FLOW */
	uint8_t version;
	uint16_t credits;
	uint32_t connection;
	uint64_t acked; /* charged bytes received on this connection so far */
};

struct claw_credit {
	uint32_t attachment;
	uint32_t reserved;
	uint64_t limit; /* record bytes clawd may send of this attachment in all, since attach */
};

/* One record of a parsed frame */
struct claw_item {
	uint32_t attachment;
	uint32_t incarnation;
	uint64_t seq; /* TOKEN: its own; GAP: the first missing; OPEN and CLOSE: the next token's */
	uint64_t written_ns;
	uint32_t offset; /* of the payload in the frame */
	uint32_t count;
	uint16_t len;
	uint8_t kind;
	uint8_t klass;
	uint32_t bytes; /* what this record costs of its attachment's credit */
};

/*
 * Check a data frame and list its records in ret_items. Returns their number, or -EBADMSG for a frame that breaks a
 * rule above, or -ENOBUFS when it holds more than item_count records; ret_items then means nothing. Reads nothing
 * beyond frame[len - 1], at any alignment.
 */
int claw_frame_parse(const uint8_t *frame, size_t len, struct claw_item *ret_items, int item_count,
		     uint32_t *ret_connection);

/*
 * Join the payloads of the TOKENs that items start with, up to the first other record, and list their times.
 * `frame` may be a part of the parsed frame: its bytes from offset `base` on. ret_written_ns has room for item_count.
 * Returns the number of tokens, or -EBADMSG for an item outside the frame, or -ENOBUFS when data_len is too small.
 */
int claw_frame_gather(const uint8_t *frame, size_t len, uint32_t base, const struct claw_item *items, int item_count,
		      uint8_t *ret_data, size_t data_len, uint64_t *ret_written_ns, size_t *ret_data_len);
