/* SPDX-License-Identifier: Apache-2.0 */
/* Getting and giving back a ring. A part of clawd_ring.h, which includes it; not for use alone. */
#ifndef CLAWD_ATTACH_H
#define CLAWD_ATTACH_H

static inline uint32_t claw_record_max(uint64_t ring_bytes)
{
	return ring_bytes / 4 < CLAW_RECORD_MAX ? (uint32_t)(ring_bytes / 4) : (uint32_t)CLAW_RECORD_MAX;
}

static inline int claw_is_ring_size(uint64_t bytes)
{
	return bytes >= CLAW_RING_BYTES_MIN && bytes <= CLAW_RING_BYTES_MAX && !(bytes & (bytes - 1));
}

static inline int claw_is_at_least(int fd, uint64_t bytes)
{
	struct stat status;

	return !fstat(fd, &status) && status.st_size >= 0 && (uint64_t)status.st_size >= bytes;
}

/* A page that the kernel zeroes in a forked child: the fork check costs one load */
static inline int claw_map_guard(struct claw_producer *p)
{
	void *guard = mmap(NULL, CLAW_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (guard == MAP_FAILED)
		return -errno;
	p->pid = madvise(guard, CLAW_PAGE, MADV_WIPEONFORK) ? getpid() : 0;
	p->guard = (uint32_t *)guard;
	claw_store_relaxed(p->guard, (uint32_t)CLAW_GUARD_LIVE);
	return 0;
}

/* DATA: its page, the ring, and the ring again right behind. Not inherited by a child, whose death must not be ours */
static inline int claw_map_data(struct claw_producer *p, int data_fd, uint64_t ring_bytes)
{
	size_t once = CLAW_PAGE + (size_t)ring_bytes;
	size_t whole = once + (size_t)ring_bytes;
	int flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
	uint8_t *base;
	int result;
	/* reserved first, so that nobody else's mapping can come between the two */
	void *reserved = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (reserved == MAP_FAILED)
		return -errno;
	base = (uint8_t *)reserved;
	if (mmap(base, once, PROT_READ | PROT_WRITE, flags, data_fd, 0) == MAP_FAILED ||
	    mmap(base + once, (size_t)ring_bytes, PROT_READ | PROT_WRITE, flags, data_fd, CLAW_PAGE) == MAP_FAILED ||
	    madvise(base, whole, MADV_DONTFORK)) {
		result = -errno;
		munmap(reserved, whole);
		return result;
	}
	p->data = (struct claw_data *)reserved;
	p->ring = base + CLAW_PAGE;
	p->ring_bytes = ring_bytes;
	return 0;
}

static inline int claw_map_ctl(struct claw_producer *p, int ctl_fd)
{
	void *ctl = mmap(NULL, sizeof(struct claw_ctl), PROT_READ, MAP_SHARED | MAP_POPULATE, ctl_fd, 0);
	int result;

	if (ctl == MAP_FAILED)
		return -errno;
	if (madvise(ctl, sizeof(struct claw_ctl), MADV_DONTFORK)) {
		result = -errno;
		munmap(ctl, sizeof(struct claw_ctl));
		return result;
	}
	p->ctl = (const struct claw_ctl *)ctl;
	return 0;
}

static inline void claw_unmap(struct claw_producer *p)
{
	claw_unmap_overflow(p);
	if (p->data)
		munmap(p->data, CLAW_PAGE + 2 * (size_t)p->ring_bytes);
	if (p->ctl)
		munmap((void *)(uintptr_t)p->ctl, sizeof(struct claw_ctl));
	if (p->guard)
		munmap(p->guard, CLAW_PAGE);
	p->data = NULL;
	p->ring = NULL;
	p->ctl = NULL;
	p->guard = NULL;
}

static inline int claw_check_ctl(const struct claw_ctl *ctl, const struct claw_attached *answer)
{
	return ctl->magic == CLAW_MAGIC && ctl->layout == CLAW_LAYOUT && ctl->size >= sizeof(*ctl) &&
	       !ctl->incompatible && ctl->ring_bytes == answer->ring_bytes && ctl->ring_id == answer->ring_id &&
	       ctl->record_max == answer->record_max && !claw_load_acquire(&ctl->ack_pos);
}

/*
 * Make a producer of a new ring's descriptors. On success it owns all four (control_fd may be -1), on failure none.
 * -EPROTO: they are not what `answer` says.
 */
static inline int claw_map(struct claw_producer *p, const struct claw_attached *answer, int data_fd, int ctl_fd,
			   int event_fd, int control_fd)
{
	uint64_t ring_bytes = answer->ring_bytes;
	uint32_t i;
	int result;

	if (p->guard)
		return -EISCONN;
	if (answer->magic != CLAW_MAGIC || answer->layout != CLAW_LAYOUT || answer->size != sizeof(*answer) ||
	    answer->incompatible || answer->status != CLAW_ATTACH_OK || !claw_is_ring_size(ring_bytes) ||
	    answer->record_max != claw_record_max(ring_bytes) ||
	    !claw_is_at_least(data_fd, CLAW_PAGE + ring_bytes) || !claw_is_at_least(ctl_fd, sizeof(struct claw_ctl)))
		return -EPROTO;
	memset(p, 0, sizeof(*p));
	result = claw_map_data(p, data_fd, ring_bytes);
	if (!result)
		result = claw_map_ctl(p, ctl_fd);
	if (!result && (!claw_check_ctl(p->ctl, answer) || p->data->head))
		result = -EPROTO;
	if (!result)
		result = claw_map_guard(p);
	if (result) {
		claw_unmap(p);
		return result;
	}

	p->data->magic = CLAW_MAGIC;
	p->data->layout = CLAW_LAYOUT;
	p->data->ring_bytes = ring_bytes;
	p->data->ring_id = answer->ring_id;
	p->ring_seq = 1;
	p->ring_id = answer->ring_id;
	p->daemon_epoch = answer->daemon_epoch;
	p->record_max = answer->record_max;
	p->overflow_bytes = CLAW_OVERFLOW_BYTES;
	p->capacity = ring_bytes > p->overflow_bytes ? ring_bytes : p->overflow_bytes;
	p->owner = ((uint32_t)claw_now_ns() ^ (uint32_t)((uintptr_t)p >> 4)) | 1;
	p->event_fd = event_fd;
	p->control_fd = control_fd;
	p->free_count = CLAW_HANDLE_COUNT;
	for (i = 0; i < CLAW_HANDLE_COUNT; i++)
		p->free_handles[i] = (uint16_t)(CLAW_HANDLE_COUNT - 1 - i);
	/* The mapping alone now keeps the lock that clawd took on this open file: the kernel drops it when we die */
	close(data_fd);
	close(ctl_fd);
	return 0;
}

/* Connect to <runtime_dir>/control.sock. Returns the descriptor */
static inline int claw_connect(const char *runtime_dir)
{
	const struct timeval patience = { CLAW_ATTACH_SECONDS, 0 };
	struct sockaddr_un address;
	int len, fd, result;

	memset(&address, 0, sizeof(address));
	address.sun_family = AF_UNIX;
	len = snprintf(address.sun_path, sizeof(address.sun_path), "%s/control.sock", runtime_dir);
	if (len < 0 || (size_t)len >= sizeof(address.sun_path))
		return -ENAMETOOLONG;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	/* bounds the wait for a daemon that hangs, connect() included */
	if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) ||
	    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)))
		goto fail;
	while (connect(fd, (const struct sockaddr *)&address, sizeof(address)))
		if (errno != EINTR)
			goto fail;
	return fd;
