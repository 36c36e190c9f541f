# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the page of figures that a clawd keeps in shared memory. Believes nothing before it is checked, asks
the daemon nothing, and tells one that runs from one that is stopped or gone.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from clawd.core import check, ffi, lib
from clawd.errors import ControlError, CoreError, hint_unreachable

SHM = Path("/dev/shm")
"""Where Linux keeps POSIX shared memory (shm_overview(7)); shm_open(3) opens there with O_NOFOLLOW too."""
FRESH_NS = 2_500_000_000
"""A daemon that turns, does so each second."""
PATIENCE_S = 1.5
"""How long a page that looks old is watched for a beat: the reader may live in another time namespace."""


class Unreachable(ControlError):
    """There is no daemon, or none that answers."""


class Life(enum.Enum):
    """What the daemon behind a page is doing."""

    ANSWERING = "answering"
    SILENT = "silent"  # it has its lock, and does not turn: stopped, or held up
    GONE = "gone"


def stats_name(instance: str) -> str:
    return f"clawd-{instance}-stats"


def read_instance(runtime_dir: Path) -> str:
    """The id of the clawd of `runtime_dir`. Raises Unreachable."""
    hint = "is clawd running, and is this its --runtime-dir?"
    try:
        text = (runtime_dir / "instance").read_bytes()[:64].decode("ascii", "replace")
    except OSError as error:
        hint = hint_unreachable(error.errno, hint)
        raise Unreachable(f'cannot find clawd at "{runtime_dir}": {error.strerror}', hint) from error
    found = re.match(r"([0-9a-f]{16})\n", text)
    if not found:
        raise Unreachable(f'cannot find clawd at "{runtime_dir}": its instance file is broken', "start clawd again")
    return found[1]


