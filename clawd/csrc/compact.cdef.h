/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compact encoding of a data frame, for clients whose way is congested: the same header with kind CLAW_FRAME_PACKED and its
 * own length, the same segments with their own length, and in them for each record
 *
 *	one byte	kind, class << 3, and 0x80 if `count` is not 1
 *	varint		payload bytes
 *	varint		count, if told so
 *	varint		written_ns less that of the record before (from 0 in each segment), zigzag
 *	payload
 *
 * without padding. A varint has seven bits a byte, the lowest first, 0x80 on all but the last; zigzag puts the sign in
 * the lowest bit. ring_seq, which says nothing to a client, comes out as 0.
 */

/* Encode a frame of ours into at most ret_len bytes. Returns how many, or 0 when it would not become shorter. */
int claw_frame_pack(const uint8_t *frame, size_t len, uint8_t *ret_packed, size_t ret_len);
/*
 * The data frame again, at most CLAW_FRAME_MAX bytes of it, still to be checked as any. Returns how many, or -EBADMSG. Reads
 * nothing beyond packed[len - 1].
 */
int claw_frame_unpack(const uint8_t *packed, size_t len, uint8_t *ret_frame, size_t ret_len);
