# SPDX-License-Identifier: Apache-2.0
"""A trace as a file that trace viewers open: the JSON form of events, with times in microseconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from clawd.errors import HostError


class TraceFile:
    """Written as it grows: one that was cut off opens too, for the closing bracket is optional in this form."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise HostError(f'cannot write "{path}": {error.strerror}') from error
        self._file.write('[{"name":"process_name","ph":"M","pid":1,"args":{"name":"clawd"}}')

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.write("]\n")
        self._file.close()

    def _put(self, **event: Any) -> None:
        self._file.write(",\n" + json.dumps({"pid": 1, **event}, separators=(",", ":")))
        self._file.flush()

    def stages(self, value: dict[str, Any]) -> None:
        """What --json prints, as counters over time."""
        now_us = time.monotonic_ns() / 1000
        for row in value["stages"]:
            if row["count"]:
                figures = {name: row[f"{name}_us"] for name in ("p50", "p99")}
                self._put(name=f"{row['name']} {row['class']} us", ph="C", ts=now_us, args=figures)

    def token(self, value: dict[str, Any]) -> None:
        """From its write to its reading, as a bar; of no length when it was written before it was looked for."""
        args = {"class": value["class"]}
        times = {"ts": value["written_ns"] / 1000, "dur": max(0, value["way_ns"] or 0) / 1000}
        self._put(name=f"token {value['seq']}", ph="X", tid=1, args=args, **times)
