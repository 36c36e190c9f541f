# SPDX-License-Identifier: Apache-2.0
"""What writing costs an engine: in Python and in C, alone and beside a busy thread, next to a pyzmq send of as much."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from clawd.core import lib
from clawd.producer import Producer
from tests.bench.run import daemon
from tests.bench.schedule import TEXT, quantile

RING = int(lib.CLAW_RING_BYTES_MAX)
BOUNDS_US = {  # design §12
    "write, Python": 0.6,
    "write, C": 0.060,
    "write_many of 100, held a step": 20.0,
    "write_many of 100 beside a busy thread, p99": 100.0,
    "import clawd.producer": 60_000.0,
}
CSRC = Path(__file__).resolve().parents[2] / "clawd" / "csrc"


def timed(call: Callable[[], object], count: int, inner: int = 1) -> list[int]:
    """ns of one call, `count` times; each the mean of `inner` calls."""
    values = []
    for _ in range(count):
        before = time.perf_counter_ns()
        for _ in range(inner):
            call()
        values.append((time.perf_counter_ns() - before) // inner)
    return values


def spin(over: threading.Event) -> None:
    while not over.is_set():
        pass


def in_python(directory: str, seconds: float) -> dict[str, tuple[float, float]]:
    """(median, p99) in us."""
    rounds = int(1000 * seconds)
    found: dict[str, tuple[float, float]] = {}

    def keep(name: str, values: list[int]) -> None:
        found[name] = (quantile(values, 0.5), quantile(values, 0.99))

    with Producer("bench", directory, RING) as producer:
        streams = [producer.open(f"s{number}") for number in range(100)]
        stream = streams[0]
        keep("write, Python", timed(lambda: stream.write(TEXT), rounds, 100))
        items = [(each, TEXT) for each in streams]
        step = []
        for _ in range(rounds):  # a step every 2 ms, so that clawd has gone to sleep in between
            time.sleep(0.002)
            step += timed(lambda: producer.write_many(items), 1)
        keep("write_many of 100, held a step", step)
        over = threading.Event()
        busy = threading.Thread(target=spin, args=(over,), daemon=True)
        busy.start()
        try:
            beside = timed(lambda: producer.write_many(items), rounds)
        finally:
            over.set()
            busy.join()
        keep("write_many of 100 beside a busy thread, p99", beside)
    return found


def in_c(directory: str, seconds: float, program: Path) -> dict[str, tuple[float, float]]:
    done = subprocess.run(
        [program, directory, str(int(200_000 * seconds) // 100 * 100)], capture_output=True, text=True, check=True
    )
    single, many = (float(word) / 1000 for word in done.stdout.split())
    return {"write, C": (single, single), "write_many of 100, C, a token": (many, many)}


def beside_pyzmq(seconds: float) -> dict[str, tuple[float, float]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        for socket in (pull, push):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        with tempfile.TemporaryDirectory(prefix="clawd-") as directory:
            pull.bind(f"ipc://{directory}/x")
            push.connect(f"ipc://{directory}/x")
            text = TEXT.encode()
            values = timed(lambda: push.send(text), int(500 * seconds), 100)
            for _ in range(100 * len(values)):
                pull.recv()
    return {"pyzmq send": (quantile(values, 0.5), quantile(values, 0.99))}


def import_us() -> list[int]:
    command = [sys.executable, "-c", "import time; t = time.perf_counter_ns(); import clawd.producer; "
               "print(time.perf_counter_ns() - t)"]  # fmt: skip
    return [int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(7)]


def measure(seconds: float, rounds: int) -> dict[str, dict[str, float | None]]:
    """Medians over rounds, all parts in turn in each."""
    runs: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="clawd-") as directory:
        program = Path(directory) / "held"
        compile_c = ["gcc", "-O2", "-std=gnu11", "-I", str(CSRC), str(Path(__file__).with_name("held.c")), "-o"]
        subprocess.run([*compile_c, str(program)], check=True)
        for _ in range(rounds):
            runtime_dir = Path(directory) / "run"
            with daemon(str(runtime_dir), "--stream-bytes", "32M"):
                parts = in_python(str(runtime_dir), seconds) | in_c(str(runtime_dir), seconds, program)
            for name, value in (parts | beside_pyzmq(seconds)).items():
                runs.setdefault(name, []).append(value)
    imports = import_us()
    runs["import clawd.producer"] = [(quantile(imports, 0.5), quantile(imports, 0.99))]
    result: dict[str, dict[str, float | None]] = {}
    for name, values in runs.items():
        middle = sorted(values)[len(values) // 2]
        result[name] = {"p50_us": middle[0], "p99_us": middle[1], "bound_us": BOUNDS_US.get(name)}
    return result
