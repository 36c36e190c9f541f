# SPDX-License-Identifier: Apache-2.0
"""Another process's tcp sockets, taken for a look."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from clawd.errors import HostError

_PIDFD_GETFD = 438  # of every architecture
_ESTABLISHED = 1

_libc = ctypes.CDLL(None, use_errno=True)


def tcp_sockets(pid: int) -> Iterator[socket.socket]:
    """Those that are established, each until the next one is asked for. Needs root. Raises HostError."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise HostError(f"cannot look at process {pid}: {error.strerror}") from error
    try:
        try:
            links = [*Path(f"/proc/{pid}/fd").iterdir()]
        except OSError as error:
            raise HostError(f"cannot look at process {pid}: {error.strerror}") from error
        for link in links:
            if not _is_socket(link):
                continue
            fd = int(_libc.syscall(_PIDFD_GETFD, pidfd, int(link.name), 0))
            if fd < 0:
                continue
            with socket.socket(fileno=fd) as taken:
                if _is_established(taken):
                    yield taken
    finally:
        os.close(pidfd)


def _is_socket(link: Path) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except OSError:
        return False  # closed meanwhile


def _is_established(taken: socket.socket) -> bool:
    if taken.family not in (socket.AF_INET, socket.AF_INET6) or taken.type != socket.SOCK_STREAM:
        return False
    try:
        return taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False  # of another protocol, such as MPTCP
