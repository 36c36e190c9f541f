/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shapes the sockets of clawd's lanes, which libzmq leaves alone, and keeps a row for each of them.
 *
 * Acts on accepted sockets only, of the cgroup it is attached to, whose local port has a policy: a socket that merely
 * uses such a number elsewhere is never touched. Sockets that were established before one of its kind was attached are
 * not seen; those of an earlier load have their callbacks on still, and get a new row by the next of them.
 * Takes nothing from the kernel but contexts and helpers of its stable ABI, so that headers of any version will do.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_ether.h>

#ifndef CLAW_ROWS
#error "CLAW_ROWS: how many sockets have a row at most, a power of two"
#endif

#include "shaper.h"

/* How far from its first slot a row is looked for. Cookies are numbered in turn, so that rows rarely meet. */
#define PROBES 8
#define CLAW_MAPPED 1024 /* BPF_F_MMAPABLE of linux/bpf.h */

/* From linux/socket.h and linux/tcp.h, which other headers of the kernel would pull in */
#define CLAW_SOL_SOCKET 1
#define CLAW_SO_PRIORITY 12
#define CLAW_SO_MAX_PACING_RATE 47
#define CLAW_SOL_TCP 6
#define CLAW_TCP_CONGESTION 13
#define CLAW_TCP_THIN_LINEAR_TIMEOUTS 16
#define CLAW_TCP_NOTSENT_LOWAT 25
#define CLAW_TCP_CLOSE 7
#define CLAW_UNPACED 0xffffffffU
#define CLAW_VLAN_HLEN 4 /* of linux/if_vlan.h */

/* By local port. clawd's ports, while clawd is connected to the helper; full: the helper refuses. */
BPF_HASH(policies, u32, struct claw_policy, 64);
/* By slot. Mapped by clawd, which only reads; a row ends with its socket. Full: CLAW_FULL counts. */
BPF_F_TABLE("array", u32, struct claw_row, rows, CLAW_ROWS, CLAW_MAPPED);
/* By slot. Mapped and written by clawd. */
BPF_F_TABLE("array", u32, struct claw_want, wants, CLAW_ROWS, CLAW_MAPPED);
/* Slot to cookie: that an insertion happens once is what makes a slot one socket's. Ends with its row. */
BPF_HASH(owners, u32, u64, CLAW_ROWS);
/* By device, the class of its queue that express packets go to. Full: the helper tells. */
BPF_HASH(classes, u32, u32, 64);
/* By CLAW_RUNS … CLAW_REFUSED_CONGESTION */
BPF_PERCPU_ARRAY(counters, u64, CLAW_COUNTERS);

static __always_inline void count(u32 which)
{
	u64 *value = counters.lookup(&which);

	if (value)
		*value += 1;
}

static __always_inline struct claw_row *find_row(u64 cookie, u32 *ret_slot)
{
#pragma unroll
	for (int probe = 0; probe < PROBES; probe++) {
		u32 slot = (cookie + probe) & (CLAW_ROWS - 1);
		struct claw_row *row = rows.lookup(&slot);

		if (row && row->cookie == cookie) {
			*ret_slot = slot;
			return row;
		}
	}
	return 0;
}

static __always_inline struct claw_row *take_row(u64 cookie)
{
#pragma unroll
	for (int probe = 0; probe < PROBES; probe++) {
		u32 slot = (cookie + probe) & (CLAW_ROWS - 1);

		if (owners.insert(&slot, &cookie) == 0)
			return rows.lookup(&slot);
	}
	return 0;
}

static __always_inline void drop_row(struct claw_row *row, u32 slot)
{
	__builtin_memset(row, 0, sizeof(*row));
	owners.delete(&slot);
	count(CLAW_ENDED);
}

/* Returns the bit of an option that the kernel did not take */
static __always_inline u32 refuse(u32 option)
{
	count(CLAW_REFUSED);
	count(CLAW_REFUSED_PACING + option);
	return 1 << option;
}

static __always_inline u32 set_u32(struct bpf_sock_ops *ctx, int level, int name, u32 value, u32 option)
{
	return bpf_setsockopt(ctx, level, name, &value, sizeof(value)) == 0 ? 0 : refuse(option);
}

/* The option has 32 bits here, and its highest value means none */
static __always_inline u32 set_pacing(struct bpf_sock_ops *ctx, u64 rate)
{
	u32 value = rate == 0 || rate >= CLAW_UNPACED ? CLAW_UNPACED : rate;

	return set_u32(ctx, CLAW_SOL_SOCKET, CLAW_SO_MAX_PACING_RATE, value, CLAW_NO_PACING);
}

