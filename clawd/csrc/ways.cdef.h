/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ways: how it is to reach the clients of other hosts. clawd-kernel's program has a row for each socket, in an array that
 * is mapped here: a pacer reads it when it releases something, so it knows what the kernel knew at the latest ACK. Where
 * there is no row, somebody tells.
 */
struct claw_core;

enum {
	CLAW_WAY_PROBES = 8, /* how far from its first slot a row may be: as in ebpf/shaper.bpf.c */
	CLAW_WAY_SEGMENTS = 200, /* what loss is told over */
	CLAW_WAY_US_MAX = 600000000, /* no round trip takes longer */
	CLAW_ROWS_MAX = 0x100000,
	CLAW_ROW_BYTES_MAX = 4096,
};

/* Of the array: how many rows, a power of two, of how many bytes, and where in a row its numbers are */
struct claw_rows_layout {
	uint32_t entries, row_bytes;
	uint32_t cookie, updated_ns; /* of 8 bytes */
	uint32_t rtt_us, jitter_us, segments, again; /* of 4 bytes */
};

/* What the kernel says of a connection, smoothed by itself and counted from the connection's start */
struct claw_told {
	uint64_t at_ns; /* when */
	uint32_t rtt_us, jitter_us;
	uint32_t segments, again; /* sent in all, and sent again */
};

/*
 * Map the array. The descriptor may be closed after. 0, -EINVAL for a layout that does not fit in itself or in the object,
 * or what the kernel said.
 */
int claw_rows_map(struct claw_core *core, int fd, const struct claw_rows_layout *layout);
/* There are no rows any more. What is known stays, until somebody tells. */
void claw_rows_unmap(struct claw_core *core);

/* This connection goes to another host; `cookie`: of the socket that carries its tokens, 0 = not known. 0, or -ENOENT. */
int claw_way_open(struct claw_core *core, uint32_t connection, uint64_t cookie);
/*
 * Find its row, and take what that says. Returns how many of a million segments were sent again lately; -ENODATA: it has no
 * row, -ENOENT: no such connection.
 */
int claw_way_look(struct claw_core *core, uint32_t connection, uint64_t now_ns);
/* The same from another source than a row. */
int claw_way_tell(struct claw_core *core, uint32_t connection, const struct claw_told *told, uint64_t now_ns);
