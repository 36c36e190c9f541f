/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine that scribbles over its own claw_producer, or lies: liar RUNTIME_DIR NAME LIE
 *
 * Opens NAME, writes "once", and waits until clawd has it. Then the lie, a write, and the wait for clawd's judgement; prints
 * what a write returns after it.
 */
#include "clawd_ring.h"

#include <poll.h>
#include <stdlib.h>

static struct claw_producer producer;

static void lie(const char *how, struct claw_stream stream)
{
	static char text[8192];
	struct claw_batch batch = { producer.ring, producer.ring_bytes - 1, producer.head, producer.ring_seq, 1 };

	memset(text, 'x', sizeof(text));
	if (!strcmp(how, "records longer than allowed")) {
		producer.record_max = 8192;
		claw_write(&producer, stream, text, 3000, 0, 1);
	} else if (!strcmp(how, "more bytes than were written")) {
		claw_add(&batch, CLAW_TOKEN, 0, stream.handle, 1, 900);
		batch.pos -= 512;
		claw_commit(&producer, &batch);
	} else if (!strcmp(how, "room that is not there")) {
		batch.pos += producer.ring_bytes;
		claw_add_text(&producer, &batch, 0, stream.handle, 1, "x", 1);
		claw_commit(&producer, &batch);
	} else if (!strcmp(how, "a head that went back")) {
		batch.pos = 0;
		batch.seq++; /* or it would be nothing to commit */
		claw_commit(&producer, &batch);
	} else if (!strcmp(how, "a head between records")) {
		batch.pos += 8;
		batch.seq++;
		claw_commit(&producer, &batch);
	} else if (!strcmp(how, "numbers it skipped")) {
		producer.ring_seq += 5;
		claw_write(&producer, stream, "x", 1, 0, 1);
	} else if (!strcmp(how, "a stream it never opened")) {
		claw_add_text(&producer, &batch, 0, 77, 1, "x", 1);
		claw_commit(&producer, &batch);
	} else if (!strcmp(how, "a name longer than its record")) {
		struct claw_open open = { 0, 200, 0, 0, 0, { 0, 0 } };

		memcpy(claw_add(&batch, CLAW_OPEN, 0, 5, 0, sizeof(open) + 4), &open, sizeof(open));
		claw_commit(&producer, &batch);
	} else if (!strcmp(how, "a name that is no text")) {
		claw_open_stream(&producer, "\xff\n", 2, NULL, 0, 0, &stream);
	} else if (!strcmp(how, "an empty reason")) {
		claw_add(&batch, CLAW_CLOSE, 0, stream.handle, 0, 0);
		claw_commit(&producer, &batch);
	} else {
		fprintf(stderr, "no such lie: %s\n", how);
		exit(2);
	}
}

int main(int argc, char **argv)
{
	struct claw_attached answer;
	struct claw_stream stream;
	struct pollfd end = { -1, POLLIN, 0 };

	if (argc != 4 || claw_attach(&producer, argv[1], "liar", 4096, &answer) ||
	    claw_open_stream(&producer, argv[2], strlen(argv[2]), NULL, 0, 0, &stream) ||
	    claw_write(&producer, stream, "once", 4, 0, 1) != 1 ||
	    claw_wait_room(&producer, producer.ring_bytes, 20000000000u))
		return 2;
	end.fd = claw_poll_fd(&producer);
	lie(argv[3], stream);
	if (poll(&end, 1, 20000) != 1)
		return 3;
	printf("%d %s\n", claw_state(&producer), claw_result_text(claw_write(&producer, stream, "x", 1, 0, 1)));
	claw_detach(&producer);
	return 0;
}
