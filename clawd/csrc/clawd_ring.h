/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clawd_ring.h: write tokens to clawd from an inference engine. One file; needs libc only; C11, C++17 and later; Linux.
 *
 *	static struct claw_producer producer;
 *	struct claw_attached answer;
 *	struct claw_stream stream = { 0, 0, 0 };
 *	const uint64_t patience_ns = 5000000000u;
 *	const char *reason;
 *	int r = claw_attach(&producer, "/run/clawd", "llama-0", 0, &answer);
 *
 *	if (r < 0)
 *		errx(1, "cannot attach: %s", answer.status ? answer.text : claw_result_text(r));
 *	r = claw_open_stream(&producer, "chatcmpl-1", 10, NULL, 0, 0, &stream);
 *	while (r >= 0 && !claw_stopped(&producer, stream) && next_token(&text, &len)) {
 *		while ((r = claw_write(&producer, stream, text, len, 0, 1)) == -EAGAIN) {
 *			r = claw_wait_room(&producer, claw_text_bytes(&producer, text, len), patience_ns);
 *			if (r < 0)
 *				break;
 *		}
 *	}
 *	reason = r >= 0 || r == -ECANCELED ? "stop" : "error:token lost";
 *	claw_close_stream(&producer, stream, reason, strlen(reason));
 *	while (claw_flush(&producer) > 0 && !claw_wait_room(&producer, CLAW_RECORD_MAX, patience_ns))
 *		;
 *	claw_detach(&producer);
 *
 * A life: claw_attach() once a process; for each answer claw_open_stream(), for each engine step one claw_write_many()
 * (or claw_write() a token), claw_close_stream(); claw_detach(). A claw_producer starts zeroed (static, calloc(), in C++
 * also `new claw_producer()`); it is 58 KB, so not on the stack, and it must not be copied. A claw_stream is a value to
 * copy at will, a zeroed one nobody's.
 *
 * A full ring: a record is *accepted* when a call took it, *in the ring* once clawd can see it, *committed* when clawd has
 * it. What is in the ring outlives this process and clawd; what finds no room there waits in this process, in the overflow
 * (claw_set_overflow(), 16 MiB unless told, no memory until needed). Every later call first moves on what fits, claw_flush()
 * does nothing else: call it once a step while claw_look_backlog() shows something, and before claw_detach() until it
 * returns 0, as above. Order is kept. -EAGAIN: the overflow is full too. Wait and try again, or give the text up and say so
 * with claw_lose(): then its readers are told what is missing.
 *
 * Results: 0 or a count; -errno on failure, and then nothing was written. claw_result_text() has words for them. No call
 * blocks but claw_attach(), claw_reattach() and claw_wait_room(); none allocates but the overflow, prints, raises a signal or
 * exits. Common to all:
 *	-ENOTCONN	not attached, or claw_stop() was called
 *	-ECHILD		this process is a fork of the one that attached; attach a producer of its own
 *	-ESHUTDOWN	clawd has let go of the ring (claw_state() says how); detach, attach anew, open the streams anew
 *	-EPROTO		clawd's words make no sense
 *	-EBADF		the stream is closed, or of another producer
 *	-EAGAIN		neither ring nor overflow has room now: claw_wait_room(), or try again with the next step, or
 *			claw_lose()
 *	-ECANCELED	the stream was stopped: claw_stopped() says why; close it
 *	-EINVAL		an argument is out of its range
 *	-EMSGSIZE	it would not fit an empty ring, nor an empty overflow (OPEN: one record)
 *
 * An event loop: clawd signals no producer, all it says is in memory. Once a step look at claw_stopped() of each stream
 * (one load) and, if the engine can follow them, at claw_hints(). claw_poll_fd() is a descriptor for poll() or epoll that
 * becomes readable when clawd is gone or has let go of the ring; nothing is ever to be read from it. A clawd that is gone
 * leaves the ring as it is: writes go on, and claw_reattach() finds the next clawd.
 *
 * Threads: one at a time for each claw_producer; the caller locks. Only claw_wait_room(), claw_state(), claw_stopped(),
 * claw_hints(), claw_reattach() and claw_stop() may run beside another call; claw_detach() runs alone.
 *
 * Fork: neither the mappings nor the overflow are inherited, a child's calls return -ECHILD and touch nothing of its
 * parent's. A child that wants to write attaches with a second, zeroed claw_producer.
 *
 * Warnings: none under -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -pedantic, in C and C++. A build with
 * -Wold-style-cast includes it with -isystem.
 */
#ifndef CLAWD_RING_H
#define CLAWD_RING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* glibc decides with its first header what it shows; MAP_ANONYMOUS alone it shows in any case since 2.41 */
#if !defined(MAP_ANONYMOUS) || (defined(__GLIBC__) && !defined(__USE_GNU))
#error "compile with -D_GNU_SOURCE, or include clawd_ring.h before any header of libc"
#endif
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18 /* Linux 4.14; older headers lack it */
#endif

