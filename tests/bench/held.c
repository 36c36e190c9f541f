/* SPDX-License-Identifier: Apache-2.0 */
/* What a write costs an engine in C: held DIRECTORY COUNT prints ns a token for single writes and for steps of 100. */
#include "clawd_ring.h"

#include <err.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEP = 100 };

static struct claw_producer producer;
static const char text[] = "0123456789abcdef";

static void must(int result, const char *what)
{
	if (result < 0)
		errx(1, "%s: %s", what, claw_result_text(result));
}

int main(int argc, char **argv)
{
	struct claw_attached answer;
	struct claw_stream streams[STEP];
	uint32_t lens[STEP];
	char texts[STEP * 16];
	long count = argc == 3 ? atol(argv[2]) : 0;
	uint64_t start, single, many;

	if (count < STEP)
		errx(2, "usage: held DIRECTORY COUNT");
	must(claw_attach(&producer, argv[1], "held", CLAW_RING_BYTES_MAX, &answer), "attach");
	must(claw_set_overflow(&producer, 0), "turn the overflow off"); /* the ring is what is measured */
	for (int i = 0; i < STEP; i++) {
		char name[32];
		int len = snprintf(name, sizeof(name), "held-%d", i);

		must(claw_open_stream(&producer, name, (size_t)len, NULL, 0, 0, &streams[i]), "open");
		lens[i] = 16;
		memcpy(texts + 16 * i, text, 16);
	}
	start = claw_now_ns();
	for (long i = 0; i < count; i++)
		must(claw_write(&producer, streams[i % STEP], text, 16, 0, 1), "write");
	single = claw_now_ns() - start;
	must(claw_wait_room(&producer, CLAW_RING_BYTES_MAX, 60000000000u), "drain");
	start = claw_now_ns();
	for (long i = 0; i < count; i += STEP)
		must(claw_write_many(&producer, streams, lens, texts, STEP, 0, 1), "write_many");
	many = claw_now_ns() - start;
	printf("%.1f %.1f\n", (double)single / (double)count, (double)many / (double)count);
	claw_detach(&producer);
	return 0;
}
