/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small fuzzer for LLVMFuzzerTestOneInput, led by the coverage that gcc can report: libFuzzer comes with clang only,
 * a compiler of some hundred MB. Replays the files of a directory, then changes inputs and keeps those that reach new code.
 *	program [-seed=N] [-seconds=N] [-keep=DIRECTORY] [-current=FILE] [-disturb] DIRECTORY
 * FILE always holds the input that runs. -disturb: a second thread calls fuzz_disturb() all the time. -keep: write what
 * reached new code.
 */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { INPUT_MAX = 2048, CORPUS_MAX = 4096, MAP_SIZE = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void fuzz_disturb(uint64_t random) __attribute__((weak));

/* --- coverage --- */

static uint8_t hits[MAP_SIZE], known[MAP_SIZE];
static uint32_t touched[MAP_SIZE];
static uint32_t touched_count;
static uintptr_t last_pc;
static __thread int followed; /* the main thread is: what disturbs is no way into the code */

/* Called by the instrumented code at every basic block */
void __sanitizer_cov_trace_pc(void)
{
	if (!followed)
		return;
	uintptr_t pc = (uintptr_t)__builtin_return_address(0);
	uint32_t index = (uint32_t)((pc >> 1 ^ last_pc) * 0x9e3779b1u >> 8) % MAP_SIZE;
	if (!hits[index])
		touched[touched_count++] = index;
	if (hits[index] < 255)
		hits[index]++;
	last_pc = pc >> 2;
}

/* Forget this run's hits; 1 = some block pair ran for the first time, or in a new order of magnitude */
static int reached_new(void)
{
	int found = 0;
	for (uint32_t i = 0; i < touched_count; i++) {
		uint8_t bucket = (uint8_t)(1 << (31 - __builtin_clz(hits[touched[i]])));
		found |= !(known[touched[i]] & bucket);
		known[touched[i]] |= bucket;
		hits[touched[i]] = 0;
	}
	touched_count = 0;
	last_pc = 0;
	return found;
}

/* --- inputs --- */

static struct input {
	uint8_t *data;
	size_t size;
} corpus[CORPUS_MAX];
static size_t corpus_count;
static uint64_t state;
static uint8_t *current;

static uint64_t draw(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return below ? (state * 0x2545f4914f6cdd1du >> 11) % below : 0;
}

static void add(const uint8_t *data, size_t size)
{
	struct input *input = &corpus[corpus_count < CORPUS_MAX ? corpus_count++ : draw(CORPUS_MAX)];
	free(input->data);
	input->data = malloc(size + 1);
	if (!input->data)
		exit(1);
	memcpy(input->data, data, size);
	input->size = size;
}

static int run(const uint8_t *data, size_t size)
{
	memcpy(current + sizeof(uint32_t), data, size);
	memcpy(current, &(uint32_t){ (uint32_t)size }, sizeof(uint32_t));
	LLVMFuzzerTestOneInput(data, size);
	return reached_new();
}

static size_t mutate(uint8_t *data, size_t size)
{
	static const uint64_t edges[] = { 0, 1, 2, 7, 8, 31, 32, 33, 127, 128, 255, 256, 3584, 3585, 4095, 4096,
					  0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
					  0x7fffffffffffffff, 0x8000000000000000, UINT64_MAX };
	for (uint64_t n = 1 + draw(4); n; n--) {
		size_t at = draw(size);
		size_t len = 1 + draw(size - at < 32 ? size - at : 32);
		switch (draw(8)) {
		case 0:
			if (size)
				data[at] ^= (uint8_t)(1 << draw(8));
			break;
		case 1:
			if (size)
				data[at] = (uint8_t)draw(256);
			break;
		case 2: {
			size_t width = (size_t)1 << draw(4);
			uint64_t value = edges[draw(sizeof(edges) / sizeof(*edges))];
			if (at + width <= size)
				memcpy(data + at, &value, width);
			break;
		}
		case 3:
			if (size > len) {
				memmove(data + at, data + at + (at + len <= size ? len : 0), size - at - (at + len <= size ? len : 0));
				size -= at + len <= size ? len : 0;
			}
			break;
		case 4:
			if (size + len <= INPUT_MAX) {
				memmove(data + at + len, data + at, size - at);
				for (size_t i = 0; i < len; i++)
					data[at + i] = (uint8_t)draw(draw(2) ? 256 : 16);
				size += len;
			}
			break;
		case 5: /* said again */
			if (size && at + len <= size && size + len <= INPUT_MAX) {
				memmove(data + at + len, data + at, size - at);
				size += len;
			}
			break;
		case 6: { /* the tail of another */
			const struct input *other = &corpus[draw(corpus_count)];
			size_t from = draw(other->size);
			size_t more = other->size - from;
			if (more > INPUT_MAX - at)
				more = INPUT_MAX - at;
			memcpy(data + at, other->data + from, more);
			size = at + more > size || draw(2) ? at + more : size;
			break;
		}
		case 7:
			if (size && at + 8 <= size)
				data[at] = (uint8_t)(data[at] + draw(9) - 4);
			break;
		}
	}
	return size;
}

static void read_corpus(const char *path)
{
	static uint8_t data[INPUT_MAX];
	char name[4096];
	DIR *directory = opendir(path);
	if (!directory) {
		perror(path);
		exit(2);
	}
	for (struct dirent *entry; (entry = readdir(directory));) {
		snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
		int fd = entry->d_name[0] == '.' ? -1 : open(name, O_RDONLY);
		ssize_t size = fd < 0 ? -1 : read(fd, data, sizeof(data));
		if (fd >= 0)
			close(fd);
		if (size >= 0)
			add(data, (size_t)size);
	}
	closedir(directory);
}

static void keep(const char *path, const uint8_t *data, size_t size)
{
	char name[4096];
	uint64_t hash = 0xcbf29ce484222325u;
	for (size_t i = 0; i < size; i++)
		hash = (hash ^ data[i]) * 0x100000001b3u;
	snprintf(name, sizeof(name), "%s/%016" PRIx64, path, hash);
	FILE *file = fopen(name, "w");
	if (!file || fwrite(data, 1, size, file) != size || fclose(file))
		perror(name);
}

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int stopping;

static void *disturb(void *argument)
{
	uint64_t random = (uint64_t)(uintptr_t)argument | 1;
	while (!__atomic_load_n(&stopping, __ATOMIC_RELAXED)) {
		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		fuzz_disturb(random * 0x2545f4914f6cdd1du);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	static uint8_t data[INPUT_MAX];
	const char *kept = NULL, *current_path = NULL, *directory = NULL;
	double seconds = 0;
	int disturbed = 0;
	uint64_t seed = 1, cases = 0;
	for (int i = 1; i < argc; i++) {
		if (!strncmp(argv[i], "-seed=", 6))
			seed = strtoull(argv[i] + 6, NULL, 10);
		else if (!strncmp(argv[i], "-seconds=", 9))
			seconds = atof(argv[i] + 9);
		else if (!strncmp(argv[i], "-keep=", 6))
			kept = argv[i] + 6;
		else if (!strncmp(argv[i], "-current=", 9))
			current_path = argv[i] + 9;
		else if (!strcmp(argv[i], "-disturb"))
			disturbed = 1;
		else
			directory = argv[i];
	}
	int fd = current_path ? open(current_path, O_RDWR | O_CREAT | O_TRUNC, 0600) : memfd_create("current", MFD_CLOEXEC);
	if (!directory || fd < 0 || ftruncate(fd, sizeof(uint32_t) + INPUT_MAX) < 0 || (disturbed && !fuzz_disturb))
		return 2;
	current = mmap(NULL, sizeof(uint32_t) + INPUT_MAX, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (current == MAP_FAILED)
		return 2;
	state = seed * 0x9e3779b97f4a7c15u | 1;
	followed = 1;

	read_corpus(directory);
	pthread_t thread;
	if (disturbed && pthread_create(&thread, NULL, disturb, (void *)(uintptr_t)state))
		return 2;
	size_t replayed = corpus_count;
	for (size_t i = 0; i < replayed; i++, cases++)
		if (run(corpus[i].data, corpus[i].size) && kept)
			keep(kept, corpus[i].data, corpus[i].size);
	if (!corpus_count)
		add((const uint8_t *)"", 0);
	for (uint64_t end_ns = now_ns() + (uint64_t)(seconds * 1e9); now_ns() < end_ns; cases++) {
		/* half of the time one of the newest */
		size_t from = draw(2) && corpus_count > 16 ? corpus_count - 1 - draw(16) : draw(corpus_count);
		size_t size = corpus[from].size;
		memcpy(data, corpus[from].data, size);
		size = mutate(data, size);
		/* What another thread does is no merit of the input */
		if (run(data, size) && !disturbed) {
			add(data, size);
			if (kept)
				keep(kept, data, size);
		}
	}
	if (disturbed) {
		__atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
		pthread_join(thread, NULL);
	}
	printf("%" PRIu64 " cases, %zu of them new, %zu replayed, seed %" PRIu64 "\n", cases, corpus_count - replayed, replayed,
	       seed);
	printf("counted: %" PRIu64 " fuzz cases\n", cases);
	return 0;
}