static __always_inline u32 apply(struct bpf_sock_ops *ctx, struct claw_policy *policy)
{
	u32 refused = 0;

	if (policy->congestion[0] && bpf_setsockopt(ctx, CLAW_SOL_TCP, CLAW_TCP_CONGESTION, policy->congestion,
						    sizeof(policy->congestion)) != 0)
		refused |= refuse(CLAW_NO_CONGESTION);
	if (policy->pacing)
		refused |= set_pacing(ctx, policy->pacing);
	if (policy->lowat)
		refused |= set_u32(ctx, CLAW_SOL_TCP, CLAW_TCP_NOTSENT_LOWAT, policy->lowat, CLAW_NO_LOWAT);
	if (policy->priority)
		refused |= set_u32(ctx, CLAW_SOL_SOCKET, CLAW_SO_PRIORITY, policy->priority, CLAW_NO_PRIORITY);
	if (policy->thin)
		refused |= set_u32(ctx, CLAW_SOL_TCP, CLAW_TCP_THIN_LINEAR_TIMEOUTS, 1, CLAW_NO_THIN);
	return refused;
}

static __always_inline void observe(struct bpf_sock_ops *ctx, struct claw_row *row)
{
	row->updated_ns = bpf_ktime_get_ns();
	row->smoothed = ctx->srtt_us;
	row->srtt_us = row->smoothed >> 3;
	row->min_rtt_us = ctx->rtt_min;
	row->cwnd = ctx->snd_cwnd;
	row->retrans = ctx->total_retrans;
	row->lost = ctx->lost_out;
	row->segments = ctx->segs_out;
	row->bytes_acked = ctx->bytes_acked;
	if (ctx->rate_interval_us)
		row->delivered = (u64)ctx->rate_delivered * ctx->mss_cache * 1000000 / ctx->rate_interval_us;
}

/* Returns whether the socket has a row now. `is_old`: one of an earlier load, which has what that wanted for it. */
static __always_inline int begin(struct bpf_sock_ops *ctx, u64 cookie, int is_old)
{
	u32 port = ctx->local_port;
	struct claw_policy *policy = policies.lookup(&port);
	struct claw_row *row;
	u32 refused;

	if (!policy)
		return 1; /* none of ours, which needs none */
	refused = apply(ctx, policy);
	if (is_old && !policy->pacing)
		refused |= set_pacing(ctx, 0); /* or it would stay paced, and its row say that it is not */
	row = take_row(cookie);
	if (!row)
		return 0;
	row->since_ns = bpf_ktime_get_ns();
	row->pacing = policy->pacing;
	row->port = port;
	row->lane = policy->lane;
	row->priority = policy->priority;
	row->dscp = policy->dscp;
	row->refused = refused;
	observe(ctx, row);
	row->cookie = cookie;
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTT_CB_FLAG |
					       BPF_SOCK_OPS_RETRANS_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG |
					       BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	count(CLAW_SHAPED);
	return 1;
}

static __always_inline void repace(struct bpf_sock_ops *ctx, struct claw_row *row, u32 slot)
{
	struct claw_want *want = wants.lookup(&slot);
	u64 pacing;

	if (!want || want->cookie != row->cookie)
		return;
	pacing = want->pacing;
	if (pacing == row->pacing)
		return;
	row->refused |= set_pacing(ctx, pacing);
	row->pacing = pacing;
	count(CLAW_REPACED);
}

/*
 * A quarter of the way to each new deviation, as the kernel's own estimate goes. That a measurement strays so far from the
 * mean moves the kernel's smoothed value, which is eight times the mean, by just as much.
 */
static __always_inline void learn_jitter(struct bpf_sock_ops *ctx, struct claw_row *row)
{
	u32 before = row->smoothed;
	u32 now = ctx->srtt_us;
	u32 error_us = now > before ? now - before : before - now;

	if (before && error_us)
		row->jitter_us = (row->jitter_us * 3 + error_us) / 4;
}

