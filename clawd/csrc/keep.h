/* SPDX-License-Identifier: Apache-2.0 */
/* What stream.c asks of keep.c: nobody else does. */
#ifndef CLAW_KEEP_H
#define CLAW_KEEP_H

#include "stream.h"

/* A stream's next block, after older ones went where a limit or the spool asks for it; CLAW_NONE = there is none. */
uint32_t claw_keep_block(struct claw_streams *streams, uint32_t index);
/*
 * Before the block with the highest sequence goes, or when a token is dropped: a start after a crash must not give these
 * numbers to other tokens.
 */
void claw_keep_seq(struct claw_streams *streams, const struct claw_stream *stream);
/* It has ended: its time runs. */
void claw_keep_ended(struct claw_streams *streams, uint32_t index, uint64_t ended_ns);
/* It was GONE, and its name goes. */
void claw_keep_no_more(struct claw_streams *streams, uint32_t index);
/* The stream that goes first when the table is full, GONE by now; CLAW_NONE: all are live or read. */
uint32_t claw_keep_victim(struct claw_streams *streams);

#endif
