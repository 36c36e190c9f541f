# SPDX-License-Identifier: Apache-2.0
"""What tuning changed and what was there before, on disk before each write. The file is replaced as a whole and never
written in place, so a crash leaves the earlier one or the later one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from clawd.errors import AlreadyRunning, HostError
from clawd.kernel.change import Place

DIRECTORY = Path("/var/lib/clawd-kernel")
FORMAT = 1
KINDS = ("sysctl", "qdisc", "slice", "weight")
BUSY = "another clawctl tune or clawd-kernel is tuning"
FILE_MAX = 1 << 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Entry:
    """`before` is set while a write is under way or its end is not known: the place then holds it or `new`, or what is
    between them. `inode` is the network namespace's number, for people and to see that it is gone.
    """

    place: Place
    old: str
    new: str
    before: str | None
    profile: str
    who: str
    when_ns: int
    inode: int = 0


BOOST = "boost"
"""Name of the journal of weights that are flipped, beside the one of tuning: it is written many times a day, and what
it says is taken back as soon as nobody holds a lease.
"""


def no_step(_name: str) -> None:
    """Tests put a crash here."""


class Journal:
    """Of one boot: what an earlier one wrote is void, as the kernel began anew. Without `create` it is only read."""

    def __init__(
        self,
        directory: Path = DIRECTORY,
        *,
        name: str = "tune",
        step: Callable[[str], None] = no_step,
        boot_id: str | None = None,
    ) -> None:
        self.path = directory / f"{name}.journal"
        self._lock_path = directory / f"{name}.lock"
        self._directory = directory
        self._step = step
        self._boot_id = boot_id or BOOT_ID.read_text().strip()
        self.profiles: dict[int, str] = {}
        """The one applied last, by network namespace, as `load` found it; `save` writes it."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held by whoever writes sysctls, queues, slices or weights. Raises AlreadyRunning, HostError."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise HostError(
                f'no journal in "{self._directory}": {error.strerror}', "run it as root, or give --state-dir"
            ) from error
        try:
            self._check_owner(os.stat(self._directory), self._directory)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AlreadyRunning(BUSY, "try again when it is done") from error
            yield
        finally:
            os.close(lock)

    def _check_owner(self, found: os.stat_result, path: Path) -> None:
        # root puts back what is written here, so nobody else may write it
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HostError(f'"{path}" can be written by others than root', f'chown root "{path}"; chmod go-w "{path}"')

    def load(self) -> tuple[list[Entry], str]:
        """The entries, and why those of the file count for nothing, empty when they count. Raises HostError."""
        self.profiles = {}
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return [], ""
        except OSError as error:
            raise HostError(f'the journal "{self.path}": {error.strerror}', "run it as root") from error
        with open(file, "rb") as stream:
            self._check_owner(os.fstat(file), self.path)
            data = stream.read(FILE_MAX + 1)
        try:
            boot_id, profiles, entries = _parse(data)
        except (ValueError, KeyError, TypeError) as error:
            raise HostError(
                f'the journal "{self.path}" is damaged, so what it says is not put back: {error}',
                f'compare with it by hand, then: rm "{self.path}"',
            ) from error
        if boot_id != self._boot_id:
            return [], "the journal is of an earlier boot, which took all of it along"
        self.profiles = profiles
        return entries, ""

    def save(self, entries: Sequence[Entry]) -> None:
        """On disk when it returns; no file when there is nothing to say. Under the lock. Raises HostError."""
        try:
            self._replace(entries)
        except OSError as error:
            raise HostError(f'the journal "{self.path}": {error.strerror}', "nothing more was changed") from error

    def _replace(self, entries: Sequence[Entry]) -> None:
        self._step("journal")
        if entries or self.profiles:
            new = self.path.with_suffix(".new")
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                data = _format(self._boot_id, self.profiles, entries)
                self._step("journal written in part")
                while data:
                    data = data[os.write(file, data) :]
                os.fsync(file)
            finally:
                os.close(file)
            self._step("journal written")
            os.rename(new, self.path)
        else:
            self.path.unlink(missing_ok=True)
        self._step("journal renamed")
        directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # the name is on disk, too
        finally:
            os.close(directory)
        self._step("journal safe")


def _format(boot_id: str, profiles: dict[int, str], entries: Sequence[Entry]) -> bytes:
    body = json.dumps({"boot_id": boot_id, "profiles": list(profiles.items())}) + "\n"
    body += "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    head = {"format": FORMAT, "digest": hashlib.sha256(body.encode()).hexdigest()}
    return f"{json.dumps(head)}\n{body}".encode()


def _parse(data: bytes) -> tuple[str, dict[int, str], list[Entry]]:
    if len(data) > FILE_MAX:
        raise ValueError("it is too long")
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    if head["format"] != FORMAT:
        raise ValueError(f"format {head['format']} is not known here")
    if hashlib.sha256(body).hexdigest() != head["digest"]:
        raise ValueError("its checksum is wrong")
    whole, *lines = (json.loads(line) for line in body.splitlines())
    profiles = {int(netns): str(name) for netns, name in whole["profiles"]}
    return str(whole["boot_id"]), profiles, [_entry(value) for value in lines]


_TEXTS = {"place": dict, "old": str, "new": str, "profile": str, "who": str, "when_ns": int, "inode": int}


def _entry(value: Any) -> Entry:
    if set(value) != {column.name for column in fields(Entry)}:
        raise ValueError("an entry has other fields")
    for name, kind in _TEXTS.items():
        if type(value[name]) is not kind:
            raise ValueError(f"an entry has a bad {name}")
    if value["before"] is not None and not isinstance(value["before"], str):
        raise ValueError("an entry has a bad before")
    place = Place(**value["place"])
    if place.kind not in KINDS or not isinstance(place.netns, int | None) or not isinstance(place.identity, str):
        raise ValueError("an entry has a bad place")
    return Entry(**{**value, "place": place})
