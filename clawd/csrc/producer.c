/* SPDX-License-Identifier: Apache-2.0 */
#include "producer.h"

#include <stdlib.h>

#include "clawd_ring.h"

_Static_assert(sizeof(struct claw_stream) == CLAW_PY_STREAM_BYTES, "producer.py joins streams as packed bytes");
_Static_assert(sizeof(struct claw_hint) == CLAW_PY_HINT_BYTES, "producer.py unpacks a hint");
_Static_assert(sizeof(struct claw_backlog) == CLAW_PY_BACKLOG_BYTES, "producer.py unpacks a backlog");
_Static_assert((int)CLAW_OVERFLOW_BYTES == (int)CLAW_PY_OVERFLOW_BYTES, "Python has a number of its own");
_Static_assert((int)CLAW_OVERFLOW_BYTES_MAX == (int)CLAW_PY_OVERFLOW_BYTES_MAX, "Python has a number of its own");
_Static_assert(sizeof(struct claw_record) + CLAW_RECORD_ALIGN == CLAW_PY_LOST_BYTES &&
		       sizeof(CLAW_LOST_REASON) <= CLAW_RECORD_ALIGN,
	       "Python adds a GAP to what a text needs");

/* bytes objects promise no alignment: copied out, which is what the compiler's loads do anyway */
static struct claw_producer *producer_at(const void *ref)
{
	struct claw_producer *producer;

	memcpy(&producer, ref, sizeof(producer));
	return producer;
}

static struct claw_stream stream_at(const void *bytes)
{
	struct claw_stream stream;

	memcpy(&stream, bytes, sizeof(stream));
	return stream;
}

/* A thread of Python's has to move on what is in the overflow: said with each call, where it costs no second one */
static int or_behind(const struct claw_producer *producer, int result)
{
	return result >= 0 && producer->overflow_count ? result + CLAW_PY_BEHIND : result;
}

void *claw_py_create(void)
{
	return calloc(1, sizeof(struct claw_producer));
}

void claw_py_destroy(void *producer)
{
	claw_detach(producer);
	free(producer);
}

int claw_py_attach(void *producer, const char *runtime_dir, const char *name, uint64_t ring_bytes,
		   struct claw_attached *ret_answer)
{
	return claw_attach(producer, runtime_dir, name, ring_bytes, ret_answer);
}

int claw_py_wait_room(const void *producer, uint64_t bytes, uint64_t timeout_ns)
{
	return claw_wait_room(producer, bytes, timeout_ns);
}

int claw_py_write(const void *producer_ref, const void *stream, const char *text, int len, int flags, int count)
{
	struct claw_producer *producer = producer_at(producer_ref);

	if (len < 0 || count < 0)
		return -EINVAL;
	return or_behind(producer, claw_write(producer, stream_at(stream), text, (size_t)len, (uint32_t)flags,
					      (uint32_t)count));
}

/* a str subclass may lie about its length, and then what follows `texts` would be read */
static int adds_up(const uint32_t *len, int n, int texts_len)
{
	int64_t left = texts_len;
	int i;

	for (i = 0; i < n; i++)
		left -= len[i];
	return n >= 0 && n < CLAW_PY_BEHIND && !left;
}

int claw_py_write_many(const void *producer_ref, const void *streams, const void *lens, int n, const char *texts,
		       int texts_len)
{
	struct claw_producer *producer = producer_at(producer_ref);

	if (!adds_up(lens, n, texts_len))
		return -EINVAL;
	return or_behind(producer, claw_write_many(producer, streams, lens, texts, (uint32_t)n, 0, 1));
}

int claw_py_lose(const void *producer_ref, const void *streams, const void *lens, int n, const char *texts,
		 int texts_len)
{
	struct claw_producer *producer = producer_at(producer_ref);
	const uint32_t *len = lens;
	int lost = 0;
	int i;

	if (!adds_up(len, n, texts_len))
		return -EINVAL;
	for (i = 0; i < n; texts += len[i], i++) {
		struct claw_stream stream = stream_at((const struct claw_stream *)streams + i);

		/* a stopped stream's texts are dropped with or without room */
		if (claw_stopped(producer, stream) == 0) {
			int result = claw_lose(producer, stream, texts, len[i]);

			if (result > 0)
				lost += result;
		}
	}
	return lost;
}

