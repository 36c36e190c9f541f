/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times of what clawd wrote to its tcp clients on its way through the kernel, by BPF transmit timestamps (Linux 6.15):
 * the kernel calls at the end of each write, and when its last byte leaves the socket, is at the driver, and is
 * acknowledged, and only for sockets whose flag is set here. A call costs less than a tracepoint of all packets.
 *
 * Three functions and five places are the kernel's own, and no stable ABI. They are taken from its type information,
 * never from headers, and the loader puts the numbers in: where one is missing, nothing of this is loaded.
 */
#include <uapi/linux/bpf.h>

#ifndef CLAW_PID
#error "CLAW_PID: the process whose writes are followed; 0 is all of the control group"
#endif
#ifndef CLAW_AT_SKB
#error "CLAW_AT_SKB, CLAW_AT_HEAD, CLAW_AT_END, CLAW_AT_KEY: bytes; CLAW_INFO: number of struct skb_shared_info"
#endif

#include "tracer.h"
#include "hist.h"

#define CLAW_MAPPED 1024 /* BPF_F_MMAPABLE of linux/bpf.h */
#define CLAW_SOL_SOCKET 1
/* Of linux/bpf.h since Linux 6.15, where they are enumerators, which no #ifndef can see: hence names of our own */
#define CLAW_SK_CB_FLAGS 1009 /* SK_BPF_CB_FLAGS */
#define CLAW_CB_TX_TIMESTAMPING 1 /* SK_BPF_CB_TX_TIMESTAMPING */
#define CLAW_TSTAMP_SCHED 16 /* BPF_SOCK_OPS_TSTAMP_SCHED_CB */
#define CLAW_TSTAMP_SND_SW 17
#define CLAW_TSTAMP_ACK 19
#define CLAW_TSTAMP_SENDMSG 20

/* Calls whose numbers the loader replaces by those of the kernel's functions; Python has the same */
static void *(*kernel_context)(void *ctx) = (void *)0x7fc1a001; /* bpf_cast_to_kern_ctx */
static void *(*as_struct)(u64 address, u32 type) = (void *)0x7fc1a002; /* bpf_rdonly_cast */
static int (*stamp)(void *ctx, u64 flags) = (void *)0x7fc1a003; /* bpf_sock_ops_enable_tx_tstamp */

/* By port, of the lanes: their class. Without a row a port's class is CLAW_CLASS_REST. */
BPF_HASH(lanes, u32, u32, 64);
/* By socket, and with it */
BPF_SK_STORAGE(tracks, struct claw_track);
/* (stage × classes + class) × buckets + bucket. Mapped by the reader. */
BPF_F_TABLE("array", u32, u64, hist, CLAW_STAGES *CLAW_CLASSES *CLAW_BUCKETS, CLAW_MAPPED);
/* stage × classes + class: the longest, in nanoseconds */
BPF_ARRAY(longest, u64, CLAW_STAGES *CLAW_CLASSES);
/* By CLAW_WRITES … CLAW_FULL_TAKERS */
BPF_PERCPU_ARRAY(counters, u64, CLAW_COUNTERS);

static __always_inline void count(u32 which, u64 by)
{
	u64 *value = counters.lookup(&which);

	if (value)
		*value += by;
}

static __always_inline void account(u32 stage, u32 class, u64 from_ns, u64 to_ns)
{
	u64 took_ns = to_ns > from_ns ? to_ns - from_ns : 0;
	u32 place = stage * CLAW_CLASSES + (class & (CLAW_CLASSES - 1));
	u32 at = place * CLAW_BUCKETS + bucket_of(took_ns);
	u64 *value = hist.lookup(&at);
	u64 *most = longest.lookup(&place);

	if (value)
		__sync_fetch_and_add(value, 1);
	if (most && took_ns > *most)
		*most = took_ns;
}

#include "sends.h"

/* The sequence number after the last byte of the write that the packet is stamped for */
static __always_inline u32 end_of(void *context)
{
	void *skb = *(void **)(context + CLAW_AT_SKB);
	void *shared;

	if (!skb)
		return 0;
	shared = as_struct(*(u64 *)(skb + CLAW_AT_HEAD) + *(u32 *)(skb + CLAW_AT_END), CLAW_INFO);
	return *(u32 *)(shared + CLAW_AT_KEY) + 1;
}

