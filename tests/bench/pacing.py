# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench pacing`: what the pacer does to arrivals that look like life, through real processes and sockets."""

from __future__ import annotations

import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawd import stats
from clawd.core import lib
from clawd.ctl import render
from clawd.page import Page
from tests.bench.pacing_child import TAIL
from tests.bench.run import cpu_s, daemon

SECOND = 1_000_000_000
MS = 1_000_000


def even(rate: float, seconds: float) -> list[int]:
    return [int(i * SECOND / rate) for i in range(int(rate * seconds))]


def jittery(rate: float, seconds: float, sigma_ms: float, luck: random.Random) -> list[int]:
    """An even grid, each token late by its own chance; order is kept."""
    times, latest = [], 0
    for at in even(rate, seconds):
        latest = max(latest, int(at + (50 + luck.gauss(0, sigma_ms)) * MS))
        times.append(latest)
    return times


def surge(rate: float, seconds: float) -> list[int]:
    """Even, but three times as fast for one second; what `end` tells was written 3 s after that and later."""
    calm = even(rate, seconds / 2)
    fast = [calm[-1] + at for at in even(3 * rate, 1)[1:]]
    return calm + fast + [fast[-1] + at for at in even(rate, 3 + TAIL / rate)]


def burst(rate: float, seconds: float) -> list[int]:
    """Even, then eight tokens at once; what `end` tells was written 2 s after them and later."""
    calm = even(rate, seconds / 2)
    return calm + [calm[-1] + 1] * 8 + [calm[-1] + at for at in even(rate, 2 + TAIL / rate)[1:]]


