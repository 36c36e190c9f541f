/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine that dies: mortal RUNTIME_DIR NAME POINT
 *
 * Attaches, opens NAME and NAME-open, writes to both, closes the first, detaches. The compiler calls back at every basic
 * block of it, those of clawd_ring.h included; at the POINT-th it kills itself. Prints how many there are if it lives.
 */
#include "clawd_ring.h"

#include <signal.h>
#include <stdlib.h>

#ifdef __clang__
#define UNCOUNTED __attribute__((no_sanitize("coverage")))
#else
#define UNCOUNTED __attribute__((no_sanitize_coverage))
#endif

enum { TOKENS = 12 };

static unsigned long points, last = (unsigned long)-1;
static struct claw_producer producer;

#ifdef __cplusplus
extern "C"
#endif
void __sanitizer_cov_trace_pc(void);

UNCOUNTED void __sanitizer_cov_trace_pc(void)
{
	if (++points == last)
		kill(getpid(), SIGKILL);
}

static int live(const char *runtime_dir, const char *name)
{
	static const char text[] = "0 你好 ";
	struct claw_attached answer;
	struct claw_stream streams[2];
	uint32_t lens[2] = { sizeof(text) - 1, sizeof(text) - 1 };
	char other[64], texts[2 * sizeof(text)];
	int i, len, result;

	result = claw_attach(&producer, runtime_dir, "mortal", 4096, &answer);
	if (result < 0)
		return result;
	len = snprintf(other, sizeof(other), "%s-open", name);
	result = claw_open_stream(&producer, name, strlen(name), "{}", 2, 0, &streams[0]);
	if (result < 0)
		return result;
	result = claw_open_stream(&producer, other, (size_t)len, NULL, 0, 0, &streams[1]);
	for (i = 0; i < TOKENS && result >= 0; i++) {
		memcpy(texts, text, lens[0]);
		memcpy(texts + lens[0], text, lens[1]);
		texts[0] = texts[lens[0]] = (char)('a' + i);
		if (i % 3) {
			result = claw_write_many(&producer, streams, lens, texts, 2, 0, 1);
		} else {
			result = claw_write(&producer, streams[0], texts, lens[0], CLAW_URGENT, 1);
			if (result >= 0)
				result = claw_write(&producer, streams[1], texts, lens[1], CLAW_URGENT, 1);
		}
	}
	if (result < 0)
		return result;
	result = claw_close_stream(&producer, streams[0], "stop", 4);
	claw_detach(&producer);
	return result;
}

UNCOUNTED int main(int argc, char **argv)
{
	int result;

	if (argc != 4)
		return 2;
	if (atol(argv[3]))
		last = strtoul(argv[3], NULL, 10);
	result = live(argv[1], argv[2]);
	if (result < 0)
		fprintf(stderr, "%s\n", claw_result_text(result));
	else
		printf("%lu\n", points);
	return result < 0;
}
