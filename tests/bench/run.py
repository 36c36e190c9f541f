# SPDX-License-Identifier: Apache-2.0
"""One run of one path: its processes started, their figures collected, everything ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawd.page import read_instance
from clawd.server import memory

PATHS = {  # path: (producer, consumer)
    "clawd": ("clawd", "clawd"),
    "clawd-tasks": ("clawd", "clawd-tasks"),
    "pyzmq": ("pyzmq", "pyzmq"),
    "engine": ("engine", "engine"),
}


@dataclass(frozen=True)
class Load:
    """`count` tokens over `streams` streams, `step` at once, `rate` a second in all (0: as fast as they go)."""

    rate: float
    count: int
    step: int
    streams: int
    seed: int = 1


def cpu_s(pid: int) -> tuple[float, float]:
    """Seconds on a processor so far: of a process with all its threads, and of its main thread. In ns from the
    scheduler: /proc/PID/stat counts ticks of 10 ms.
    """
    took = {path.parent.name: path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")}
    seconds = {thread: int(text.split()[0]) / 1e9 for thread, text in took.items()}
    return sum(seconds.values()), seconds[str(pid)]


@contextmanager
def daemon(directory: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "clawd", "--config", os.devnull, "--runtime-dir", directory, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr
        for line in process.stderr:  # ready, or why not
            if b"ready" in line:
                break
        yield process
    finally:
        process.terminate()
        process.wait()
        if process.stderr:
            process.stderr.close()
        memory.sweep(read_instance(Path(directory)))


class Child:
    def __init__(self, module: str, name: str, order: dict[str, Any]) -> None:
        command = [sys.executable, "-m", f"tests.bench.{module}", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.tell(json.dumps(order))
        assert self.process.stdout
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{module} {name} did not start")

    def tell(self, line: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def figures(self) -> dict[str, float]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark ended without its figures")
        figures: dict[str, float] = json.loads(line)
        return figures

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


def harness_cpu_s(load: Load) -> float:
    """What pacing alone costs a producer."""
    child = Child("producers", "nothing", {"directory": "", **vars(load)})
    try:
        child.tell()
        return child.figures()["cpu_s"]
    finally:
        child.end()


def measure(path: str, load: Load) -> dict[str, float]:
    """Figures of one run: latency in us, CPU in us a token for each process, how long a step held the producer."""
    writer_name, reader_name = PATHS[path]
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="clawd-") as directory:
        order = {"directory": directory, **vars(load)}
        try:
            if writer_name != "clawd":
                return _measure(children, order, writer_name, reader_name, None, load)
            # The others do not pace
            with daemon(directory, "--stream-bytes", "32M", "--pace", "off") as process:
                return _measure(children, order, writer_name, reader_name, process.pid, load)
        finally:
            for child in children:
                child.end()


def _measure(
    children: list[Child], order: dict[str, Any], writer_name: str, reader_name: str, pid: int | None, load: Load
) -> dict[str, float]:
    reader = Child("consumers", reader_name, order)
    children.append(reader)
    writer = Child("producers", writer_name, order)
    children.append(writer)
    before = cpu_s(pid) if pid else (0.0, 0.0)
    writer.tell()
    got = reader.figures()
    after = cpu_s(pid) if pid else (0.0, 0.0)
    writer.tell()
    wrote = writer.figures()
    a_token = 1e6 / load.count
    return {
        "p50_us": got["p50_us"],
        "p99_us": got["p99_us"],
        "tokens_per_s": got["tokens_per_s"],
        "lost": load.count - got["tokens"],
        "held_p50_us": wrote["held_p50_us"],
        "held_p99_us": wrote["held_p99_us"],
        "producer_cpu_us": wrote["cpu_s"] * a_token,
        "relay_cpu_us": (after[0] - before[0]) * a_token,
        "relay_main_cpu_us": (after[1] - before[1]) * a_token,
        "receiver_cpu_us": got["cpu_s"] * a_token,
        "receiver_main_cpu_us": got["main_cpu_s"] * a_token,
    }
