/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory ordering: the only atomics in clawd.
 *
 * An acquire load that sees a release store also sees everything written before that store. Fields stay plain integers,
 * so that one declaration serves C, C++ and cffi; the compiler builtins below work on them in each.
 */
#ifndef CLAW_BARRIER_H
#define CLAW_BARRIER_H

#define claw_load_relaxed(ptr) __atomic_load_n((ptr), __ATOMIC_RELAXED)
#define claw_load_acquire(ptr) __atomic_load_n((ptr), __ATOMIC_ACQUIRE)
#define claw_store_relaxed(ptr, value) __atomic_store_n((ptr), (value), __ATOMIC_RELAXED)
#define claw_store_release(ptr, value) __atomic_store_n((ptr), (value), __ATOMIC_RELEASE)

/* A counter with one writer: no lock, and a reader sees it before or after, never half of it */
#define claw_count(ptr, value) claw_store_relaxed((ptr), *(ptr) + (value))

/*
 * For words that are guarded by another one (a seqlock's): acquire keeps the loads before it from those after it,
 * release keeps the stores after it from those before it. Free on x86; a processor with weaker order needs both.
 */
#define claw_fence_acquire() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define claw_fence_release() __atomic_thread_fence(__ATOMIC_RELEASE)

/* Orders a store before a later load of another word. x86 reorders just that pair, so it is needed there too. */
#define claw_fence_full() __atomic_thread_fence(__ATOMIC_SEQ_CST)

#endif