/* The write is over but for the push of its last packet, and has the socket for itself still */
static __always_inline void write(struct claw_track *track, void *context, u32 port, u64 now_ns)
{
	struct claw_send *send;
	u32 end, *class;

	if (!track->port) {
		class = lanes.lookup(&port);
		track->class = class ? *class : CLAW_CLASS_REST;
		track->port = port;
	}
	stamp(context, 0);
	end = end_of(context);
	count(CLAW_WRITES, 1);
	/* What the first one took is not known, nor is it of one whose packets had all left by its end */
	if (track->flags & CLAW_TRACK_SYNCED)
		count(CLAW_SENT_BYTES, end - track->next);
	track->flags |= CLAW_TRACK_SYNCED;
	track->next = end;
	if (track->made - track->acked >= CLAW_SENDS) {
		count(CLAW_MISSED, 1);
		return;
	}
	send = &track->sends[track->made % CLAW_SENDS];
	send->entered_ns = now_ns;
	send->end = end;
	send->device_ns = 0;
	track->made++;
}

/* A packet that is sent again is stamped again: of each write the first time counts */
static __always_inline void drive(struct claw_track *track, u32 seq, u64 now_ns)
{
	for (u32 i = 0; i < CLAW_SENDS; i++) {
		struct claw_send *send = &track->sends[(track->acked + i) % CLAW_SENDS];

		if (track->acked + i == track->left || is_after(send->end, seq))
			break;
		if (send->device_ns)
			continue;
		send->device_ns = now_ns;
		account(CLAW_STAGE_DEVICE, track->class, send->left_ns, now_ns);
	}
}

int claw_stamps(struct bpf_sock_ops *ctx)
{
	u32 on = CLAW_CB_TX_TIMESTAMPING, op = ctx->op, port, end;
	struct claw_track *track;
	struct bpf_sock *sk;
	void *context;
	u64 now_ns;

	if (op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		port = ctx->local_port;
		if (lanes.lookup(&port))
			bpf_setsockopt(ctx, CLAW_SOL_SOCKET, CLAW_SK_CB_FLAGS, &on, sizeof(on));
		return 1;
	}
	if (op < CLAW_TSTAMP_SCHED || op > CLAW_TSTAMP_SENDMSG)
		return 1;
	now_ns = bpf_ktime_get_ns();
	sk = ctx->sk;
	if (!sk)
		return 1;
	if (op == CLAW_TSTAMP_SENDMSG) {
		if (CLAW_PID && bpf_get_current_pid_tgid() >> 32 != CLAW_PID)
			return 1;
		track = tracks.sk_storage_get(sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
		if (track)
			write(track, kernel_context(ctx), ctx->local_port, now_ns);
		else
			count(CLAW_MISSED, 1); /* the kernel had no memory for it */
		return 1;
	}
	track = tracks.sk_storage_get(sk, 0, 0);
	if (!track)
		return 1;
	context = kernel_context(ctx);
	end = end_of(context);
	if (op == CLAW_TSTAMP_SCHED) {
		count(CLAW_PACKETS, 1);
		leave(track, end, now_ns);
	} else if (op == CLAW_TSTAMP_SND_SW) {
		drive(track, end, now_ns);
	} else if (op == CLAW_TSTAMP_ACK) {
		acknowledge(track, end, now_ns);
	}
	return 1;
}

/* Attached for a moment: the flag of a socket that was there before is set by an option that the kernel has not */
int claw_flag(struct bpf_sockopt *ctx)
{
	u32 flags = ctx->optname;

	if (ctx->level != CLAW_FLAG_LEVEL || flags > CLAW_CB_TX_TIMESTAMPING)
		return 1;
	ctx->optlen = -1; /* the kernel shall not look at it */
	bpf_setsockopt(ctx->sk, CLAW_SOL_SOCKET, CLAW_SK_CB_FLAGS, &flags, sizeof(flags));
	return 1;
}
