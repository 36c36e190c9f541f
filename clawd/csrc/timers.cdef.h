/* SPDX-License-Identifier: Apache-2.0 */
/* Timers: when is each of many streams due? A binary heap over fixed memory: setting or clearing one is O(log n). */
struct claw_timers {
	uint64_t *due_ns; /* by stream; 0 = not set */
	uint32_t *place; /* by stream: where it is in the heap */
	uint32_t *heap; /* streams, the next due first */
	uint32_t count;
	uint32_t max;
};

/* Room for streams 0 … max - 1, untouched memory until used. 0 or -ENOMEM. */
int claw_timers_init(struct claw_timers *ret_timers, uint32_t max);
void claw_timers_deinit(struct claw_timers *timers);
/* due_ns > 0: set, or move; 0: clear. */
void claw_timers_set(struct claw_timers *timers, uint32_t stream, uint64_t due_ns);
/* The stream that is due next, by now_ns at the latest, or UINT32_MAX; it stays set. */
uint32_t claw_timers_due(const struct claw_timers *timers, uint64_t now_ns);
/* When that is, 0 = nothing is set. */
uint64_t claw_timers_next(const struct claw_timers *timers);
