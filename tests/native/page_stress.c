/* SPDX-License-Identifier: Apache-2.0 */
/* A writer and a reader of the same row, in two processes: every row that is read must be of one moment. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "stream.h"
#include "page.h"

static void fill(struct claw_page_stream *row, uint64_t n)
{
	row->state = (uint32_t)(n % 4 + 1);
	row->next_seq = row->tokens = row->text_bytes = row->spool_bytes = row->ended_ns = n;
	row->name_len = (uint32_t)(n % 255 + 1);
	row->reason_len = (uint32_t)(n % 97);
	memset(row->name, (int)(n % 251), sizeof(row->name));
	memset(row->reason, (int)(n % 251), sizeof(row->reason));
}

int main(void)
{
	uint64_t bytes = claw_page_bytes(3, 1, 1), rows = 0, busy = 0;
	int fd = memfd_create("page", 0), error;
	struct claw_page page;
	struct claw_page_stream row = { 0 }, want = { 0 };
	if (ftruncate(fd, (off_t)bytes) || claw_page_init(&page, fd, 3, 1, 1))
		return 2;
	fill(&row, 1);
	claw_page_put_stream(&page, 1, &row, 1);
	claw_page_publish(&page);
	pid_t writer = fork();
	if (!writer)
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* a reader that is killed must not leave it behind */
	for (uint64_t n = 1; !writer; n++) {
		fill(&row, n);
		claw_page_put_stream(&page, 1, &row, 1);
		/* a reader that never finds the row at rest waits, and sees nothing */
		for (volatile int pause = 0; pause < 40; pause++)
			;
	}
	struct claw_view *view = claw_view_open(fd, &error);
	while (view && (claw_view_stream(view, 1, &row) != 1 || row.tokens < 1000))
		;
	time_t end = time(NULL) + 4;
	for (int look = 0; view && look < 2000000 && time(NULL) < end; look++) {
		int found = claw_view_stream(view, 1, &row);
		busy += found == -EAGAIN;
		if (found != 1)
			continue;
		fill(&want, row.tokens);
		rows++;
		if (row.state != want.state || row.next_seq != want.tokens || row.text_bytes != want.tokens ||
		    row.spool_bytes != want.tokens || row.ended_ns != want.tokens || row.name_len != want.name_len ||
		    row.reason_len != want.reason_len || memcmp(row.name, want.name, want.name_len) ||
		    memcmp(row.reason, want.reason, want.reason_len)) {
			printf("torn at look %d, row %llu\n", look, (unsigned long long)row.tokens);
			break;
		}
	}
	kill(writer, SIGKILL);
	waitpid(writer, NULL, 0);
	printf("%llu rows, %llu busy\n", (unsigned long long)rows, (unsigned long long)busy);
	return !view;
}
