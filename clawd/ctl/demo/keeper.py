# SPDX-License-Identifier: Apache-2.0
"""Keeps the demo's private daemon: starts it in a directory of its own, and when the demo ends, however it ends, stops
it and removes what it leaves behind for a next start.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clawd.ctl.demo.child import die_with, report
from clawd.errors import ClawdError, ControlError
from clawd.page import Page, read_instance
from clawd.server import memory
from clawd.units import format_bytes

START_S = 15.0
STOP_S = 5.0
_LOOK_S = 0.02
_DIRECTORY_MAX = 60
"""Bytes of the directory to be in: a socket's path has 107."""
_MIB = 1 << 20


def sizes() -> dict[str, int]:
    """A spool of 16 MiB is plenty; where shared memory is scarce, as in a container, it is what clawd will take."""
    spool = max(_MIB, min(16 * _MIB, memory.room() // 4 // _MIB * _MIB))
    return {"spool_bytes": spool, "stream_bytes": spool // 4}


def make_directory() -> Path:
    """A new directory with a path short enough for sockets."""
    given = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="clawd-demo-", dir=given if len(os.fsencode(given)) <= _DIRECTORY_MAX else "/tmp")
    )


def start_daemon(directory: Path, notify: Path) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    flags = [part for key, size in sizes().items() for part in (f"--{key.replace('_', '-')}", format_bytes(size))]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "clawd", "--runtime-dir", os.fspath(directory), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "NOTIFY_SOCKET": os.fspath(notify)},
            preexec_fn=lambda: die_with(parent),
        )


def why_ended(daemon: subprocess.Popen[bytes], directory: Path) -> str:
    """What a daemon that should run said last."""
    code = daemon.wait()
    if code < 0:
        return f"the daemon was ended by signal {-code}"
    lines = (directory / "log").read_text(errors="replace").strip().splitlines()
    return f"the daemon ended with code {code}: {lines[-1] if lines else 'it said nothing'}"


def wait_ready(daemon: subprocess.Popen[bytes], directory: Path, told: socket.socket, pidfd: int) -> None:
    """Return once the daemon said so, or its figures can be read. Raises ClawdError when neither comes."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        ready, _, _ = select.select([told.fileno(), pidfd], [], [], _LOOK_S)
        if pidfd in ready:
            raise ClawdError(why_ended(daemon, directory))
        if ready:
            if b"READY=1" in told.recv(4096):
                return
            continue
        # no systemd-python, no notification
        with contextlib.suppress(ControlError), Page(directory):
            return
    raise ClawdError(f"the daemon was not ready within {START_S:.0f} s")


def keep(directory: Path) -> None:
    """Run the daemon until stdin ends. Raises ClawdError when it does not start or does not stay."""
    notify = directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(os.fspath(notify))
        daemon = start_daemon(directory, notify)
        pidfd = os.pidfd_open(daemon.pid)
        try:
            wait_ready(daemon, directory, told, pidfd)
            report(runtime_dir=os.fspath(directory), stream_bytes=sizes()["stream_bytes"], pid=daemon.pid)
            ready, _, _ = select.select([sys.stdin.fileno(), pidfd], [], [])
            if pidfd in ready:
                raise ClawdError(why_ended(daemon, directory))
        finally:
            daemon.terminate()
            try:
                daemon.wait(STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            os.close(pidfd)


def clean(directory: Path) -> None:
    """Remove the directory, and the shared memory of the instance that was there."""
    with contextlib.suppress(ControlError):
        memory.sweep(read_instance(directory))
    shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of stdin is the one way to stop: nothing is left half clean
    directory = make_directory()
    try:
        keep(directory)
    except (ClawdError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):
            report(error=str(error))
        return 1
    finally:
        clean(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