def is_locked(runtime_dir: Path) -> bool:
    """Whether a clawd holds the lock of `runtime_dir`. Asked only when its page is old: for a moment we hold it too."""
    try:
        fd = os.open(runtime_dir / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno != errno.ENOENT  # cannot be seen: then the page has to say
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


class Page:
    """The figures of the clawd of `runtime_dir`, at most a second old while it answers. Not thread-safe.

    Raises Unreachable when there are none, ControlError when they are not to be believed. `core.guard()` once in the
    process lets it survive a page that is truncated: then reads raise ControlError.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.instance = read_instance(runtime_dir)
        path = SHM / stats_name(self.instance)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise Unreachable(
                f'no clawd runs at "{runtime_dir}"', "start one, or give the --runtime-dir of one that runs"
            ) from error
        except OSError as error:
            hint = f'be root or of the group of "{path}"' if error.errno == errno.EACCES else None
            raise ControlError(f"cannot read clawd's figures: {error.strerror}", hint) from error
        try:
            self._check_owner(fd, path)
            result = ffi.new("int *")
            self._view = lib.claw_view_open(fd, result)
        finally:
            os.close(fd)
        if not self._view:
            if result[0] == -errno.EAGAIN:
                raise Unreachable(f'the clawd at "{runtime_dir}" is only starting', "try again")
            if result[0] == -errno.EBADMSG:
                raise ControlError(f'"{path}" is not a page of figures of this version', "is clawd of another version?")
            raise ControlError(f'cannot map "{path}": {os.strerror(-result[0])}')
        self._header = ffi.new("struct claw_page_header *")
        self.unread = 0
        """Rows that could not be read: their writer stopped in the middle of them."""

    def _check_owner(self, fd: int, path: Path) -> None:
        # Anybody may make names in /dev/shm: only whoever owns the runtime directory, or root, speaks for this clawd
        found, owner = os.fstat(fd), os.stat(self.runtime_dir).st_uid
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, owner) or found.st_mode & 0o022:
            raise ControlError(f'"{path}" is not of the owner of "{self.runtime_dir}"', f'look at it: ls -l "{path}"')

    def close(self) -> None:
        view, self._view = self._view, ffi.NULL
        lib.claw_view_close(view)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def header(self) -> Any:
        """The struct claw_page_header as it is now; the next call writes over it."""
        self._check(lib.claw_view_header(self._view, self._header))
        return self._header

    def life(self) -> Life:
        """Whether its daemon answers. Takes up to 1.5 s when it may not."""
        first = int(self.header().beat)
        fresh = abs(time.monotonic_ns() - self._header.beat_ns) < FRESH_NS
        state = process_state(int(self._header.pid))
        if fresh and state not in ("", "T", "t", "Z", "X"):
            return Life.ANSWERING
        if not is_locked(self.runtime_dir):
            return Life.GONE
        until = time.monotonic() + (0.0 if state in ("T", "t") else PATIENCE_S)
        while time.monotonic() < until:
            time.sleep(0.05)
            if self.header().beat != first:
                return Life.ANSWERING
        return Life.SILENT if is_locked(self.runtime_dir) else Life.GONE

    def totals(self) -> Any:
        """A struct claw_totals."""
        totals = ffi.new("struct claw_totals *")
        self._check(lib.claw_view_totals(self._view, totals))
        return totals

    def quantiles(self, which: int, shares: tuple[float, ...]) -> tuple[int, list[int]]:
        """(count, values in ns) of one of the CLAW_HIST_ histograms."""
        return quantiles(self.hist(which), shares)

    def hist(self, which: int) -> Any:
        """A struct claw_hist of its own, with what one of the CLAW_HIST_ histograms holds now."""
        hist = ffi.new("struct claw_hist *")
        self._check(lib.claw_view_hist(self._view, which, hist))
        return hist

    def lately(self, which: int) -> Any:
        """The same of the last 5 to 10 minutes alone. Empty in the first 10 s of a clawd that took over rings, in which
        it makes good what waited for it.
        """
        marks: dict[int, Any] = {}
        for mark in self._rows(lib.CLAW_PAGE_MARKS, lib.claw_view_mark, ffi.new("struct claw_page_mark *")):
            marks[int(mark.at_ns)] = ffi.new("struct claw_hist *", mark.hists[which])
        return minus(self.hist(which), marks[min(marks)]) if marks else ffi.new("struct claw_hist *")

    def streams(self) -> Iterator[Any]:
        """A struct claw_page_stream for each stream; the next one takes its place."""
        row = ffi.new("struct claw_page_stream *")
        yield from self._rows(int(self.header().streams.used), lib.claw_view_stream, row)

    def stream(self, index: int) -> Any:
        """The struct claw_page_stream of this place, its own; None: there is none, or it was being written."""
        row = ffi.new("struct claw_page_stream *")
        found = lib.claw_view_stream(self._view, index, row)
        return row if found != -errno.EAGAIN and self._check(found) else None

    def rings(self) -> Iterator[Any]:
        """A struct claw_page_ring for each producer, likewise."""
        row = ffi.new("struct claw_page_ring *")
        yield from self._rows(int(self.header().rings.used), lib.claw_view_ring, row)

    def connections(self) -> Iterator[Any]:
        """A struct claw_page_connection for each connection of a client, likewise."""
        row = ffi.new("struct claw_page_connection *")
        yield from self._rows(int(self.header().connections.used), lib.claw_view_connection, row)

    def _rows(self, used: int, read: Callable[[Any, int, Any], int], row: Any) -> Iterator[Any]:
        self.unread = 0
        for index in range(used):
            found = read(self._view, index, row)
            if found == -errno.EAGAIN:
                self.unread += 1
            elif self._check(found):
                yield row

    def _check(self, result: int) -> int:
        try:
            return check(result, "read clawd's figures")
        except CoreError as error:
            raise ControlError(str(error), "is its shared memory damaged? restart clawd") from error


def quantiles(hist: Any, shares: tuple[float, ...]) -> tuple[int, list[int]]:
    """(count, values in ns) of a struct claw_hist."""
    return int(hist.count), [int(lib.claw_hist_quantile(hist, share)) for share in shares]


def minus(now: Any, before: Any) -> Any:
    """A struct claw_hist of what came between the two."""
    found = ffi.new("struct claw_hist *")
    found.count = max(0, now.count - before.count)
    for at in range(lib.CLAW_HIST_BUCKETS):
        found.bucket[at] = max(0, now.bucket[at] - before.bucket[at])
    return found


def process_state(pid: int) -> str:
    """The letter of proc(5), empty when there is no such process, or none that can be seen from here."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