fail:
	result = errno == EAGAIN ? -ETIMEDOUT : -errno;
	close(fd);
	return result;
}

/*
 * Receive one packet. Returns how many descriptors came; only the first `max` are kept. *len: the room for the packet, then
 * how long it was, or one more when it was longer.
 */
static inline int claw_receive(int fd, void *ret_packet, size_t *len, int *ret_fds, int max)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(CLAW_FDS_MAX * sizeof(int))];
	} control;
	struct iovec part;
	struct msghdr message;
	struct cmsghdr *row;
	ssize_t received;
	int count = 0;
	int i;

	part.iov_base = ret_packet;
	part.iov_len = *len;
	memset(&message, 0, sizeof(message));
	message.msg_iov = &part;
	message.msg_iovlen = 1;
	message.msg_control = control.bytes;
	message.msg_controllen = sizeof(control.bytes);
	do {
		received = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
	} while (received < 0 && errno == EINTR);
	if (received < 0)
		return errno == EAGAIN ? -ETIMEDOUT : -errno;
	for (row = CMSG_FIRSTHDR(&message); row; row = CMSG_NXTHDR(&message, row)) {
		size_t bytes = row->cmsg_len - CMSG_LEN(0);
		size_t at;

		if (row->cmsg_level != SOL_SOCKET || row->cmsg_type != SCM_RIGHTS)
			continue;
		for (at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
			int passed;

			memcpy(&passed, CMSG_DATA(row) + at, sizeof(passed));
			if (count < max)
				ret_fds[count] = passed;
			else
				close(passed);
			count++;
		}
	}
	*len = (size_t)received + (message.msg_flags & MSG_TRUNC ? 1 : 0);
	if (received && count <= max && !(message.msg_flags & MSG_CTRUNC))
		return count;
	for (i = 0; i < count && i < max; i++)
		close(ret_fds[i]);
	return received ? -EPROTO : -ECONNRESET;
}

/*
 * What an answer of `len` bytes says: 0 = attached, -EACCES = refused. Its words up to `status` stay where they are in every
 * layout, so that a refusal is understood between any two; the rest of another layout is not looked at.
 */
