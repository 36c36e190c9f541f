/* SPDX-License-Identifier: Apache-2.0 */
/* Check: is what a block of the spool holds what a clawd writes? */
#ifndef CLAW_CHECK_H
#define CLAW_CHECK_H

#include "stream.h"

/* What the records of a block come to */
struct claw_tale {
	uint64_t tokens, text_bytes;
	uint64_t ring_seq; /* of the last one */
	uint64_t opened_ns;
	uint64_t first_seq, first_written_ns; /* of the first token */
	uint32_t close; /* offset of CLOSE, CLAW_NONE = there is none */
};

/* Are these the records of a block that a clawd committed? Those of a stream's first block start with its OPEN, and only in
 * its last one may there be a CLOSE. */
int claw_block_look(const struct claw_spool *spool, uint32_t block, int is_first, int is_last, struct claw_tale *ret_tale);

#endif
