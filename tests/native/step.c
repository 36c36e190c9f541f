/* SPDX-License-Identifier: Apache-2.0 */
#include "step.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/*
 * In the place of libc's, for the program that links this: the vDSO reads the time in a loop until no tick of the kernel
 * falls into it, and a process that is stepped through that loop may never get out.
 */
int clock_gettime(clockid_t clock, struct timespec *ret_now)
{
	static long ticks;

	(void)clock;
	ret_now->tv_sec = 1000;
	ret_now->tv_nsec = ++ticks % 1000000000;
	return 0;
}

#ifndef __x86_64__

long step_and_kill(void (*run)(void *), void *argument, int (*look)(void *))
{
	(void)run, (void)argument, (void)look;
	fprintf(stderr, "registers are copied on x86-64 only\n");
	return -UNAVAILABLE;
}

#else
#include <sys/user.h>

/* A system call instruction of our own to send the stepped process to */
void step_syscall(void);
__asm__(".globl step_syscall\n"
	"step_syscall:\n"
	"	syscall\n"
	"	int3\n");

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

__attribute__((noinline)) static void finished(void)
{
	__asm__ volatile("");
}

static pid_t start(void (*run)(void *), void *argument)
{
	pid_t pid = fork();
	if (pid < 0)
		fail("fork");
	if (!pid) {
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
			_exit(UNAVAILABLE);
		raise(SIGSTOP);
		run(argument);
		finished();
		_exit(0);
	}
	return pid;
}

static void wait_stopped(pid_t pid)
{
	int status;
	if (waitpid(pid, &status, __WALL) != pid || !WIFSTOPPED(status)) {
		fprintf(stderr, "the stepped process ended early, status %#x\n", status);
		exit(1);
	}
}

/* A copy of the stopped process, stopped at the same instruction. The original is good for nothing after that. */
static pid_t copy(pid_t pid, const struct user_regs_struct *regs)
{
	struct user_regs_struct fork_regs = *regs;
	unsigned long child;
	fork_regs.rip = (uintptr_t)step_syscall;
	fork_regs.rax = SYS_fork;
	fork_regs.orig_rax = (unsigned long long)-1;
	if (ptrace(PTRACE_SETREGS, pid, NULL, &fork_regs) < 0 || ptrace(PTRACE_CONT, pid, NULL, NULL) < 0)
		fail("ptrace");
	wait_stopped(pid);
	if (ptrace(PTRACE_GETEVENTMSG, pid, NULL, &child) < 0)
		fail("PTRACE_GETEVENTMSG");
	wait_stopped((pid_t)child);
	struct user_regs_struct resumed = *regs;
	resumed.orig_rax = (unsigned long long)-1;
	if (ptrace(PTRACE_SETREGS, (pid_t)child, NULL, &resumed) < 0)
		fail("PTRACE_SETREGS");
	return (pid_t)child;
}

static void end(pid_t pid)
{
	int status;
	if (kill(pid, SIGKILL) < 0 || waitpid(pid, &status, __WALL) != pid)
		fail("kill");
	if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
		fprintf(stderr, "the process did not die of SIGKILL, status %#x\n", status);
		exit(1);
	}
}

long step_and_kill(void (*run)(void *), void *argument, int (*look)(void *))
{
	long points = 0;
	int started = 0;
	int status;

	prctl(PR_SET_CHILD_SUBREAPER, 1); /* a copy's parent is killed: it becomes our child to wait for */
	pid_t pid = start(run, argument);
	if (waitpid(pid, &status, __WALL) != pid)
		fail("waitpid");
	if (!WIFSTOPPED(status) ||
	    ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_TRACEFORK | PTRACE_O_EXITKILL) < 0) {
		fprintf(stderr, "ptrace is not permitted here\n");
		return -UNAVAILABLE;
	}
	for (;;) {
		struct user_regs_struct regs;
		if (ptrace(PTRACE_GETREGS, pid, NULL, &regs) < 0)
			fail("PTRACE_GETREGS");
		if (regs.rip == (uintptr_t)finished)
			break;
		started |= regs.rip == (uintptr_t)run;
		if (started) {
			pid_t next = copy(pid, &regs);
			end(pid);
			pid = next;
			points++;
			if (look(argument)) {
				fprintf(stderr, "after %ld instructions, at %#llx\n", points - 1, regs.rip);
				end(pid);
				return -1;
			}
		}
		if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) < 0)
			fail("PTRACE_SINGLESTEP");
		wait_stopped(pid);
	}
	end(pid);
	return look(argument) ? -1 : points;
}

#endif
