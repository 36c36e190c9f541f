/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times of what clawd wrote to its tcp clients on its way through the kernel, and of its threads on theirs to a processor.
 *
 * A write is followed by its last byte's sequence number: from tcp's sendmsg, to the packet that carries it out of the
 * socket, to the driver, to the acknowledgement. Of a socket that was there before, writes are known from the first
 * moment on in which all that was sent is acknowledged. Where a packet is cut into more, or copied, only behind the
 * socket (software segmentation), the driver's part is not seen.
 */
#include <uapi/linux/bpf.h>

#ifndef CLAW_PID
#error "CLAW_PID: the process whose writes are followed; 0 is all of the control group"
#endif

#include "tracer.h"
#include "hist.h"

#define CLAW_MAPPED 1024 /* BPF_F_MMAPABLE of linux/bpf.h */
#define CLAW_TCP 6 /* IPPROTO_TCP */
#define CLAW_CLOSE 7 /* TCP_CLOSE of linux/tcp_states.h, told by a tracepoint to everyone */
#define CLAW_PACKETS_MAX 4096
#ifndef CLAW_SOCKETS_MAX
#define CLAW_SOCKETS_MAX 4096
#endif
#ifndef CLAW_THREADS_MAX
#define CLAW_THREADS_MAX 1024
#endif
#ifndef CLAW_WAITS_MAX
#define CLAW_WAITS_MAX CLAW_THREADS_MAX
#endif
#ifndef CLAW_TAKERS_MAX
#define CLAW_TAKERS_MAX 1024
#endif

/* By port, of the lanes: their class. Without a row a port's class is CLAW_CLASS_REST. */
BPF_HASH(lanes, u32, u32, 64);
/* By the socket's address, which is a name here; until it is closed. What finds it full is counted: a table that made
 * room by itself would take that of a socket in use, whose writes then seem to have been acknowledged never.
 */
BPF_HASH(tracks, u64, struct claw_track, CLAW_SOCKETS_MAX);
/* One, of zeros: a track is too large for the stack */
BPF_ARRAY(blank, struct claw_track, 1);
/* By some bits of the packet's address, which is a name here and never followed. Where two meet, the later one stays:
 * each packet of the host is looked up here, and in an array that is next to nothing.
 */
BPF_ARRAY(packets, struct claw_packet, CLAW_PACKETS_MAX);
/* (stage × classes + class) × buckets + bucket. Mapped by the reader. */
BPF_F_TABLE("array", u32, u64, hist, CLAW_STAGES *CLAW_CLASSES *CLAW_BUCKETS, CLAW_MAPPED);
/* stage × classes + class: the longest, in nanoseconds */
BPF_ARRAY(longest, u64, CLAW_STAGES *CLAW_CLASSES);
/* By thread id: clawd's threads, put in by the reader */
BPF_HASH(threads, u32, u32, CLAW_THREADS_MAX);
/* By thread id: since when it waits for a processor */
BPF_HASH(waiting, u32, u64, CLAW_WAITS_MAX);
/* By name: who had the processor meanwhile */
BPF_HASH(takers, struct claw_taker, struct claw_taken, CLAW_TAKERS_MAX);
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

static __always_inline struct claw_track *track_of(u64 sk)
{
	struct claw_track *track = tracks.lookup(&sk);
	struct claw_track *zeros;
	u32 first = 0;

	if (track)
		return track;
	zeros = blank.lookup(&first);
	if (!zeros)
		return 0;
	if (tracks.update(&sk, zeros)) {
		count(CLAW_FULL_SOCKETS, 1);
		return 0;
	}
	return tracks.lookup(&sk);
}

/* What of a packet's headers is needed; from its IP header on */
struct parsed {
	u32 seq; /* after its last byte */
	u32 ack;
	u32 payload;
	u32 source;
	u32 target;
};

static __always_inline int parse(struct __sk_buff *skb, struct parsed *ret)
{
	u8 ip[40];
	u8 tcp[14];
	u32 at;

	if (bpf_skb_load_bytes(skb, 0, ip, 20) != 0)
		return 0;
	if (ip[0] >> 4 == 4) {
		if (ip[9] != CLAW_TCP)
			return 0;
		at = (ip[0] & 15) * 4;
	} else {
		if (ip[6] != CLAW_TCP)
			return 0;
		at = 40;
	}
	if (bpf_skb_load_bytes(skb, at, tcp, sizeof(tcp)) != 0)
		return 0;
	ret->source = tcp[0] << 8 | tcp[1];
	ret->target = tcp[2] << 8 | tcp[3];
	ret->payload = skb->len - at - (tcp[12] >> 4) * 4;
	ret->seq = ((u32)tcp[4] << 24 | tcp[5] << 16 | tcp[6] << 8 | tcp[7]) + ret->payload;
	ret->ack = (u32)tcp[8] << 24 | tcp[9] << 16 | tcp[10] << 8 | tcp[11];
	return 1;
}

