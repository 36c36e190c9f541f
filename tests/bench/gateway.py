# SPDX-License-Identifier: Apache-2.0
"""W9's load on the gateway: 100 connections, 28,000 tokens a second offered, beside aiohttp fed by Redis Streams."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clawd.ctl import render
from tests.bench.run import Child, cpu_s, daemon

CONNECTIONS = 100
RATE = 28_000
COMMAND = "import sys; from clawd.gateway import command; sys.exit(command())"


def missing() -> str | None:
    """Why there is nothing to compare with."""
    if shutil.which("redis-server") is None:
        return "no redis-server here: apt-get install redis-server"
    if importlib.util.find_spec("redis") is None:
        return "no redis for Python here: pip install redis"
    return None


def _private_bytes(pid: int) -> int:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().split("\n")
    return 1024 * sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _clawd(directory: str, port: int) -> Iterator[tuple[int, list[int]]]:
    flags = ("--config", os.devnull, "--runtime-dir", directory, "--listen", f"127.0.0.1:{port}")
    with (
        daemon(directory, "--stream-bytes", "32M", "--pace", "off") as relay,
        _running(sys.executable, "-c", COMMAND, *flags) as gateway,
    ):
        yield gateway.pid, [gateway.pid, relay.pid]


@contextmanager
def _redis(directory: str, port: int) -> Iterator[tuple[int, list[int]]]:
    store = ("redis-server", "--port", "0", "--unixsocket", f"{directory}/redis", "--save", "", "--appendonly", "no")
    with _running(*store) as server:
        while not Path(directory, "redis").exists():
            time.sleep(0.01)
        with _running(sys.executable, "-m", "tests.bench.redis_sse", f"{directory}/redis", str(port)) as endpoint:
            yield endpoint.pid, [endpoint.pid, server.pid]


PATHS = {"clawd": _clawd, "redis": _redis}


def measure(path: str, seconds: float) -> dict[str, Any]:
    """One run: all connections held for it."""
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="clawd-") as directory:
        port = _free_port()
        order = {"path": path, "directory": directory, "redis": f"{directory}/redis", "port": port,
                 "streams": CONNECTIONS, "rate": RATE, "seconds": seconds}  # fmt: skip
        with PATHS[path](directory, port) as (pid, pids):
            _await_port(port)
            try:
                children += [Child("events", "readers", order), Child("events", "engine", order)]
                start = str(time.monotonic() + 0.3)
                before, idle = sum(cpu_s(each)[0] for each in pids), _private_bytes(pid)
                for child in children:
                    child.tell(start)
                time.sleep(0.3 + 0.7 * seconds)
                held = _private_bytes(pid)
                wrote, got = children[1].figures(), children[0].figures()
                cpu = sum(cpu_s(each)[0] for each in pids) - before
            finally:
                for child in children:
                    child.end()
    return _figures(wrote, got, seconds, cpu, held - idle)


def _figures(wrote: Any, got: Any, seconds: float, cpu: float, memory: int) -> dict[str, Any]:
    tokens = sum(got["tokens"])
    wrong = [
        due != came or not ended for due, came, ended in zip(wrote["sent"], got["tokens"], got["ended"], strict=True)
    ]
    return {
        "first_p95_ms": (got["first_p95_us"] or 0) / 1e3,
        "added_p50_ms": (got["p50_us"] or 0) / 1e3,
        "added_p99_ms": (got["p99_us"] or 0) / 1e3,
        "tokens_per_s": tokens / seconds,
        "offered_per_s": sum(wrote["sent"]) / seconds,
        "errors": sum(wrong) / len(wrong),
        "cpu_us": 1e6 * cpu / max(1, tokens),
        "memory_kb": memory / 1024 / CONNECTIONS,
        "engine_late_ms": wrote["late_ms"],
    }


def compare(seconds: float, rounds: int) -> dict[str, Any]:
    """Medians; each path once a round, in turn."""
    paths = ["clawd"] if missing() else list(PATHS)
    runs: dict[str, list[dict[str, Any]]] = {path: [] for path in paths}
    for _ in range(rounds):
        for path in paths:
            runs[path].append(measure(path, seconds))
    return {
        path: {name: statistics.median(each[name] for each in all_of) for name in all_of[0]}
        for path, all_of in runs.items()
    }


def show(result: dict[str, Any], seconds: float) -> str:
    header = ("path", "first P95", "added P50", "P99", "tokens/s", "offered", "errors", "cpu us/token", "KB/connection")
    rows = []
    for path, each in result.items():
        times = [f"{each[name]:.2f} ms" for name in ("first_p95_ms", "added_p50_ms", "added_p99_ms")]
        rates = [f"{each[name]:.0f}" for name in ("tokens_per_s", "offered_per_s")]
        costs = [f"{100 * each['errors']:.1f} %", f"{each['cpu_us']:.1f}", f"{each['memory_kb']:.0f}"]
        rows.append((path, *times, *rates, *costs))
    why = missing()
    return (
        f"gateway: {CONNECTIONS} connections held {seconds:g} s\n{render.table(header, rows, 120)}\n"
        + (f"not compared with Redis Streams: {why}\n" if why else "")
        + "first and added: from the engine's write to the client's read; cpu: of gateway and relay, or of both peers\n"
    )
