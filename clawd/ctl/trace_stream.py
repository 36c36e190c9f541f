# SPDX-License-Identifier: Apache-2.0
"""One stream as a waterfall: when each token was written, committed, released, and at a client like any other, which is
us. What was written before we came is of no account for that: its bar is the time since the token before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.client import figures
from clawd.ctl.trace_progress import LOOK_NS, Progress
from clawd.errors import AttachError, ControlError, ReadTimeout

_LOOK_S = 0.2
_CLASSES = ("critical", "high", "normal")
LEGEND = ". until committed, = held by its pacer, # released and on its way here"
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
    yield {"version": 1, "stream": row, "look_ns": LOOK_NS}
    after = f"{row['incarnation']}-{row['next_seq'] - 1}" if row["next_seq"] and row["state"] == "live" else None
    before_ns = None
    came_ns = time.monotonic_ns()
    with Progress(runtime_dir, name, row["incarnation"]) as progress, Observer(runtime_dir) as consumer:
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
            is_ours = token.written_ns >= came_ns
            seen_ns = progress.of(token.seq) if is_ours else (None, None)
            # Looks are coarser than the times of writing and reading
            committed_ns, released_ns = (each and min(max(each, token.written_ns), read_ns) for each in seen_ns)
            yield {
                "version": 1,
                "seq": token.seq,
                "class": _CLASSES[token.klass],
                "written_ns": token.written_ns,
                "gap_ns": token.written_ns - before_ns if before_ns is not None else None,
                "committed_ns": committed_ns,
                "released_ns": released_ns,
                "read_ns": read_ns,
                "way_ns": read_ns - token.written_ns if is_ours else None,
            }
            before_ns = token.written_ns


def show(value: dict[str, Any]) -> str:
    """A line."""
    if "stream" in value:
        row = value["stream"]
        first = render.duration(row["first_token_ns"])
        head = f"{render.cell(row['name'])}: {row['state']}, {row['tokens']} tokens, first token after {first}"
        title = f"{'SEQ':>8}  {'CLASS':<8}  {'GAP':>7}  {'WAY':>7}  {_bar_of(row)}, doubling each column"
        return "\n".join([head, *([LEGEND] if row["state"] == "live" else []), title])
    if "end" in value:
        return f"the stream ended: {render.cell(value['end'])}"
    gap, way = render.duration(value["gap_ns"]), render.duration(value["way_ns"])
    return f"{value['seq']:>8}  {value['class']:<8}  {gap:>7}  {way:>7}  {_bar(value)}"


def _bar(value: dict[str, Any]) -> str:
    """A column for each time that is twice as long; in each, what the token was waiting for by then."""
    bar_ns = value["way_ns"] if value["way_ns"] is not None else value["gap_ns"]
    length = max(1, min(BAR, _columns(bar_ns or 0) + 1))
    passed = []
    for name in ("committed_ns", "released_ns"):
        at_ns = value.get(name)
        took_ns = 0 if at_ns is None else at_ns - value["written_ns"]
        passed.append(min(length - 1, _columns(took_ns)))
    return "." * passed[0] + "=" * (passed[1] - passed[0]) + "#" * (length - max(passed))


def _columns(time_ns: int) -> int:
    """That have passed."""
    return (max(0, time_ns) // _SCALE_NS).bit_length()


def _bar_of(row: dict[str, Any]) -> str:
    return "written → read" if row["state"] == "live" else "since the one before"