int claw_py_flush(const void *producer_ref)
{
	return claw_flush(producer_at(producer_ref));
}

int claw_py_set_overflow(const void *producer_ref, int bytes)
{
	return bytes < 0 ? -EINVAL : claw_set_overflow(producer_at(producer_ref), (uint64_t)bytes);
}

int claw_py_backlog(const void *producer_ref, void *ret_backlog)
{
	struct claw_backlog backlog;
	int result = claw_look_backlog(producer_at(producer_ref), &backlog);

	if (result == 0)
		memcpy(ret_backlog, &backlog, sizeof(backlog));
	return result;
}

int claw_py_hello_again(const void *producer_ref, void *ret_hello)
{
	struct claw_hello hello;
	int result = claw_hello_again(producer_at(producer_ref), &hello);

	if (result == 0)
		memcpy(ret_hello, &hello, sizeof(hello));
	return result;
}

int claw_py_dial(const char *runtime_dir, const char *hello, struct claw_attached *ret_answer, int *ret_fd,
		 int *ret_count)
{
	struct claw_hello copy;

	memcpy(&copy, hello, sizeof(copy));
	*ret_count = 0;
	return claw_dial(runtime_dir, &copy, ret_answer, ret_fd, 1, ret_count);
}

int claw_py_take_over(const void *producer_ref, int fd, const void *answer, int event_fd, int count)
{
	struct claw_attached copy;

	memcpy(&copy, answer, sizeof(copy));
	return claw_take_over(producer_at(producer_ref), fd, &copy, &event_fd, count);
}

int claw_py_stopped(const void *producer_ref, const void *stream)
{
	return claw_stopped(producer_at(producer_ref), stream_at(stream));
}

int claw_py_open(const void *producer_ref, const char *name, int name_len, const char *readers, int readers_len,
		 const char *meta, int meta_len, uint64_t requested_ns, int pace, void *ret_stream)
{
	struct claw_producer *producer = producer_at(producer_ref);
	struct claw_stream stream;
	int result;

	if (name_len < 0 || readers_len < 0 || meta_len < 0 || pace < 0)
		return -EINVAL;
	result = claw_open_for(producer, name, (size_t)name_len, readers, (size_t)readers_len, meta, (size_t)meta_len,
			       requested_ns, (uint32_t)pace, &stream);
	if (result == 0)
		memcpy(ret_stream, &stream, sizeof(stream));
	return or_behind(producer, result);
}

int claw_py_close_stream(const void *producer_ref, const void *stream, const char *reason, int reason_len)
{
	struct claw_producer *producer = producer_at(producer_ref);

	if (reason_len < 0)
		return -EINVAL;
	return or_behind(producer, claw_close_stream(producer, stream_at(stream), reason, (size_t)reason_len));
}

int claw_py_state(const void *producer_ref)
{
	return claw_state(producer_at(producer_ref));
}

int claw_py_hints(const void *producer_ref, void *ret_hint)
{
	struct claw_hint hint;
	int result = claw_hints(producer_at(producer_ref), &hint);

	if (result == 0)
		memcpy(ret_hint, &hint, sizeof(hint));
	return result;
}

int claw_py_poll_fd(const void *producer_ref)
{
	return claw_poll_fd(producer_at(producer_ref));
}

int64_t claw_py_text_bytes(const void *producer_ref, const char *text, int len)
{
	const struct claw_producer *producer = producer_at(producer_ref);

	/* record_max is 0 once detached, and nothing is ever cut to that */
	return producer->record_max && len >= 0 ? (int64_t)claw_text_bytes(producer, text, (size_t)len) : -ENOTCONN;
}

int claw_py_text_cut(const char *text, int len, int max)
{
	return (int)claw_text_cut(text, (size_t)len, (size_t)max);
}

void claw_py_stop(const void *producer_ref)
{
	claw_stop(producer_at(producer_ref));
}

void claw_py_detach(const void *producer_ref)
{
	claw_detach(producer_at(producer_ref));
}
