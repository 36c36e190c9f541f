/* SPDX-License-Identifier: Apache-2.0 */
/* What the tracer's programs and those who read their maps share. */
#ifndef CLAW_TRACER_H
#define CLAW_TRACER_H

/* Stages of a write to a tcp client; Python has the same names, in this order */
enum {
	CLAW_STAGE_SOCKET, /* given to the kernel → left the socket for the device's queue */
	CLAW_STAGE_DEVICE, /* → handed to the device's driver */
	CLAW_STAGE_ACKED, /* → acknowledged by the client; since it left the socket, where the driver's part is not seen */
	CLAW_STAGE_NETWORK, /* all three: given to the kernel → acknowledged */
	CLAW_STAGE_RUNQ, /* a thread of clawd was woken, or pre-empted → it ran */
	CLAW_STAGES,
};

/* Of the port: those of the express lane carry what cannot wait, first tokens above all */
enum {
	CLAW_CLASS_REST,
	CLAW_CLASS_FIRST,
	CLAW_CLASSES,
};

/* Each power of two in 16 parts, as hist.cdef.h has it in 32: a bucket is at most 6.25 % wide */
#define CLAW_CUT_BITS 4
#define CLAW_BUCKETS 592 /* up to 2^40 ns; more counts in the last */

/* Writes of a socket that are under way and known at once; more are counted as missed */
#define CLAW_SENDS 32

struct claw_send {
	u64 entered_ns;
	u64 left_ns;
	u64 device_ns; /* 0: not seen */
	u32 end; /* sequence number after its last byte */
	u32 reserved;
};

/* A socket that clawd writes to. Each index has one writer: free-running, modulo CLAW_SENDS. */
struct claw_track {
	u64 cookie; /* addresses of sockets are used again */
	u64 entered_ns; /* of the write that is under way; 0: none */
	u64 last_left_ns;
	u64 last_device_ns;
	u64 last_acked_ns;
	u64 packet; /* name of the one that left last */
	u32 made; /* by the write */
	u32 left; /* by what leaves */
	u32 acked; /* by what comes */
	u32 next; /* sequence number that the next write starts at */
	u32 seen_sent; /* the highest that left */
	u32 seen_device;
	u32 seen_acked;
	u32 flags; /* CLAW_TRACK_… */
	u32 port;
	u32 class;
	struct claw_send sends[CLAW_SENDS];
};

enum {
	CLAW_TRACK_SENT = 1, /* seen_sent is known */
	CLAW_TRACK_ACKED = 2,
	CLAW_TRACK_SYNCED = 4, /* next is known */
};

/* A packet between the socket and the driver */
struct claw_packet {
	u64 name; /* 0: none */
	u64 sk;
	u64 left_ns;
	u32 end; /* sequence number after its last byte */
	u32 reserved;
};

struct claw_taker {
	char comm[16];
};

struct claw_taken {
	u64 waits; /* how often a thread of clawd waited for it */
	u64 wait_ns;
	u64 preempted; /* of these, how often it took the processor from a thread that ran */
};

/* Level of the option that sets a socket's flag: the kernel has none there */
#define CLAW_FLAG_LEVEL 0x7fc1

/* Counters; Python has the same names, in this order */
enum {
	CLAW_WRITES,
	CLAW_SENT_BYTES,
	CLAW_PACKETS,
	CLAW_MISSED, /* writes whose place in the stream was not known, or that were too many under way */
	CLAW_PREEMPTED,
	CLAW_FULL_SOCKETS, /* parts of writes whose socket found no room in the table */
	CLAW_FULL_WAITS, /* waits of threads that found none */
	CLAW_FULL_TAKERS, /* waits and pre-emptions that count, and whose taker found none */
	CLAW_COUNTERS,
};

#endif
