/* SPDX-License-Identifier: Apache-2.0 */
#include "producer.h"

#include <stdlib.h>

#include "clawd_ring.h"

_Static_assert(sizeof(struct claw_stream) == CLAW_PY_STREAM_BYTES, "producer.py joins streams as packed bytes");
_Static_assert(sizeof(struct claw_hint) == CLAW_PY_HINT_BYTES, "producer.py unpacks a hint");

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
	if (len < 0 || count < 0)
		return -EINVAL;
	return claw_write(producer_at(producer_ref), stream_at(stream), text, (size_t)len, (uint32_t)flags,
			  (uint32_t)count);
}

int claw_py_write_many(const void *producer_ref, const void *streams, const void *lens, int n, const char *texts,
		       int texts_len)
{
	const uint32_t *len = lens;
	int64_t left = texts_len;
	int i;

	/* a str subclass may lie about its length, and then what follows `texts` would be read */
	for (i = 0; i < n; i++)
		left -= len[i];
	if (n < 0 || left)
		return -EINVAL;
	return claw_write_many(producer_at(producer_ref), streams, len, texts, (uint32_t)n, 0, 1);
}

int claw_py_stopped(const void *producer_ref, const void *stream)
{
	return claw_stopped(producer_at(producer_ref), stream_at(stream));
}

int claw_py_open(const void *producer_ref, const char *name, int name_len, const char *meta, int meta_len,
		 uint64_t requested_ns, void *ret_stream)
{
	struct claw_stream stream;
	int result;

	if (name_len < 0 || meta_len < 0)
		return -EINVAL;
	result = claw_open_stream(producer_at(producer_ref), name, (size_t)name_len, meta, (size_t)meta_len,
				  requested_ns, &stream);
	if (result == 0)
		memcpy(ret_stream, &stream, sizeof(stream));
	return result;
}

int claw_py_close_stream(const void *producer_ref, const void *stream, const char *reason, int reason_len)
{
	if (reason_len < 0)
		return -EINVAL;
	return claw_close_stream(producer_at(producer_ref), stream_at(stream), reason, (size_t)reason_len);
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
