# SPDX-License-Identifier: Apache-2.0
"""Shared-memory objects of one instance: made under random names, allocated up front, swept by name prefix."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from clawd.errors import HostError
from clawd.units import format_bytes

SHM = Path("/dev/shm")
"""Where Linux keeps POSIX shared memory (shm_overview(7)); looked at only to list names and free room."""


@dataclass
class Object:
    """A shared-memory object with its first descriptor."""

    name: str
    fd: int
    size: int

    def reopen(self, *, read_only: bool = False) -> int:
        """A descriptor with an open file description of its own. Raises HostError."""
        try:
            return int(posix_ipc.SharedMemory(self.name, read_only=read_only).fd)
        except (OSError, posix_ipc.Error) as error:
            raise HostError(f"cannot open shared memory {self.name}: {error}") from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def unlink(self) -> None:
        """Take the name away; mappings stay. A name that is gone already is fine."""
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(self.name)


def prefix(instance: str) -> str:
    return f"clawd-{instance}-"


def create(instance: str, size: int, *, name: str = "", mode: int = 0o600, setting: str = "spool_bytes") -> Object:
    """Make an object of `size` bytes, every page allocated, so that touching it can never fail later (SIGBUS).

    It gets a random name unless one is given; `setting` is what an error says to lower.
    """
    name = name or f"/{prefix(instance)}{secrets.token_hex(8)}"
    try:
        # size=0: ftruncate alone would reserve nothing
        shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=mode, size=0)
    except (OSError, posix_ipc.Error) as error:
        raise HostError(f"cannot make shared memory: {error}", f"see 'ls -ld {SHM}'") from error
    made = Object(name, shm.fd, size)
    try:
        os.fchmod(made.fd, mode)  # whatever the umask is
        os.posix_fallocate(made.fd, 0, size)
    except OSError as error:
        made.close()
        made.unlink()
        raise HostError(
            f"cannot allocate {format_bytes(size)} of shared memory: {error.strerror}, {format_bytes(room())} free",
            f"make {SHM} larger or lower {setting}",
        ) from error
    return made


def room() -> int:
    """Bytes that can still be allocated."""
    stat = os.statvfs(SHM)
    return stat.f_bavail * stat.f_frsize


def left_behind(instance: str) -> list[str]:
    """Names of this instance's objects, of this run or an earlier one."""
    return sorted(f"/{path.name}" for path in SHM.glob(f"{prefix(instance)}*"))


def sweep(instance: str) -> int:
    """Unlink every object of this instance. Returns how many; another instance's are never touched."""
    names = left_behind(instance)
    for name in names:
        Object(name, -1, 0).unlink()
    return len(names)