#include "barrier.h"
#ifndef CLAW_RING_H /* ring.h of the core has it already */
#define CLAW_RING_H
#include "ring.cdef.h"
#endif

enum {
	CLAW_ATTACH_SECONDS = 5, /* how long claw_attach() waits for an answer */
	CLAW_ROOM_LOOK_NS = 100000, /* between two looks at ack_pos: clawd signals no producer */
	CLAW_ROOM_LOOK_NS_MAX = 5000000, /* once it has been long */
	CLAW_HINT_TRIES = 16,
	CLAW_FDS_MAX = 8, /* descriptors looked at in an answer; it has 3 */
	CLAW_OVERFLOW_BYTES = 0x1000000, /* 16 MiB: unless claw_set_overflow() was called */
	CLAW_OVERFLOW_BYTES_MAX = 0x40000000, /* 1 GiB */
	CLAW_MOVE_BYTES = 131072, /* from the overflow into the ring in one call: tens of microseconds */
};

#define CLAW_LOST_REASON "ring_full" /* of the GAP for what was given up */

/* the word on the guard page, which the kernel zeroes in a forked child */
enum {
	CLAW_GUARD_FORKED = 0,
	CLAW_GUARD_LIVE = 1,
	CLAW_GUARD_STOPPED = 2,
};

/* An open stream: a value to keep and hand back */
struct claw_stream {
	uint64_t open_seq; /* ring_seq of its OPEN */
	uint32_t owner; /* claw_producer.owner */
	uint32_t handle;
};

/* What clawd would like the engine to do: all 0 = nothing */
struct claw_hint {
	uint32_t target_rate; /* tokens per 1,000 s a stream should make; 0 = no wish */
	uint32_t degrade; /* 0 none … 3 most: make answers cheaper, as the engine can */
	uint32_t reason; /* a number for the log; 0 = none given */
};

/* All private. Zero it before the first claw_attach() */
struct claw_producer {
	uint32_t *guard; /* NULL = not attached */
	const struct claw_ctl *ctl;
	struct claw_data *data;
	uint8_t *ring; /* the ring bytes, then the same bytes again */
	uint64_t ring_bytes;
	uint64_t head; /* where the next record starts */
	uint64_t ring_seq; /* of the next record */
	uint64_t ack_pos; /* as last read */
	uint64_t signalled; /* the need_wake generation that was signalled last */
	uint64_t ring_id;
	uint64_t daemon_epoch;
	uint8_t *overflow; /* NULL = not needed so far */
	uint64_t overflow_bytes;
	uint64_t capacity; /* the larger of ring and overflow: what fits at once */
	uint64_t tail; /* end of the overflow, which begins at head */
	uint32_t overflow_count; /* records in it */
	uint32_t lost_streams; /* with something in lost[] */
	uint32_t is_gone; /* a clawd that started meanwhile does not have this ring */
	uint32_t record_max;
	uint32_t owner; /* marks this producer's streams: odd, so that a zeroed stream is nobody's */
	int event_fd;
	int control_fd;
	pid_t pid; /* where the kernel cannot wipe the guard page; else 0 */
	uint32_t free_count;
	uint16_t free_handles[CLAW_HANDLE_COUNT]; /* a stack */
	uint64_t open_seq[CLAW_HANDLE_COUNT]; /* 0 = handle not in use */
	uint32_t lost[CLAW_HANDLE_COUNT]; /* records given up since the stream's last one */
	char name[CLAW_PRODUCER_NAME];
};

/* Words for a result of these calls, where strerror() would speak of children and endpoints */
static inline const char *claw_result_text(int result)
{
	switch (result) {
	case -ENOTCONN:
		return "the producer is not attached";
	case -ECHILD:
		return "the producer belongs to the parent of this process";
	case -ESHUTDOWN:
		return "clawd has let go of the ring";
	case -EPROTO:
		return "clawd's words make no sense here";
	case -EBADF:
		return "the stream is closed, or of another producer";
	case -EAGAIN:
		return "the ring is full, and so is the overflow";
	case -ECANCELED:
		return "the stream was stopped";
	case -EMSGSIZE:
		return "it fits neither the ring nor the overflow";
	case -EMFILE:
		return "too many streams or files are open";
	case -EISCONN:
		return "the producer is attached already";
	case -EACCES:
		return "clawd refused the producer, or its socket's permissions do";
	case -ENOENT:
	case -ECONNREFUSED:
		return "no clawd serves this directory";
	case -ECONNRESET:
		return "clawd ended the connection";
	case -ETIMEDOUT:
		return "clawd did not answer in time";
	default:
		return result < 0 ? strerror(-result) : "done";
	}
}

