/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Guard: a producer can truncate its ring under our eyes, and the next touch raises SIGBUS. The handler puts zeroed
 * private memory in the place of the whole mapping and marks it, so that the touch goes on and its caller finds the mark.
 */

/* Install the handler, after everything else that might install one (faulthandler), and try it on a page of our own.
 * 0, or -errno: -EFAULT when the trial did not come back marked. */
int claw_guard_install(void);
