/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLAW_RING_H
#define CLAW_RING_H

#include <stddef.h>
#include <stdint.h>

#include "ring.cdef.h"

#ifdef CLAW_TEST_LAYOUT /* tests build a core of another layout, to see it refused */
#define CLAW_LAYOUT CLAW_TEST_LAYOUT
#endif

_Static_assert(sizeof(struct claw_record) == CLAW_RECORD_ALIGN, "a record header fills one alignment unit");
_Static_assert(sizeof(struct claw_data) <= CLAW_PAGE, "DATA's words fit the page before the ring bytes");
_Static_assert(offsetof(struct claw_data, head) == CLAW_LINE, "head has its own line");
_Static_assert(offsetof(struct claw_ctl, ack_pos) == CLAW_LINE, "ack_pos has its own line");
_Static_assert(offsetof(struct claw_ctl, need_wake) == 2 * CLAW_LINE, "need_wake has its own line");
_Static_assert(offsetof(struct claw_ctl, state) == 3 * CLAW_LINE, "state has its own line");
_Static_assert(offsetof(struct claw_ctl, stopped) == CLAW_PAGE, "stopped[] starts at a page");
_Static_assert(sizeof(struct claw_ctl) % CLAW_PAGE == 0, "CTL is whole pages");
_Static_assert(sizeof(struct claw_open) == 16, "layout of OPEN");
_Static_assert(sizeof(struct claw_hello) == 104, "layout of hello");
_Static_assert(sizeof(struct claw_attached) == 216, "layout of attached");
/* These stay where they are in every layout, so that peers of two layouts can tell each other so */
_Static_assert(offsetof(struct claw_hello, layout) == 4, "a hello's layout is found in every layout");
_Static_assert(offsetof(struct claw_attached, layout) == 4, "an answer's layout is found in every layout");
_Static_assert(offsetof(struct claw_attached, status) == 20, "a refusal is found in every layout");

#endif
