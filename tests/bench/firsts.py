# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench pacing`, second table: first tokens beside streams of the same connection that have a lot to send."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass

from clawd.ctl import render
from tests.bench.pacing import answer, child, go
from tests.bench.run import daemon

EVERY_S = 0.02
"""A new answer comes so often."""
TOKEN_BYTES = 40
"""Of a token's credit, at most."""


@dataclass(frozen=True)
class Others:
    """What else the client reads: `streams` streams, of each `credit` bytes at most and then a rest."""

    streams: int = 0
    writer: str = ""
    rest_s: float = 0.0
    credit: int = 0


BESIDE = {
    "idle": Others(),
    "beside 1,000 that are behind": Others(1000, "fill", 0.5, 4096),
    "beside 1,000 as fast as they go": Others(1000, "flood", 0.0, 1 << 24),
}
"""The last takes all the processors there are."""


def measure(others: Others, count: int) -> dict[str, float]:
    """Written to read, in microseconds. Raises RuntimeError when the others were not behind all the time."""
    flags = ("--stream-bytes", "512k", "--spool-bytes", "512M")
    with tempfile.TemporaryDirectory() as directory, daemon(directory, *flags):
        writer = None
        if others.writer:
            taken = 1 + (count * EVERY_S / others.rest_s if others.rest_s else 0)
            tokens = int(2 * taken * others.credit / TOKEN_BYTES)
            writer = child(others.writer, directory=directory, streams=others.streams, tokens=tokens)
        reader = child("read_first", directory=directory, count=count, **asdict(others))
        opener = child("open_first", directory=directory, count=count, every_s=EVERY_S)
        if writer and others.writer == "flood":
            go(writer)
        go(opener)
        answer(opener)
        go(reader)
        got = answer(reader)
        if writer:
            go(writer)
            answer(writer)
    if got["behind"] < others.streams:
        raise RuntimeError("readers came to the end of what there was")
    late = sorted(got["late_us"])
    return {"p50_us": late[len(late) // 2], "p99_us": late[min(len(late) - 1, int(0.99 * len(late)))]}


def run(rounds: int, count: int) -> dict[str, dict[str, float]]:
    """Each in turn; medians."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in BESIDE}
    for _ in range(rounds):
        for name, others in BESIDE.items():
            runs[name].append(measure(others, count))
    return {
        name: {figure: statistics.median(one[figure] for one in each) for figure in each[0]}
        for name, each in runs.items()
    }


def show(result: dict[str, dict[str, float]]) -> str:
    idle = result["idle"]
    rows = [
        (name, *(f"{each[at]:.0f}" for at in idle), *(f"{each[at] / idle[at]:.2f}x" for at in idle))
        for name, each in result.items()
    ]
    header = ("when", "p50", "p99", "p50 / idle", "p99 / idle")
    return "first tokens (microseconds, written to read)\n" + render.table(header, rows, 100) + "\n"