/* One word for what claw_stopped() returned */
static inline const char *claw_stopped_text(int stopped)
{
	switch (stopped) {
	case CLAW_STOPPED_NOT:
		return "open";
	case CLAW_STOPPED_CANCELLED:
		return "cancelled";
	case CLAW_STOPPED_EXISTS:
		return "exists";
	case CLAW_STOPPED_LIMIT:
		return "limit";
	case CLAW_STOPPED_NO_SPACE:
		return "no_space";
	case CLAW_STOPPED_DRAINING:
		return "stopping";
	default:
		return stopped < 0 ? claw_result_text(stopped) : "stopped";
	}
}

/* CLOCK_MONOTONIC, as in requested_ns and written_ns */
static inline uint64_t claw_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline int claw_check(const struct claw_producer *p)
{
	uint32_t guard;

	if (!p->guard)
		return -ENOTCONN;
	guard = claw_load_relaxed(p->guard);
	if (guard == CLAW_GUARD_LIVE)
		return !p->pid || p->pid == getpid() ? 0 : -ECHILD;
	return guard == CLAW_GUARD_FORKED ? -ECHILD : -ENOTCONN;
}

static inline int claw_check_open(const struct claw_producer *p)
{
	int result = claw_check(p);

	if (result < 0)
		return result;
	/* one branch for both */
	return !((claw_load_relaxed(&p->ctl->state) ^ CLAW_STATE_OPEN) | claw_load_relaxed(&p->is_gone)) ? 0 : -ESHUTDOWN;
}

static inline int claw_is_open(const struct claw_producer *p, struct claw_stream stream)
{
	return stream.owner == p->owner && stream.handle < CLAW_HANDLE_COUNT && stream.open_seq &&
	       p->open_seq[stream.handle] == stream.open_seq;
}

static inline int claw_is_stopped(const struct claw_producer *p, struct claw_stream stream)
{
	uint64_t stopped = claw_load_relaxed(&p->ctl->stopped[stream.handle]);

	return stopped >> 8 == stream.open_seq ? (int)(stopped & 0xff) : CLAW_STOPPED_NOT;
}

/*
 * Why this stream was stopped: CLAW_STOPPED_CANCELLED by a reader, another CLAW_STOPPED_… because clawd refused to open
 * it; 0 = it was not. One load. Answers for a closed stream too, until its handle serves another one.
 */
static inline int claw_stopped(const struct claw_producer *p, struct claw_stream stream)
{
	int result = claw_check(p);

	if (result < 0)
		return result;
	if (stream.owner != p->owner || stream.handle >= CLAW_HANDLE_COUNT || !stream.open_seq)
		return -EBADF;
	return claw_is_stopped(p, stream);
}

/* How clawd stands to the ring: CLAW_STATE_… */
static inline int claw_state(const struct claw_producer *p)
{
	int result = claw_check(p);

	if (result < 0)
		return result;
	return claw_load_relaxed(&p->is_gone) ? CLAW_STATE_CLOSED : (int)claw_load_relaxed(&p->ctl->state);
}

/* What clawd would like the engine to do, read whole. -EAGAIN: it kept changing under our eyes; keep the last one */
static inline int claw_hints(const struct claw_producer *p, struct claw_hint *ret_hint)
{
	const struct claw_ctl *ctl = p->ctl;
	struct claw_hint hint;
	int i;
	int result = claw_check(p);

	for (i = 0; !result && i < CLAW_HINT_TRIES; i++) {
		/* Pairs with clawd's fence after making hint_seq odd and its release store of the even one. The three are
		   acquire loads to keep the second look at hint_seq behind them. */
		uint32_t seq = claw_load_acquire(&ctl->hint_seq);

		hint.target_rate = claw_load_acquire(&ctl->target_rate);
		hint.degrade = claw_load_acquire(&ctl->degrade);
		hint.reason = claw_load_acquire(&ctl->hint_reason);
		if (!(seq & 1) && claw_load_relaxed(&ctl->hint_seq) == seq) {
			*ret_hint = hint;
			return 0;
		}
	}
	return result < 0 ? result : -EAGAIN;
}

/*
 * A descriptor for poll() or epoll: readable (POLLIN, POLLHUP) once clawd is gone or has let go of the ring, which
 * claw_state() tells apart. Not to be read, written or closed; another one after each claw_attach().
 */
static inline int claw_poll_fd(const struct claw_producer *p)
{
	int result = claw_check(p);

	if (result < 0)
		return result;
	return p->control_fd >= 0 ? p->control_fd : -ENOTCONN;
}

#include "clawd_room.h"
#include "clawd_write.h"
#include "clawd_attach.h"
#include "clawd_reattach.h"

#endif
