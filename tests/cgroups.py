# SPDX-License-Identifier: Apache-2.0
"""A control group of a test's own, and why BPF cannot be tested here."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawd.errors import HostError
from clawd.kernel import bpf
from clawd.kernel.shaper import unified_mount


def own_cgroup() -> str:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return next(line.split("::")[1] for line in lines if line.startswith("0::"))


class Cgroup:
    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This process is in it meanwhile: a socket belongs to where it was made, and is accepted to where its listener
        was.
        """
        home = unified_mount() / own_cgroup().lstrip("/") / "cgroup.procs"
        self.take(os.getpid())
        try:
            yield
        finally:
            home.write_text(str(os.getpid()))

    def listen(self) -> socket.socket:
        with self.entered():
            return socket.create_server(("127.0.0.1", 0))


@contextmanager
def cgroup(name: str = "") -> Iterator[Cgroup]:
    path = unified_mount() / f"clawd-test-{os.getpid()}{name}"
    path.mkdir()
    try:
        yield Cgroup(path)
    finally:
        path.rmdir()


@contextmanager
def alone() -> Iterator[None]:
    """No other process's test is in here: for those that attach to the control group that all of them are in."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def why_no_bpf() -> str:
    """Empty where BPF can be loaded, else the reason, as clawd names it."""
    if os.geteuid() != 0:
        return "needs root"
    if importlib.util.find_spec("bcc") is None:
        return "bcc is not installed; apt-get install python3-bpfcc"
    try:
        with cgroup("-probe"):
            pass
        bpf.load("shaper.bpf.c", {"claw_sockops": "SOCK_OPS"}, ["-DCLAW_ROWS=8"]).close()
    except (HostError, OSError) as error:
        return str(error)
    return ""
