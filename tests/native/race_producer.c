/* SPDX-License-Identifier: Apache-2.0 */
/* The producer's thread of the race: tokens whose bytes follow from their number */
#include "clawd_ring.h"

#include "attached.h"
#include "race.h"

static struct claw_producer producer;
static struct claw_stream stream;

void race_producer_init(const struct memory *memory, int event_fd)
{
	attached_make(&producer, memory, 0, 1, event_fd);
	claw_open_stream(&producer, "race", 4, NULL, 0, 0, &stream);
}

static int write_one(uint64_t number)
{
	static char text[RACE_LEN_MAX];
	uint32_t len = race_len(number);
	int result;

	for (uint32_t i = 0; i < len; i++)
		text[i] = (char)race_byte(number, i);
	while ((result = claw_write(&producer, stream, text, len, 0, 1)) == -EAGAIN)
		claw_wait_room(&producer, claw_record_bytes(len), 1000000);
	return result;
}

void *race_producer(void *argument)
{
	const struct race *race = argument;
	uint64_t end_ns = claw_now_ns() + race->duration_ns;
	uint64_t number = 1;
	uint32_t pause = 1;

	for (; claw_now_ns() < end_ns; number++) {
		int result = write_one(number);
		if (result != 1) {
			fprintf(stderr, "claw_write: %d\n", result);
			break;
		}
		if (!race->in_step)
			continue;
		/* Until it was taken, and then for a time that moves: clawd is somewhere on its way to sleep */
		while (claw_load_acquire(&producer.ctl->ack_pos) != producer.head && claw_now_ns() < end_ns)
			;
		pause = (pause * 5 + 1) % 1024;
		for (volatile uint32_t i = 0; i < pause; i++)
			;
	}
	claw_close_stream(&producer, stream, "stop", 4);
	return (void *)(uintptr_t)number;
}
