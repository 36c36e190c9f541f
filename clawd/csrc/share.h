/* SPDX-License-Identifier: Apache-2.0 */
/* Share: what one user may have of what all have. Counted only once all together have as much as one may. */
#ifndef CLAW_SHARE_H
#define CLAW_SHARE_H

#include <stdint.h>

struct claw_core;
struct claw_connection;
struct claw_outbox;
struct claw_ring;

/* May the user of this ring have one more live stream? */
int claw_share_stream(const struct claw_core *core, const struct claw_ring *ring);
/* May the user of this connection have one more attachment? */
int claw_share_attachment(const struct claw_outbox *outbox, const struct claw_connection *connection);

#endif
