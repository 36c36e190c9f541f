/* SPDX-License-Identifier: Apache-2.0 */
#ifndef STEP_H
#define STEP_H

enum { UNAVAILABLE = 77 };

/*
 * Runs run(argument) in a process that is single-stepped. After every instruction a copy of that process is made to go on
 * from there, the process itself is killed, and look(argument) judges what it left in shared memory: 0 to go on. Returns
 * how often it was killed, -1 when a look failed, -UNAVAILABLE when this machine does not let us.
 */
long step_and_kill(void (*run)(void *), void *argument, int (*look)(void *));

#endif
