/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The producer for Python: clawd_ring.h behind exported functions, with its results.
 *
 * A producer is opaque (its struct is clawd_ring.h's own), hence void. Its memory must outlive every call on it; one that
 * was detached answers -ENOTCONN. `producer_ref` and `stream` point to the bytes of Python objects that hold the
 * producer's address and a struct claw_stream.
 */
enum {
	CLAW_PY_STREAM_BYTES = 16, /* of a struct claw_stream */
	CLAW_PY_HINT_BYTES = 12, /* of a struct claw_hint */
	CLAW_PY_BACKLOG_BYTES = 16, /* of a struct claw_backlog */
	CLAW_PY_OVERFLOW_BYTES = 0x1000000, /* CLAW_OVERFLOW_BYTES */
	CLAW_PY_OVERFLOW_BYTES_MAX = 0x40000000,
	CLAW_PY_LOST_BYTES = 64, /* of a GAP that tells a loss */
	/* Added to the results of write, write_many, open and close_stream while the overflow holds something */
	CLAW_PY_BEHIND = 0x40000000,
};

/* Called through cffi, without the GIL. claw_py_create() returns NULL when memory is short. */
void *claw_py_create(void);
void claw_py_destroy(void *producer);
int claw_py_attach(void *producer, const char *runtime_dir, const char *name, uint64_t ring_bytes,
		   struct claw_attached *ret_answer);
int claw_py_wait_room(const void *producer, uint64_t bytes, uint64_t timeout_ns);
/* claw_dial(); touches no producer. ret_fd takes the one descriptor that may come, *ret_count whether it did */
int claw_py_dial(const char *runtime_dir, const char *hello, struct claw_attached *ret_answer, int *ret_fd,
		 int *ret_count);

/*
 * Called through ctypes.PyDLL: short, and the GIL is the lock that clawd_ring.h asks for. The numbers are int, because
 * that is what ctypes passes when it is not told types, and being told costs it 0.2 us a call.
 */
int claw_py_write(const void *producer_ref, const void *stream, const char *text, int len, int flags, int count);
int claw_py_write_many(const void *producer_ref, const void *streams, const void *lens, int n, const char *texts,
		       int texts_len);
int claw_py_stopped(const void *producer_ref, const void *stream);
int claw_py_open(const void *producer_ref, const char *name, int name_len, const char *readers, int readers_len,
		 const char *meta, int meta_len, uint64_t requested_ns, int pace, void *ret_stream);
int claw_py_close_stream(const void *producer_ref, const void *stream, const char *reason, int reason_len);
int claw_py_lose(const void *producer_ref, const void *streams, const void *lens, int n, const char *texts,
		 int texts_len);
int claw_py_flush(const void *producer_ref);
int claw_py_set_overflow(const void *producer_ref, int bytes);
int claw_py_backlog(const void *producer_ref, void *ret_backlog);
int claw_py_hello_again(const void *producer_ref, void *ret_hello);
int claw_py_take_over(const void *producer_ref, int fd, const void *answer, int event_fd, int count);
int claw_py_state(const void *producer_ref);
int claw_py_hints(const void *producer_ref, void *ret_hint);
int claw_py_poll_fd(const void *producer_ref);
int64_t claw_py_text_bytes(const void *producer_ref, const char *text, int len);
int claw_py_text_cut(const char *text, int len, int max);
void claw_py_stop(const void *producer_ref);
void claw_py_detach(const void *producer_ref);