def heaps(seconds: float, size: int, every_ms: int) -> list[int]:
    return [i // size * every_ms * MS for i in range(int(seconds * 1000 / every_ms) * size)]


@dataclass(frozen=True)
class Scene:
    """`streams` streams, each with its own arrivals, from `producers` processes."""

    arrivals: Callable[[random.Random, float], list[int]]
    streams: int = 10
    producers: int = 1
    busy: bool = False
    alone: bool = False
    """clawd has one processor, and all others leave it to it."""


SCENES = {
    "even 50/s": Scene(lambda _luck, seconds: even(50, seconds)),
    "sigma 8 ms at 50/s": Scene(lambda luck, seconds: jittery(50, seconds, 8, luck)),
    "the same, processors busy": Scene(lambda luck, seconds: jittery(50, seconds, 8, luck), busy=True),
    "three times the rate for 1 s": Scene(lambda _luck, seconds: surge(50, seconds)),
    "eight at once, once": Scene(lambda _luck, seconds: burst(50, seconds)),
    "ten at once every 200 ms": Scene(lambda _luck, seconds: heaps(seconds, 10, 200)),
    "10,000 streams at 30/s": Scene(lambda _luck, seconds: even(30, seconds), streams=10_000, producers=3, alone=True),
}


@contextmanager
def busy_processors() -> Iterator[None]:
    """One loop a processor, for more than 80 % load."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def child(role: str, **order: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.pacing_child", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(order) + "\n")
    assert process.stdout.readline() == "ready\n"
    return process


def set_apart(clawd: int, children: Sequence[subprocess.Popen[str]]) -> None:
    """One processor for clawd, the others for these."""
    first, *rest = sorted(os.sched_getaffinity(0))
    for pid, cpus in ((clawd, [first]), *((each.pid, rest or [first]) for each in children)):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cpus)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdin
    assert process.stdout
    value = json.loads(process.stdout.readline())
    process.stdin.close()
    process.wait()
    process.stdout.close()
    return value


def measure(scene: Scene, mode: str, seconds: float, seed: int) -> dict[str, float]:
    """One run. Gaps as the client sees them, all streams together; what was held as clawd accounts it."""
    luck = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        shares = [list(range(at, scene.streams, scene.producers)) for at in range(scene.producers)]
        flags = ("--pace", mode, "--max-streams", "32768", "--spool-bytes", "256M", "--stream-bytes", "1M")
        with daemon(directory, *flags) as process, Page(Path(directory)) as page:
            reader = child("reader", directory=directory, streams=scene.streams)
            writers = []
            # A thousand calls a second are enough of what a writer in Python does to a busy machine
            slack_ns = MS if scene.alone else 0
            for share in shares:
                same = scene.arrivals(luck, seconds) if scene.streams > 100 else None
                times = [same or scene.arrivals(luck, seconds) for _ in share]
                spread = [luck.random() / 30 for _ in share] if scene.streams > 100 else [0.0] * len(share)
                plan = sorted(
                    (at + int(begin * SECOND), number)
                    for number, own, begin in zip(share, times, spread, strict=True)
                    for at in own
                )
                path = Path(directory) / f"plan-{share[0]}"
                path.write_bytes(b"".join(struct.pack("<QI", at, number) for at, number in plan))
                writers.append(child("writer", directory=directory, streams=share, plan=str(path), slack_ns=slack_ns))
            if scene.alone:
                set_apart(process.pid, (reader, *writers))
                # Arrivals in time matter more than when a reader in Python, which takes what is left, comes to them
                os.setpriority(os.PRIO_PROCESS, reader.pid, 15)
            before_s = cpu_s(process.pid)[0]
            start = time.monotonic()
            with busy_processors() if scene.busy else nullcontext():
                for writer in writers:
                    go(writer)
                for writer in writers:
                    answer(writer)
            took_s = time.monotonic() - start
            used_s = cpu_s(process.pid)[0] - before_s
            go(reader)
            got = answer(reader)
            held = page.quantiles(lib.CLAW_HIST_HELD, (0.5, 0.99))[1]
            late = page.quantiles(lib.CLAW_HIST_RELEASE, (0.5, 0.99))[1]
            status = stats.status(page)
    gaps = got["gaps_ms"]
    mean = statistics.mean(gaps) if gaps else 0.0
    return {
        "tokens": got["tokens"],
        "lost": status["totals"]["tokens"] - got["tokens"],
        "gap_mean_ms": mean,
        "gap_sigma_ms": statistics.pstdev(gaps) if gaps else 0.0,
        "within_15": sum(abs(gap - mean) <= 0.15 * mean for gap in gaps) / max(1, len(gaps)),
        "held_p50_ms": held[0] / MS,
        "held_p99_ms": held[1] / MS,
        "release_p99_ms": late[1] / MS,
        "lag_at_end_ms": got["lag_at_end_ms"],
        "cpu_share": used_s / took_s,
    }


def run(seconds: float, rounds: int, *, smoke: bool = False) -> dict[str, Any]:
    """Every scene, off and smooth in turn; medians."""
    result: dict[str, Any] = {}
    for name, scene in SCENES.items():
        if smoke and scene.streams > 1000:
            continue
        modes: dict[str, list[dict[str, float]]] = {"off": [], "smooth": []}
        for number in range(rounds):
            for mode, runs in modes.items():
                runs.append(measure(scene, mode, seconds, number))
        result[name] = {
            mode: {figure: statistics.median(each[figure] for each in runs) for figure in runs[0]}
            for mode, runs in modes.items()
        }
    return result


def show(result: dict[str, Any]) -> str:
    header = ("arrivals", "pace", "gap", "sigma", "in 15 %", "held p50", "p99", "end", "release p99", "lost", "cpu")
    rows = [
        (
            name,
            mode,
            f"{each['gap_mean_ms']:.1f}",
            f"{each['gap_sigma_ms']:.2f}",
            f"{100 * each['within_15']:.1f}",
            f"{each['held_p50_ms']:.1f}",
            f"{each['held_p99_ms']:.1f}",
            f"{each['lag_at_end_ms']:.1f}",
            f"{each['release_p99_ms']:.2f}",
            f"{each['lost']:.0f}",
            f"{each['cpu_share']:.2f}",
        )
        for name, modes in result.items()
        for mode, each in modes.items()
    ]
    return "pacing (milliseconds)\n" + render.table(header, rows, 120) + "\n"
