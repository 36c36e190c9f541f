/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Failpoints: places where a test has clawd killed. Only a core built with CLAW_FAILPOINTS has them; there
 * CLAWD_FAILPOINT="name:n" in the environment is SIGKILL at the n-th pass of that place.
 */
#ifndef CLAW_FAILPOINT_H
#define CLAW_FAILPOINT_H

#ifdef CLAW_FAILPOINTS
void claw_failpoint(const char *name);
#define CLAW_FAILPOINT(name) claw_failpoint(name)
#else
#define CLAW_FAILPOINT(name) ((void)0)
#endif

#endif