static inline int claw_judge(struct claw_attached *answer, size_t len)
{
	uint32_t theirs = answer->layout;

	if (len < offsetof(struct claw_attached, ring_bytes) || answer->magic != CLAW_MAGIC)
		return -EPROTO;
	if (theirs != CLAW_LAYOUT) {
		memset(answer, 0, sizeof(*answer));
		answer->layout = theirs;
		answer->status = CLAW_ATTACH_LAYOUT;
		snprintf(answer->text, sizeof(answer->text),
			 "it speaks layout %u, this producer layout %u; upgrade the older one", (unsigned int)theirs,
			 (unsigned int)CLAW_LAYOUT);
		return -EACCES;
	}
	if (len != sizeof(*answer))
		return -EPROTO;
	answer->text[sizeof(answer->text) - 1] = '\0';
	return answer->status == CLAW_ATTACH_OK ? 0 : -EACCES;
}

/*
 * Say `hello` to the clawd that serves runtime_dir and hear its answer. Returns the connection, *ret_count (at most `max`)
 * descriptors came with it. -EACCES with a status in ret_answer: it refused. Nothing is left open then.
 */
static inline int claw_dial(const char *runtime_dir, const struct claw_hello *hello, struct claw_attached *ret_answer,
			    int *ret_fds, int max, int *ret_count)
{
	struct claw_attached answer;
	size_t len = sizeof(answer);
	ssize_t sent;
	int count, i, result;
	int fd = claw_connect(runtime_dir);

	if (fd < 0)
		return fd;
	do {
		sent = send(fd, hello, sizeof(*hello), MSG_NOSIGNAL);
	} while (sent < 0 && errno == EINTR);
	if (sent < 0) {
		result = errno == EAGAIN ? -ETIMEDOUT : -errno;
		close(fd);
		return result;
	}
	memset(&answer, 0, sizeof(answer));
	count = result = claw_receive(fd, &answer, &len, ret_fds, max);
	if (count >= 0)
		result = claw_judge(&answer, len);
	if (!result || (result == -EACCES && answer.status))
		*ret_answer = answer;
	if (!result) {
		*ret_count = count;
		return fd;
	}
	for (i = 0; i < count && i < max; i++)
		close(ret_fds[i]);
	close(fd);
	return result;
}

/*
 * Attach to the clawd that serves runtime_dir. `name` is a label for people, at most CLAW_PRODUCER_NAME - 1 bytes;
 * ring_bytes a power of two from CLAW_RING_BYTES_MIN to CLAW_RING_BYTES_MAX, 0 for clawd's default; what it became is in
 * ret_answer. Waits at most CLAW_ATTACH_SECONDS for each answer.
 * -EACCES with a status in ret_answer: clawd refused, `status` (CLAW_ATTACH_…) and `text` say why; with none: the socket's
 * permissions. -ENOENT, -ECONNREFUSED: no clawd serves it. -ETIMEDOUT: it did not answer. -EPROTO: not an answer this
 * header understands. -EISCONN: attached already.
 */
static inline int claw_attach(struct claw_producer *p, const char *runtime_dir, const char *name, uint64_t ring_bytes,
			      struct claw_attached *ret_answer)
{
	struct claw_hello hello;
	size_t name_len = strlen(name);
	int fds[3] = { -1, -1, -1 };
	int fd, i, result;
	int count = 0;

	memset(ret_answer, 0, sizeof(*ret_answer));
	if (p->guard)
		return -EISCONN;
	if (name_len >= sizeof(hello.name) || (ring_bytes && !claw_is_ring_size(ring_bytes)))
		return -EINVAL;
	memset(&hello, 0, sizeof(hello));
	hello.magic = CLAW_MAGIC;
	hello.layout = CLAW_LAYOUT;
	hello.size = sizeof(hello);
	hello.ring_bytes = ring_bytes;
	memcpy(hello.name, name, name_len);

	fd = claw_dial(runtime_dir, &hello, ret_answer, fds, 3, &count);
	if (fd < 0)
		return fd;
	if (count != 3 || (ring_bytes && ret_answer->ring_bytes != ring_bytes))
		result = -EPROTO;
	else
		result = claw_map(p, ret_answer, fds[0], fds[1], fds[2], fd);
	if (!result) {
		memcpy(p->name, hello.name, sizeof(p->name));
		return 0;
	}
	memset(ret_answer, 0, sizeof(*ret_answer));
	for (i = 0; i < count; i++)
		close(fds[i]);
	close(fd);
	return result;
}

/* Every later call, and a claw_wait_room() under way in another thread, returns -ENOTCONN. claw_detach() comes after */
static inline void claw_stop(struct claw_producer *p)
{
	if (!claw_check(p))
		claw_store_relaxed(p->guard, (uint32_t)CLAW_GUARD_STOPPED);
}

/* Give the ring back. Streams still open end as `producer_lost`, the overflow is dropped (see claw_flush()). Harmless when not attached, and in a forked child */
static inline void claw_detach(struct claw_producer *p)
{
	/* A child has no such mappings, and what it has at these addresses or descriptor numbers may be its own */
	if (!p->guard || claw_check(p) == -ECHILD)
		return;
	claw_unmap(p);
	close(p->event_fd);
	if (p->control_fd >= 0) {
		/* Ends the connection also where a forked child has a copy of the descriptor, and wakes who polls it */
		shutdown(p->control_fd, SHUT_RDWR);
		close(p->control_fd);
	}
	memset(p, 0, sizeof(*p));
}

#endif
