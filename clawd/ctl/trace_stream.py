# SPDX-License-Identifier: Apache-2.0
"""One stream as a waterfall: when each token was written, and when it was at a client like any other, which is us. What
was written before we came is of no account for that: its bar is the time since the token before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.client import figures
from clawd.errors import AttachError, ControlError, ReadTimeout

_LOOK_S = 0.2
_CLASSES = ("critical", "high", "normal")
BAR = 24
_SCALE_NS = 100_000
"""What the first column of a bar stands for; each more is twice as long."""


def watch(runtime_dir: Path, name: str, until_s: float) -> Iterator[dict[str, Any]]:
    """Objects: the stream first, then one a token, then its end. Reads as an observer, which harms no stream."""
    from clawd.consumer import Consumer

    class Observer(Consumer):
        _role = "observer"

    with figures(runtime_dir) as (page, _life):
        row = stats.find_stream(page, name)
    if row is None or row["state"] not in ("live", "ended"):
        raise ControlError(f'no stream "{render.cell(name)}" is open', "clawctl streams lists them")
    yield {"version": 1, "stream": row}
    after = f"{row['incarnation']}-{row['next_seq'] - 1}" if row["next_seq"] and row["state"] == "live" else None
    before_ns = None
    came_ns = time.monotonic_ns()
    with Observer(runtime_dir) as consumer:
        reading = consumer.attach(name, after, wait=0.0)
        while (left := until_s - time.monotonic()) > 0:
            try:
                token = reading.read(min(_LOOK_S, left))
            except ReadTimeout:
                continue
            except AttachError as error:
                raise ControlError(str(error), "clawctl streams lists them") from error
            if token is None:
                yield {"version": 1, "end": reading.end_reason}
                return
            read_ns = time.monotonic_ns()
            yield {
                "version": 1,
                "seq": token.seq,
                "class": _CLASSES[token.klass],
                "written_ns": token.written_ns,
                "gap_ns": token.written_ns - before_ns if before_ns is not None else None,
                "read_ns": read_ns,
                "way_ns": read_ns - token.written_ns if token.written_ns >= came_ns else None,
            }
            before_ns = token.written_ns


def show(value: dict[str, Any]) -> str:
    """A line."""
    if "stream" in value:
        row = value["stream"]
        first = render.duration(row["first_token_ns"])
        return f"{render.cell(row['name'])}: {row['state']}, {row['tokens']} tokens, first token after {first}\n" + (
            f"{'SEQ':>8}  {'CLASS':<8}  {'GAP':>7}  {'WAY':>7}  {_bar_of(row)}, doubling each column"
        )
    if "end" in value:
        return f"the stream ended: {render.cell(value['end'])}"
    bar_ns = value["way_ns"] if value["way_ns"] is not None else value["gap_ns"]
    length = max(1, min(BAR, (max(1, bar_ns or 0) // _SCALE_NS).bit_length() + 1))
    gap, way = render.duration(value["gap_ns"]), render.duration(value["way_ns"])
    return f"{value['seq']:>8}  {value['class']:<8}  {gap:>7}  {way:>7}  {'#' * length}"


def _bar_of(row: dict[str, Any]) -> str:
    return "written → read" if row["state"] == "live" else "since the one before"