static __always_inline int is_followed(void)
{
	return !CLAW_PID || bpf_get_current_pid_tgid() >> 32 == CLAW_PID;
}

/* A write has the socket for itself. Called for each of its parts: the first counts. */
static __always_inline int begin_write(u64 sk)
{
	struct claw_track *track = is_followed() ? track_of(sk) : 0;

	if (!track || track->entered_ns)
		return 0;
	if (!(track->flags & CLAW_TRACK_SYNCED) && track->flags & CLAW_TRACK_SENT && track->flags & CLAW_TRACK_ACKED &&
	    track->seen_sent == track->seen_acked) {
		track->next = track->seen_sent;
		track->flags |= CLAW_TRACK_SYNCED;
	}
	track->entered_ns = bpf_ktime_get_ns();
	return 0;
}

/*
 * How much it wrote is known only here, when packets of it may have left, and been acknowledged, already: then at the
 * time of the last of them.
 */
static __always_inline int end_write(u64 sk, int sent)
{
	struct claw_track *track = is_followed() ? tracks.lookup(&sk) : 0;
	struct claw_send *send;

	if (!track || !track->entered_ns)
		return 0;
	if (sent <= 0 && !track->flags) {
		tracks.delete(&sk); /* it may have been closed before, and will not be again */
		return 0;
	}
	if (sent > 0) {
		count(CLAW_WRITES, 1);
		count(CLAW_SENT_BYTES, sent);
		if (!(track->flags & CLAW_TRACK_SYNCED)) {
			count(CLAW_MISSED, 1);
		} else if (track->made - track->acked >= CLAW_SENDS) {
			count(CLAW_MISSED, 1);
			track->next += sent;
		} else {
			send = &track->sends[track->made % CLAW_SENDS];
			send->entered_ns = track->entered_ns;
			send->end = track->next += sent;
			send->device_ns = 0;
			track->made++;
			leave(track, track->seen_sent, track->last_left_ns);
			if (track->last_device_ns >= send->entered_ns && !is_after(send->end, track->seen_device))
				send->device_ns = track->last_device_ns;
			acknowledge(track, track->seen_acked, track->last_acked_ns);
		}
	}
	track->entered_ns = 0;
	return 0;
}

/* tcp_sendmsg_locked(sk, msg, skb, size_goal), since 6.15; sock_send_length(sk, sent, flags), since 6.3 */
int claw_begins(struct bpf_raw_tracepoint_args *ctx)
{
	return begin_write(ctx->args[0]);
}

int claw_ends(struct bpf_raw_tracepoint_args *ctx)
{
	return end_write(ctx->args[0], (int)ctx->args[1]);
}

/* bcc takes the function from the name, and since it has this macro the kernel module before it */
#ifdef MODULE_KFUNC_PROBE
#define ENTRY(function) kfunc__vmlinux__##function
#define EXIT(function) kretfunc__vmlinux__##function
#else
#define ENTRY(function) kfunc__##function
#define EXIT(function) kretfunc__##function
#endif

/* Where there is no such tracepoint: tcp_sendmsg(sk, msg, size) itself, whose result follows its arguments */
int ENTRY(tcp_sendmsg)(u64 *ctx)
{
	return begin_write(ctx[0]);
}

int EXIT(tcp_sendmsg)(u64 *ctx)
{
	return end_write(ctx[0], (int)ctx[3]);
}

/* inet_sock_set_state(sk, before, after) */
int claw_closed(struct bpf_raw_tracepoint_args *ctx)
{
	u64 sk = ctx->args[0];

	if ((int)ctx->args[2] == CLAW_CLOSE)
		tracks.delete(&sk);
	return 0;
}

static __always_inline struct claw_track *tracked(struct __sk_buff *skb, struct parsed *ret)
{
	u64 sk = (u64)skb->sk;
	struct claw_track *track = sk ? tracks.lookup(&sk) : 0;
	u64 cookie;

	if (!track || !parse(skb, ret))
		return 0;
	cookie = bpf_get_socket_cookie(skb);
	if (track->cookie != cookie && track->cookie) {
		tracks.delete(&sk); /* it was another socket's */
		return 0;
	}
	track->cookie = cookie;
	return track;
}

/* Packets are 256 bytes apart and more */
static __always_inline u32 place_of(u64 packet)
{
	return (packet >> 8 ^ packet >> 20) & (CLAW_PACKETS_MAX - 1);
}

