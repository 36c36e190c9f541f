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
	CLAW_FRAME_PACKED = 0xdb, /* of one in compact encoding: claw_frame_unpack makes a data frame of it */
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
	uint8_t degrade; /* 0 … CLAW_DEGRADE_MAX: leave out what is not needed; told again with each frame */
	uint8_t reserved;
	uint16_t number; /* counts the frames of a connection: copies on another lane have the same */
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

/* What a part of a frame is */
enum {
	CLAW_PART_PLAIN = 1, /* nothing but TOKENs, one at least */
	CLAW_PART_BEGUN = 2, /* the text of its last records may end inside a character */
	CLAW_PART_CLOSES = 4, /* its last record is CLOSE */
};

/* What a frame has for one attachment: a segment that was checked */
struct claw_part {
	uint32_t attachment;
	uint32_t incarnation;
	uint64_t first_seq; /* of the first TOKEN or GAP */
	uint64_t end_seq; /* after the last */
	uint32_t offset; /* of its records in the frame */
	uint32_t len; /* bytes of its records: what they cost of the attachment's credit */
	uint32_t tokens;
	uint32_t flags; /* CLAW_PART_… */
};

/*
 * Check a data frame, every record of it, and list its segments in ret_parts. Returns their number, or -EBADMSG for a
 * frame that breaks a rule above, or -ENOBUFS when it holds more than part_count segments; ret_parts then means nothing.
 * Reads nothing beyond frame[len - 1], at any alignment.
 */
int claw_frame_split(const uint8_t *frame, size_t len, struct claw_part *ret_parts, int part_count,
		     uint32_t *ret_connection);

/*
 * The records of a part, or a rest of them that starts with a whole one. Both return bytes, or -EBADMSG when one does not
 * lie within `len`: how many bytes the TOKENs take that it starts with, ret_tokens of them; and how many their payloads
 * have, joined in ret_data, with their times in ret_written_ns. -ENOBUFS: data_len or token_count is too small.
 */
int claw_records_run(const uint8_t *records, size_t len, uint32_t *ret_tokens);
int claw_records_join(const uint8_t *records, size_t len, uint8_t *ret_data, size_t data_len, uint64_t *ret_written_ns,
		      uint32_t token_count);