int claw_sockops(struct bpf_sock_ops *ctx)
{
	u64 cookie = bpf_get_socket_cookie(ctx);
	struct claw_row *row;
	u32 slot = 0;

	count(CLAW_RUNS);
	if (ctx->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		if (!begin(ctx, cookie, 0))
			count(CLAW_FULL);
		return 1;
	}
	if (ctx->op != BPF_SOCK_OPS_RTT_CB && ctx->op != BPF_SOCK_OPS_RETRANS_CB &&
	    ctx->op != BPF_SOCK_OPS_STATE_CB && ctx->op != BPF_SOCK_OPS_HDR_OPT_LEN_CB)
		return 1;
	if (ctx->op == BPF_SOCK_OPS_HDR_OPT_LEN_CB && ctx->args[0] == BPF_WRITE_HDR_TCP_CURRENT_MSS)
		return 1; /* nothing is sent: the kernel only asks how much would fit */
	row = find_row(cookie, &slot);
	if (!row) {
		if (ctx->op == BPF_SOCK_OPS_RTT_CB)
			begin(ctx, cookie, 1);
		return 1;
	}
	if (ctx->op == BPF_SOCK_OPS_STATE_CB && ctx->args[1] == CLAW_TCP_CLOSE) {
		drop_row(row, slot);
		return 1;
	}
	/* Asked of each segment that is sent: the one callback that comes more often than once a round trip */
	if (ctx->op == BPF_SOCK_OPS_HDR_OPT_LEN_CB && row->smoothed == ctx->srtt_us)
		return 1;
	learn_jitter(ctx, row);
	observe(ctx, row);
	if (ctx->op == BPF_SOCK_OPS_HDR_OPT_LEN_CB)
		return 1; /* in the middle of sending, which is no time to change how */
	repace(ctx, row, slot);
	return 1;
}

/*
 * Where a packet's IP header begins, or -1. A device puts an Ethernet header in front of it, with a VLAN's perhaps, or
 * nothing (tun, WireGuard, ppp). The context does not tell which; but the kernel knows where the header is, so that what
 * is there can be looked for.
 */
static __always_inline int find_header(struct __sk_buff *skb)
{
	u64 wanted, found;

	if (bpf_skb_load_bytes_relative(skb, 0, &wanted, sizeof(wanted), BPF_HDR_START_NET) != 0)
		return -1;
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &found, sizeof(found)) == 0 && found == wanted)
		return ETH_HLEN;
	if (bpf_skb_load_bytes(skb, 0, &found, sizeof(found)) == 0 && found == wanted)
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + CLAW_VLAN_HLEN, &found, sizeof(found)) == 0 && found == wanted)
		return ETH_HLEN + CLAW_VLAN_HLEN;
	return -1;
}

/* Returns whether the packet has that DSCP now */
static __always_inline int mark(struct __sk_buff *skb, u32 dscp)
{
	int at = find_header(skb);
	u8 first = 0, old, fresh;

	if (at < 0 || bpf_skb_load_bytes(skb, at, &first, 1) != 0 || bpf_skb_load_bytes(skb, at + 1, &old, 1) != 0)
		return 0;
	if (skb->protocol == __constant_htons(ETH_P_IP)) {
		fresh = dscp << 2 | (old & 3); /* the lower two bits are ECN's */
		if (fresh == old)
			return 1;
		bpf_l3_csum_replace(skb, at + 10, __constant_htons(old), __constant_htons(fresh), 2);
		return bpf_skb_store_bytes(skb, at + 1, &fresh, 1, 0) == 0;
	}
	if (skb->protocol == __constant_htons(ETH_P_IPV6)) {
		fresh = (first & 0xf0) | dscp >> 2;
		if (bpf_skb_store_bytes(skb, at, &fresh, 1, 0) != 0)
			return 0;
		fresh = (old & 0x3f) | (dscp & 3) << 6;
		return bpf_skb_store_bytes(skb, at + 1, &fresh, 1, 0) == 0;
	}
	return 0;
}

/* Leaves every verdict to those who come after it */
int claw_egress(struct __sk_buff *skb)
{
	u64 cookie = bpf_get_socket_cookie(skb);
	u32 slot = 0, device = skb->ifindex;
	struct claw_row *row;
	u32 *class;

	row = cookie ? find_row(cookie, &slot) : 0;
	if (!row || !(row->priority || row->dscp))
		return -1; /* TC_ACT_UNSPEC */
	/* htb knows no priorities, and takes a packet's for the number of a class */
	class = row->lane == CLAW_EXPRESS ? classes.lookup(&device) : 0;
	if (class)
		skb->priority = *class;
	else if (row->priority)
		skb->priority = row->priority;
	count(row->dscp && !mark(skb, row->dscp) ? CLAW_UNMARKABLE : CLAW_MARKED);
	return -1;
}
