/* SPDX-License-Identifier: Apache-2.0 */
#include "drain.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "barrier.h"
#include "guard.h"

static int has_size(int fd, uint64_t bytes)
{
	struct stat stat;
	if (fstat(fd, &stat) < 0)
		return -errno;
	return S_ISREG(stat.st_mode) && (uint64_t)stat.st_size == bytes ? 0 : -EINVAL;
}

/* A later layout may have more at its end than is known here */
static int has_ctl(int fd)
{
	struct stat stat;
	if (fstat(fd, &stat) < 0)
		return -errno;
	return S_ISREG(stat.st_mode) && (uint64_t)stat.st_size >= sizeof(struct claw_ctl) ? 0 : -EINVAL;
}

int claw_drain_init(struct claw_drain *ret_drain, int data_fd, int ctl_fd, uint64_t ring_bytes)
{
	if (ring_bytes < CLAW_RING_BYTES_MIN || ring_bytes > CLAW_RING_BYTES_MAX || (ring_bytes & (ring_bytes - 1)))
		return -EINVAL;
	int result = has_size(data_fd, CLAW_PAGE + ring_bytes);
	if (!result)
		result = has_ctl(ctl_fd);
	if (result < 0)
		return result;

	/* One reservation, so that nothing else can land between the two views of the ring */
	size_t reserved = CLAW_PAGE + 2 * ring_bytes;
	uint8_t *base = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (base == MAP_FAILED)
		return -errno;
	void *ctl = MAP_FAILED;
	if (mmap(base, CLAW_PAGE + ring_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, data_fd, 0) == MAP_FAILED ||
	    mmap(base + CLAW_PAGE + ring_bytes, ring_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, data_fd, CLAW_PAGE) ==
		    MAP_FAILED ||
	    (ctl = mmap(NULL, sizeof(struct claw_ctl), PROT_READ | PROT_WRITE, MAP_SHARED, ctl_fd, 0)) == MAP_FAILED) {
		result = -errno;
		munmap(base, reserved);
		return result;
	}
	/* Tokens do not belong in a core dump */
	madvise(base, reserved, MADV_DONTDUMP);
	*ret_drain = (struct claw_drain){
		.data = (struct claw_data *)base,
		.bytes = base + CLAW_PAGE,
		.ctl = ctl,
		.ring_bytes = ring_bytes,
		.record_max = claw_record_max(ring_bytes),
	};
	result = claw_guard_add(base, reserved, PROT_READ, &ret_drain->faulted);
	if (!result)
		result = claw_guard_add(ctl, sizeof(struct claw_ctl), PROT_READ | PROT_WRITE, &ret_drain->faulted);
	if (result < 0)
		claw_drain_deinit(ret_drain);
	return result;
}

void claw_drain_deinit(struct claw_drain *drain)
{
	if (!drain->data)
		return;
	claw_guard_remove(drain->data);
	claw_guard_remove(drain->ctl);
	munmap(drain->data, CLAW_PAGE + 2 * drain->ring_bytes);
	munmap(drain->ctl, sizeof(struct claw_ctl));
	drain->data = NULL;
}

/* The handler writes it in the middle of a plain copy */
static int is_faulted(const struct claw_drain *drain)
{
	return claw_load_relaxed(&drain->faulted) != 0;
}

int claw_drain_begin(struct claw_drain *drain)
{
	/* Pairs with the producer's release store of head: the records before it are whole. The only load this turn. */
	uint64_t head = claw_load_acquire(&drain->data->head);
	if (is_faulted(drain))
		return -CLAW_BAD_MEMORY;
	if (head - drain->pos > drain->ring_bytes || head % CLAW_RECORD_ALIGN)
		return -CLAW_BAD_HEAD;
	drain->head = head;
	return 0;
}

/*
 * volatile: the compiler must neither load a word twice nor look at the shared copy again after a check. Word by word to
 * where it stays: a wider load of what was just stored in parts waits until all before it is done.
 */
static void copy_header(struct claw_record *dst, const uint8_t *src)
{
	const volatile uint64_t *from = (const volatile uint64_t *)src;
	for (size_t i = 0; i < sizeof(*dst) / sizeof(*from); i++) {
		uint64_t word = from[i];
		memcpy((uint8_t *)dst + i * sizeof(word), &word, sizeof(word));
	}
}

int claw_drain_next(struct claw_drain *drain, struct claw_record *ret_record)
{
	if (drain->pos == drain->head)
		return 0;
	copy_header(ret_record, drain->bytes + (drain->pos & (drain->ring_bytes - 1)));
	if (is_faulted(drain))
		return -CLAW_BAD_MEMORY;
	if (ret_record->len > drain->record_max || claw_record_bytes(ret_record->len) > drain->head - drain->pos)
		return -CLAW_BAD_LEN;
	/* A ring taken over from an earlier clawd starts wherever that one stopped */
	if (ret_record->ring_seq == 0 || (drain->next_seq && ret_record->ring_seq != drain->next_seq))
		return -CLAW_BAD_SEQ;
	if (ret_record->kind < CLAW_TOKEN || ret_record->kind > CLAW_GAP)
		return -CLAW_BAD_KIND;
	if (ret_record->flags & ~CLAW_URGENT || ret_record->reserved)
		return -CLAW_BAD_FLAGS;
	if (ret_record->handle >= CLAW_HANDLE_COUNT)
		return -CLAW_BAD_HANDLE;
	return 1;
}

int claw_drain_copy(const struct claw_drain *drain, const struct claw_record *record, uint8_t *dst)
{
	memcpy(dst, drain->bytes + (drain->pos & (drain->ring_bytes - 1)) + sizeof(*record), record->len);
	return is_faulted(drain) ? -CLAW_BAD_MEMORY : 0;
}

void claw_drain_advance(struct claw_drain *drain, const struct claw_record *record)
{
	drain->pos += claw_record_bytes(record->len);
	drain->next_seq = record->ring_seq + 1;
}

void claw_drain_ack(struct claw_drain *drain)
{
	/* Pairs with the producer's acquire load: our reads of these bytes are done before it writes over them */
	claw_store_release(&drain->ctl->ack_pos, drain->pos);
}

void claw_drain_sleep(struct claw_drain *drain)
{
	drain->wake |= 1;
	claw_store_relaxed(&drain->ctl->need_wake, drain->wake);
}

int claw_drain_has_data(const struct claw_drain *drain)
{
	return claw_load_acquire(&drain->data->head) != drain->pos;
}

void claw_drain_awake(struct claw_drain *drain)
{
	/* The next even number: the next sleep is a new generation, and gets a signal of its own */
	if (drain->wake & 1) {
		drain->wake++;
		claw_store_relaxed(&drain->ctl->need_wake, drain->wake);
	}
}
