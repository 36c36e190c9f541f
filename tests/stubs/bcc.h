/* SPDX-License-Identifier: Apache-2.0 */
/* As much of what bcc puts before a program as ours use, in plain C, so that any compiler checks them without bcc. */
#ifndef CLAW_STUB_BCC_H
#define CLAW_STUB_BCC_H

#include <linux/bpf.h>
#include <linux/types.h>

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s64 s64;

#undef __always_inline /* which linux/stddef.h has, and means less */
#define __always_inline inline __attribute__((always_inline))
#define __constant_htons(x) ((__be16)__builtin_bswap16(x))
#define bpf_ntohl(x) __builtin_bswap32(x)
#define bpf_ntohs(x) __builtin_bswap16(x)

#define STUB_TABLE(key, leaf, name)                                                                                     \
	static struct {                                                                                                 \
		leaf *(*lookup)(key *);                                                                                 \
		leaf *(*lookup_or_try_init)(key *, leaf *);                                                             \
		int (*insert)(key *, leaf *);                                                                           \
		int (*update)(key *, leaf *);                                                                           \
		int (*delete)(key *);                                                                                   \
	} name
#define BPF_HASH(name, key, leaf, size) STUB_TABLE(key, leaf, name)
#define BPF_SK_STORAGE(name, leaf)                                                                                      \
	static struct {                                                                                                 \
		leaf *(*sk_storage_get)(void *, void *, int);                                                           \
	} name
#define BPF_ARRAY(name, leaf, size) STUB_TABLE(u32, leaf, name)
#define BPF_PERCPU_ARRAY(name, leaf, size) STUB_TABLE(u32, leaf, name)
#define BPF_F_TABLE(kind, key, leaf, name, size, flags) STUB_TABLE(key, leaf, name)

/* bcc makes these from what the kernel says of its tracepoints */
struct tracepoint__sched__sched_wakeup {
	int pid;
};
struct tracepoint__sched__sched_switch {
	char prev_comm[16];
	int prev_pid;
	long prev_state;
	char next_comm[16];
	int next_pid;
};

u64 bpf_ktime_get_ns(void);
u64 bpf_get_socket_cookie(void *ctx);
u64 bpf_get_current_pid_tgid(void);
int bpf_setsockopt(void *ctx, int level, int name, void *value, int len);
int bpf_sock_ops_cb_flags_set(struct bpf_sock_ops *ctx, int flags);
int bpf_skb_load_bytes(const void *skb, u32 offset, void *to, u32 len);
int bpf_skb_load_bytes_relative(const void *skb, u32 offset, void *to, u32 len, u32 start);
int bpf_skb_store_bytes(struct __sk_buff *skb, u32 offset, const void *from, u32 len, u64 flags);
int bpf_l3_csum_replace(struct __sk_buff *skb, u32 offset, u64 from, u64 to, u64 size);

#endif
