# SPDX-License-Identifier: Apache-2.0
"""A trace as a file that trace viewers open: the JSON form of events, with times in microseconds."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from clawd.errors import HostError

_PID = 1
_FIRST_TID = 2
"""Of the tracks of tokens; viewers take the process's own number for its main thread."""
_SLACK_NS = 2
"""Viewers make whole nanoseconds of our microseconds, of a bar's start and of its length: each may be one off."""


class TraceFile:
    """Written as it grows: one that was cut off opens too, for the closing bracket is optional in this form.

    Raises HostError at once when it cannot be written; what was in it stays until there is something to write instead,
    or the block ends well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = not path.exists()
        self._is_begun = False
        try:
            # In its place: beside it there may be no room for another, and what is there may be a pipe
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise HostError(f'cannot write "{path}": {error.strerror}') from error
        self._file: IO[str] = os.fdopen(fd, "w", encoding="utf-8")
        self._free_ns: list[int] = []
        """Of each track of tokens, from when on there is room."""

    def _begin(self) -> None:
        self._is_begun = True
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            os.ftruncate(self._file.fileno(), 0)
        self._file.write("[" + _text(_named("process_name", "clawd")))

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._is_begun:
            self._begin()
        if self._is_begun:
            self._file.write("]\n")
        self._file.close()
        if self._is_new and not self._is_begun:
            self._path.unlink(missing_ok=True)

    def _put(self, event: dict[str, Any]) -> None:
        if not self._is_begun:
            self._begin()
        self._file.write(",\n" + _text(event))
        self._file.flush()

    def stages(self, value: dict[str, Any]) -> None:
        """What --json prints, as counters over time: viewers draw each of a counter's figures as a track of its own."""
        now_us = time.monotonic_ns() / 1000
        for row in value["stages"]:
            if row["count"]:
                figures = {f"{name} (µs)": row[f"{name}_us"] for name in ("p50", "p99")}
                name = row["name"] if row["class"] == "all" else f"{row['name']} {row['class']}"
                self._put({"name": name, "ph": "C", "pid": _PID, "ts": now_us, "args": figures})

    def token(self, stream: str, value: dict[str, Any]) -> None:
        """From its write to its reading, as a bar; of no length when it was written before it was looked for. What is
        known of its stages are bars within it.
        """
        start_ns, way_ns = value["written_ns"], max(0, value["way_ns"] or 0)
        track = self._track(stream, start_ns, way_ns)
        self._bar(f"token {value['seq']}", value["class"], track, start_ns, way_ns)
        end_ns = start_ns + way_ns - _SLACK_NS
        for name, until_ns in (
            ("to be committed", value.get("committed_ns")),
            ("held by its pacer", value.get("released_ns")),
            ("on its way", end_ns),
        ):
            if until_ns is not None and start_ns + _SLACK_NS < min(until_ns, end_ns):
                until_ns = min(until_ns, end_ns)
                self._bar(name, value["class"], track, start_ns, until_ns - start_ns - _SLACK_NS)
                start_ns = until_ns

    def _bar(self, name: str, klass: str, track: int, start_ns: int, length_ns: int) -> None:
        event = {"name": name, "cat": klass, "ph": "X", "pid": _PID, "tid": track}
        self._put({**event, "ts": start_ns / 1000, "dur": length_ns / 1000, "args": {"class": klass}})

    def _track(self, stream: str, start_ns: int, way_ns: int) -> int:
        """The first that is free: bars of one track must not overlap, and tokens that are under way at once do."""
        free_ns = start_ns + way_ns + _SLACK_NS if way_ns else start_ns
        for index, since_ns in enumerate(self._free_ns):
            if since_ns <= start_ns:
                self._free_ns[index] = free_ns
                return _FIRST_TID + index
        self._free_ns.append(free_ns)
        tid = _FIRST_TID + len(self._free_ns) - 1
        self._put(_named("thread_name", stream, tid))  # viewers write the number beside it
        self._put(_named("thread_sort_index", tid, tid))
        return tid


def _named(what: str, value: str | int, tid: int = 0) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"name": what, "ph": "M", "pid": _PID, "tid": tid, "args": {key: value}}


def _text(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False)
