# SPDX-License-Identifier: Apache-2.0
"""Shared-memory objects of one instance: made, allocated up front, found again and checked, swept by name prefix."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from clawd import log
from clawd.errors import HostError
from clawd.units import format_bytes

SHM = Path("/dev/shm")
"""Where Linux keeps POSIX shared memory (shm_overview(7)); looked at only to list names and free room."""


class Unfit(Exception):
    """An object that is not as a clawd leaves it; the text says why."""


class NameTaken(HostError):
    """There is an object of this name."""


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


def random_id() -> int:
    """63 bits, never 0. Not by `secrets`: that loads OpenSSL, which a start after a crash would wait for."""
    return int.from_bytes(os.urandom(8), "little") >> 1 | 1


def prefix(instance: str) -> str:
    return f"clawd-{instance}-"


def create(name: str, size: int, *, mode: int = 0o600, setting: str = "spool_bytes") -> Object:
    """Make an object of `size` bytes, every page allocated, so that touching it can never fail later (SIGBUS).

    `setting` is what an error says to lower. Raises HostError, NameTaken when the name is in use.
    """
    try:
        # size=0: ftruncate alone would reserve nothing
        shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=mode, size=0)
    except posix_ipc.ExistentialError as error:
        raise NameTaken(f"cannot make shared memory {name}: there is one") from error
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


def open_left(name: str, owner: int | None = None) -> Object:
    """An object of an earlier clawd, if nobody but us, or `owner`, can have had a hand in it. Raises Unfit."""
    try:
        fd = os.open(SHM / name[1:], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unfit(error.strerror or str(error)) from error
    found = os.fstat(fd)
    reason = (
        "not a file" if not stat.S_ISREG(found.st_mode)
        else f"of user {found.st_uid}" if found.st_uid not in (os.geteuid(), owner)
        else f"mode {found.st_mode & 0o7777:o}" if found.st_mode & 0o7777 != 0o600
        else f"{found.st_nlink} links" if found.st_nlink != 1
        else ""
    )  # fmt: skip
    if reason:
        os.close(fd)
        raise Unfit(reason)
    return Object(name, fd, found.st_size)


def remove_left(name: str, reason: str) -> None:
    """Take away what an earlier clawd left and is of no use; what belongs to another user is left alone."""
    try:
        owner = os.lstat(SHM / name[1:]).st_uid
        if owner == os.geteuid():
            os.unlink(SHM / name[1:])
            log.warning("shared memory removed", name=name, reason=reason)
        else:
            log.warning("shared memory left alone", name=name, reason=reason)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("shared memory not removed", name=name, reason=error.strerror)


def room() -> int:
    """Bytes that can still be allocated."""
    stat = os.statvfs(SHM)
    return stat.f_bavail * stat.f_frsize


def left_behind(instance: str) -> list[str]:
    """Names of this instance's objects, of this run or an earlier one."""
    return sorted(f"/{path.name}" for path in SHM.glob(f"{prefix(instance)}*"))


def sweep(instance: str, owner: int | None = None) -> int:
    """Unlink every object of this instance that is ours, or of user `owner`. Returns how many; what belongs to another
    instance, or to somebody else, is never touched.
    """
    count = 0
    for name in left_behind(instance):
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(SHM / name[1:]).st_uid in (os.geteuid(), owner):
                Object(name, -1, 0).unlink()
                count += 1
    return count
