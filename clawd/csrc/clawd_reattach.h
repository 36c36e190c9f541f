/* SPDX-License-Identifier: Apache-2.0 */
/* Going on with a clawd that was started anew. A part of clawd_ring.h, which includes it; not for use alone. */
#ifndef CLAWD_REATTACH_H
#define CLAWD_REATTACH_H

/* What a producer says to a clawd that started meanwhile: it has this ring */
static inline int claw_hello_again(const struct claw_producer *p, struct claw_hello *ret_hello)
{
	int result = claw_check_open(p);

	if (result < 0)
		return result;
	memset(ret_hello, 0, sizeof(*ret_hello));
	ret_hello->magic = CLAW_MAGIC;
	ret_hello->layout = CLAW_LAYOUT;
	ret_hello->size = sizeof(*ret_hello);
	ret_hello->ring_bytes = p->ring_bytes;
	ret_hello->ring_id = p->ring_id;
	memcpy(ret_hello->name, p->name, sizeof(ret_hello->name));
	return 0;
}

static inline int claw_is_ours(const struct claw_producer *p, const struct claw_attached *answer)
{
	return answer->size == sizeof(*answer) && !answer->incompatible && answer->ring_id == p->ring_id &&
	       answer->ring_bytes == p->ring_bytes && answer->record_max == p->record_max;
}

/* Put the new descriptors where the old ones are. Whoever uses those at this moment has the one or the other */
static inline int claw_swap(struct claw_producer *p, int event_fd, int control_fd)
{
	const uint64_t one = 1;

	if (dup3(event_fd, p->event_fd, O_CLOEXEC) < 0 || dup3(control_fd, p->control_fd, O_CLOEXEC) < 0)
		return -errno;
	/* Once, whatever need_wake says: a write beside us may have signalled the old eventfd, where nobody hears it, for a
	   sleep that the new clawd goes on with. It cannot fail: a new eventfd is far from full. */
	return write(p->event_fd, &one, sizeof(one)) == (ssize_t)sizeof(one) ? 0 : -errno;
}

/*
 * What claw_dial() with claw_hello_again() brought: `fd` and `count` descriptors, all owned by this call; or fd is its error.
 * Results as claw_reattach().
 */
static inline int claw_take_over(struct claw_producer *p, int fd, const struct claw_attached *answer, const int *fds,
				 int count)
{
	int result = claw_check_open(p);
	int i;

	if (fd < 0) {
		if (result < 0 || fd != -EACCES)
			return result < 0 ? result : fd;
		switch (answer->status) {
		case CLAW_ATTACH_OK: /* the socket's permissions, which may be on their way */
			return fd;
		case CLAW_ATTACH_LAYOUT:
		case CLAW_ATTACH_DENIED:
		case CLAW_ATTACH_BAD_REQUEST:
		case CLAW_ATTACH_LOST:
			claw_store_relaxed(&p->is_gone, 1u);
			return -ESHUTDOWN;
		default: /* about to stop, or no room now */
			return -EAGAIN;
		}
	}
	if (!result)
		result = count == 1 && claw_is_ours(p, answer) ? claw_swap(p, fds[0], fd) : -EPROTO;
	if (!result)
		p->daemon_epoch = answer->daemon_epoch;
	for (i = 0; i < count; i++)
		close(fds[i]);
	close(fd);
	return result;
}

/*
 * Once claw_poll_fd() is readable: one try to go on with the clawd that now serves runtime_dir, streams and all. Until it
 * succeeds the ring takes writes, then the overflow. It waits at most CLAW_ATTACH_SECONDS for each answer, so an engine that
 * must not wait calls it in a thread: it may run beside the calls of another one but claw_set_overflow(), claw_stop() and
 * claw_detach(). Besides the descriptors, which the kernel swaps, it touches nothing they change.
 *
 *	if (poll(&(struct pollfd){ claw_poll_fd(p), POLLIN, 0 }, 1, -1) == 1)
 *		while ((r = claw_reattach(p, "/run/clawd", &answer)) < 0 && r != -ESHUTDOWN)
 *			usleep(pause_us < 500000 ? pause_us *= 2 : pause_us);
 *
 * 0: attached. The number of claw_poll_fd() is the same; who has it in an epoll adds it again. -ESHUTDOWN: that clawd does
 * not have this ring or clawd let go of it, the text in ret_answer says why, if there is one; now all calls return it.
 * -ENOTCONN, -ECHILD: as all calls. Any other: there is no clawd now, it has no room, or what answers is none; try again.
 */
static inline int claw_reattach(struct claw_producer *p, const char *runtime_dir, struct claw_attached *ret_answer)
{
	struct claw_hello hello;
	int fds[1] = { -1 };
	int count = 0;
	int fd, result;

	memset(ret_answer, 0, sizeof(*ret_answer));
	result = claw_hello_again(p, &hello);
	if (result < 0)
		return result;
	if (p->control_fd < 0) /* made by claw_map() without a connection */
		return -ENOTCONN;
	fd = claw_dial(runtime_dir, &hello, ret_answer, fds, 1, &count);
	return claw_take_over(p, fd, ret_answer, fds, count);
}

#endif
