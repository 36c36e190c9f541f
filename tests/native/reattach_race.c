/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread writes, another one attaches again whenever clawd is gone: reattach_race RUNTIME_DIR TOKENS RING_BYTES. Built
 * with ThreadSanitizer. Prints how often it attached again.
 */
#include "clawd_ring.h"

#include <err.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>

static struct claw_producer producer;
static const char *directory;
static int is_over, again;

static void *watch(void *argument)
{
	struct claw_attached answer;
	struct pollfd gone = { claw_poll_fd(&producer), POLLRDHUP, 0 };

	(void)argument;
	while (!claw_load_relaxed(&is_over)) {
		int result = 0;

		if (poll(&gone, 1, 10) == 1)
			result = claw_reattach(&producer, directory, &answer);
		else
			continue;
		if (result == 0)
			again++;
		else if (result == -ESHUTDOWN)
			errx(1, "lost: %s", answer.text);
		else
			usleep(1000);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct claw_attached answer;
	struct claw_stream stream = { 0, 0, 0 };
	pthread_t watcher;
	char text[16];
	int number, result;

	if (argc != 4)
		return 2;
	directory = argv[1];
	result = claw_attach(&producer, directory, "race", strtoull(argv[3], NULL, 10), &answer);
	if (result < 0)
		errx(1, "attach: %s", claw_result_text(result));
	if (pthread_create(&watcher, NULL, watch, NULL))
		return 2;
	result = claw_open_stream(&producer, "race", 4, NULL, 0, 0, &stream);
	for (number = 0; number < atoi(argv[2]) && result >= 0; number++) {
		int len = snprintf(text, sizeof(text), "%d;", number);

		while ((result = claw_write(&producer, stream, text, (size_t)len, 0, 1)) == -EAGAIN)
			claw_wait_room(&producer, claw_record_bytes((uint64_t)len), 1000000000);
		if (number % 64 == 0)
			usleep(200); /* or it is over before clawd was gone often */
	}
	if (result >= 0)
		result = claw_close_stream(&producer, stream, "stop", 4);
	while (result >= 0 && (result = claw_flush(&producer)) > 0)
		claw_wait_room(&producer, claw_record_bytes(producer.record_max), 1000000000);
	claw_store_relaxed(&is_over, 1);
	pthread_join(watcher, NULL);
	if (result < 0)
		errx(1, "write: %s", claw_result_text(result));
	printf("%d\n", again);
	claw_detach(&producer);
	return 0;
}
