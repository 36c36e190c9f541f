/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes under way on a socket, oldest first. Whoever includes this has account() before: bcc lets maps be used in the
 * file of the program alone.
 */
#ifndef CLAW_SENDS_H
#define CLAW_SENDS_H

static __always_inline int is_after(u32 a, u32 b)
{
	return (int)(a - b) > 0;
}

/* Writes whose last byte is before `seq` have left the socket */
static __always_inline void leave(struct claw_track *track, u32 seq, u64 now_ns)
{
	for (int i = 0; i < CLAW_SENDS; i++) {
		struct claw_send *send = &track->sends[track->left % CLAW_SENDS];

		if (track->left == track->made || is_after(send->end, seq))
			break;
		send->left_ns = now_ns;
		account(CLAW_STAGE_SOCKET, track->class, send->entered_ns, now_ns);
		track->left++;
	}
}

static __always_inline void acknowledge(struct claw_track *track, u32 seq, u64 now_ns)
{
	for (int i = 0; i < CLAW_SENDS; i++) {
		struct claw_send *send = &track->sends[track->acked % CLAW_SENDS];

		if (track->acked == track->left || is_after(send->end, seq))
			break;
		account(CLAW_STAGE_ACKED, track->class, send->device_ns ? send->device_ns : send->left_ns, now_ns);
		account(CLAW_STAGE_NETWORK, track->class, send->entered_ns, now_ns);
		track->acked++;
	}
}

#endif
