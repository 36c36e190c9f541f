/* SPDX-License-Identifier: Apache-2.0 */
/* What the shaper and those who read its maps share. Python takes the layout from here, by way of the compiler. */
#ifndef CLAW_SHAPER_H
#define CLAW_SHAPER_H

#define CLAW_EXPRESS 1
#define CLAW_BULK 2

/* What the sockets of one lane get; zero leaves an option as it is */
struct claw_policy {
	u64 pacing; /* bytes a second */
	u32 lowat; /* bytes not yet sent above which the socket is not writable */
	u32 priority;
	u32 lane; /* CLAW_EXPRESS or CLAW_BULK: told again in each row */
	u32 dscp; /* 0 … 63, written by the classifier */
	u32 thin; /* 1: timeouts of a thin stream do not double */
	u32 reserved;
	char congestion[16];
};

/* One socket, from its establishment to its end. Times in microseconds where not said otherwise. */
struct claw_row {
	u64 cookie; /* 0: free. Written last when it begins, first when it ends */
	u64 since_ns;
	u64 updated_ns;
	u64 pacing; /* bytes a second in force, 0 unlimited */
	u64 bytes_acked;
	u64 delivered; /* bytes a second, of the kernel's last sample */
	u32 srtt_us;
	u32 jitter_us; /* mean deviation of the round trip */
	u32 min_rtt_us;
	u32 cwnd;
	u32 retrans; /* segments sent again, in all */
	u32 lost; /* segments held to be lost right now */
	u32 segments; /* sent, in all */
	u32 port;
	u32 lane;
	u32 priority;
	u32 dscp;
	u32 refused; /* options that the kernel would not take: bits by CLAW_NO_… */
	u32 smoothed; /* srtt_us as the kernel has it: eight times that */
	u32 reserved;
};

/* What clawd wants for the socket of the same slot in the rows: counts when the cookie is the row's */
struct claw_want {
	u64 cookie;
	u64 pacing; /* bytes a second, 0 unlimited */
};

/* Options: their bits, and their places in the counters from CLAW_REFUSED_PACING on */
enum {
	CLAW_NO_PACING,
	CLAW_NO_LOWAT,
	CLAW_NO_PRIORITY,
	CLAW_NO_THIN,
	CLAW_NO_CONGESTION,
};

/* Counters; Python has the same names, in this order */
enum {
	CLAW_RUNS, /* calls of the program, for whatever socket */
	CLAW_SHAPED, /* sockets that got a row */
	CLAW_ENDED,
	CLAW_FULL, /* sockets that found no room for a row: shaped, not seen */
	CLAW_REFUSED, /* options that the kernel did not take */
	CLAW_REPACED, /* changes of pacing that clawd wanted */
	CLAW_MARKED, /* packets that the classifier gave a priority or DSCP */
	CLAW_UNMARKABLE, /* packets whose header was not where devices have it: no DSCP */
	/* Of CLAW_REFUSED, by option, in their order */
	CLAW_REFUSED_PACING,
	CLAW_REFUSED_LOWAT,
	CLAW_REFUSED_PRIORITY,
	CLAW_REFUSED_THIN,
	CLAW_REFUSED_CONGESTION,
	CLAW_COUNTERS,
};

#endif