int claw_egress(struct __sk_buff *skb)
{
	struct parsed found = {};
	struct claw_track *track = tracked(skb, &found);
	struct claw_packet *packet;
	u64 name, now_ns;
	u32 at, *class;

	if (!track)
		return 1;
	if (!track->port) {
		track->port = found.source;
		class = lanes.lookup(&found.source);
		track->class = class ? *class : CLAW_CLASS_REST;
	}
	now_ns = bpf_ktime_get_ns();
	if (!(track->flags & CLAW_TRACK_SENT) || is_after(found.seq, track->seen_sent)) {
		track->seen_sent = found.seq;
		track->last_left_ns = now_ns;
	}
	track->flags |= CLAW_TRACK_SENT;
	if (!found.payload)
		return 1;
	count(CLAW_PACKETS, 1);
	leave(track, found.seq, now_ns);
	/* The verifier lets nobody calculate with what it knows to be a pointer: what comes out of a map is a number */
	*(volatile u64 *)&track->packet = (u64)skb;
	name = *(volatile u64 *)&track->packet;
	at = place_of(name);
	packet = packets.lookup(&at);
	if (packet) {
		packet->sk = (u64)skb->sk;
		packet->left_ns = now_ns;
		packet->end = found.seq;
		packet->name = name; /* last: what is read by it is whole */
	}
	return 1;
}

int claw_ingress(struct __sk_buff *skb)
{
	struct parsed found = {};
	struct claw_track *track = tracked(skb, &found);

	if (!track)
		return 1;
	track->seen_acked = found.ack;
	track->last_acked_ns = bpf_ktime_get_ns();
	track->flags |= CLAW_TRACK_ACKED;
	acknowledge(track, found.ack, track->last_acked_ns);
	return 1;
}

/* Writes that are known already; those that are not yet take the last time from the track */
static __always_inline void drive(struct claw_track *track, u32 seq, u64 now_ns)
{
	track->seen_device = seq;
	track->last_device_ns = now_ns;
	for (u32 i = 0; i < CLAW_SENDS; i++) {
		struct claw_send *send = &track->sends[(track->acked + i) % CLAW_SENDS];

		if (track->acked + i == track->left || is_after(send->end, seq))
			break;
		if (!send->device_ns)
			send->device_ns = now_ns;
	}
}

/* net_dev_xmit(skb, rc, dev, len) */
int claw_driven(struct bpf_raw_tracepoint_args *ctx)
{
	u64 name = ctx->args[0], sk, now_ns;
	u32 at = place_of(name);
	struct claw_packet *packet = packets.lookup(&at);
	struct claw_track *track;

	if (!packet || packet->name != name || (int)ctx->args[1] != 0) /* the driver will be given it again */
		return 0;
	now_ns = bpf_ktime_get_ns();
	sk = packet->sk;
	track = tracks.lookup(&sk);
	if (track) {
		account(CLAW_STAGE_DEVICE, track->class, packet->left_ns, now_ns);
		drive(track, packet->end, now_ns);
	}
	packet->name = 0;
	return 0;
}

static __always_inline void wait_from(u32 thread)
{
	u64 now_ns = bpf_ktime_get_ns();

	if (threads.lookup(&thread) && waiting.update(&thread, &now_ns))
		count(CLAW_FULL_WAITS, 1);
}

int claw_woken(struct tracepoint__sched__sched_wakeup *args)
{
	wait_from(args->pid);
	return 0;
}

static __always_inline struct claw_taken *taken_by(const char *comm)
{
	struct claw_taker taker = {};
	struct claw_taken nothing = {};
	struct claw_taken *found;

	__builtin_memcpy(taker.comm, comm, sizeof(taker.comm));
	found = takers.lookup_or_try_init(&taker, &nothing);
	if (!found)
		count(CLAW_FULL_TAKERS, 1);
	return found;
}

int claw_switched(struct tracepoint__sched__sched_switch *args)
{
	u32 before = args->prev_pid, after = args->next_pid;
	u64 *since = waiting.lookup(&after);
	struct claw_taken *taken;
	char comm[16];

	if (since) {
		u64 now_ns = bpf_ktime_get_ns();
		u64 wait_ns = now_ns - *since;

		account(CLAW_STAGE_RUNQ, CLAW_CLASS_REST, *since, now_ns);
		waiting.delete(&after);
		if (before) { /* not the idle task, which keeps nobody waiting */
			__builtin_memcpy(comm, args->prev_comm, sizeof(comm));
			taken = taken_by(comm);
			if (taken) {
				__sync_fetch_and_add(&taken->waits, 1);
				__sync_fetch_and_add(&taken->wait_ns, wait_ns);
			}
		}
	}
	/* It would have gone on. Above the states of a task is a bit for one that lost the processor within the kernel. */
	if (!(args->prev_state & 0xff) && threads.lookup(&before)) {
		count(CLAW_PREEMPTED, 1);
		__builtin_memcpy(comm, args->next_comm, sizeof(comm));
		taken = taken_by(comm);
		if (taken)
			__sync_fetch_and_add(&taken->preempted, 1);
		wait_from(before);
	}
	return 0;
}
