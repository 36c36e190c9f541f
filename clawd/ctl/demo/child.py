# SPDX-License-Identifier: Apache-2.0
"""Child processes that do not outlive the demo: how they are started, and how they follow it into death."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

# prctl(2)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, dies; now, if it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start(module: str, order: dict[str, Any], inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Run `module` with `order` as its one argument. Its stdin is a pipe whose end tells it to stop; its stdout carries
    reports. It has a session of its own, so a Ctrl-C in the terminal reaches the demo alone, which stops it in order.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        pass_fds=tuple(inherited),
    )


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Tell a child to stop, give it `seconds`, and let go of it."""
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


def report(**values: Any) -> None:
    """Tell the demo, in one line on stdout."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def read_report(pipe: IO[bytes] | None) -> dict[str, Any] | None:
    """The next report of a child, None when it ended without one."""
    line = pipe.readline() if pipe else b""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if type(values) is dict else None
