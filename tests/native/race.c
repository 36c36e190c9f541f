/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A producer and clawd's drain as two threads on one mapping. Under ThreadSanitizer: no race (it sees races within one
 * mapping only). Without: every token whole and in order, and no sleep that a token does not end.
 *	race SECONDS stream|step
 */
#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "barrier.h"
#include "drain.h"

#include "race.h"

enum { RING_BYTES = 8192, LOST_MS = 5000 };

static uint64_t expected, sleeps;

/* As claw_intake, without what records mean. 1 = CLOSE was taken */
static int take_all(struct claw_drain *drain)
{
	static uint8_t payload[CLAW_RECORD_MAX];
	struct claw_record record;
	int closed = 0;
	int result = claw_drain_begin(drain);

	while (!result) {
		result = claw_drain_next(drain, &record);
		if (result <= 0)
			break;
		result = claw_drain_copy(drain, &record, payload);
		if (record.kind == CLAW_TOKEN) {
			expected++;
			if (record.len != race_len(expected)) {
				fprintf(stderr, "token %lu has %u bytes\n", (unsigned long)expected, record.len);
				exit(1);
			}
			for (uint32_t i = 0; i < record.len; i++)
				if (payload[i] != race_byte(expected, i)) {
					fprintf(stderr, "token %lu is torn\n", (unsigned long)expected);
					exit(1);
				}
		}
		closed |= record.kind == CLAW_CLOSE;
		claw_drain_advance(drain, &record);
	}
	if (result < 0) {
		fprintf(stderr, "violation %d\n", -result);
		exit(1);
	}
	claw_drain_ack(drain);
	return closed;
}

/* As claw_wait, for one ring */
static void sleep_until_data(struct claw_drain *drain, int epoll_fd)
{
	struct epoll_event event;

	claw_drain_sleep(drain);
	claw_fence_full();
	if (!claw_drain_has_data(drain)) {
		sleeps++;
		int count = epoll_wait(epoll_fd, &event, 1, LOST_MS);
		if (count == 0) {
			fprintf(stderr, "LOST: %sno signal after %lu tokens\n",
				claw_drain_has_data(drain) ? "a token lies there, and " : "", (unsigned long)expected);
			exit(1);
		}
	}
	claw_drain_awake(drain);
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	struct race race = {
		.duration_ns = (uint64_t)(atof(argv[1]) * 1e9),
		.in_step = !strcmp(argv[2], "step"),
	};
	struct memory memory = memory_make(RING_BYTES);
	struct claw_drain drain = {
		.data = memory.data,
		.bytes = memory.ring,
		.ctl = memory.ctl,
		.ring_bytes = RING_BYTES,
		.next_seq = 1,
		.record_max = claw_record_max(RING_BYTES),
	};
	int event_fd = eventfd(0, EFD_CLOEXEC);
	int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = { .events = EPOLLIN | EPOLLET };
	epoll_ctl(epoll_fd, EPOLL_CTL_ADD, event_fd, &event);

	race_producer_init(&memory, event_fd);
	pthread_t thread;
	void *written;
	if (pthread_create(&thread, NULL, race_producer, &race))
		return 1;
	while (!take_all(&drain))
		sleep_until_data(&drain, epoll_fd);
	pthread_join(thread, &written);
	if (expected + 1 != (uint64_t)(uintptr_t)written) {
		fprintf(stderr, "%lu tokens came of %lu\n", (unsigned long)expected, (unsigned long)(uintptr_t)written - 1);
		return 1;
	}
	printf("counted: %lu raced tokens\ncounted: %lu sleeps of a raced ring\n", (unsigned long)expected,
	       (unsigned long)sleeps);
	return 0;
}
