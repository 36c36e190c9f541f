# SPDX-License-Identifier: Apache-2.0
"""What an end of clawd costs: `kill -9` under a restarter → the next token at a client, part by part; and the time that
a spool takes to be taken over. Run as a program it is the producer: recovery.py RUNTIME_DIR.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from clawd.consumer import Consumer
from clawd.ctl import render
from clawd.producer import Producer
from tests import ports
from tests.cprogram import NATIVE, compile_c, core_sources, run_c
from tests.daemon import PATIENCE_S, Daemon, keep_bytecode

TOKEN_S = 0.001
"""From one token to the next: what is measured is a bit finer."""
SPREAD_S = 0.037
"""A step between the pauses before kills, so that they fall anywhere in a second's beats."""
PARTS = ("spawned", "ready", "next token")
BOUND_MS = 250.0
BLOCK_BYTES = 4096


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def kill_once(daemon: Daemon, reading: Any, pause_s: float) -> dict[str, float]:
    """Milliseconds from the kill to each part's end."""
    until = time.monotonic() + pause_s
    while time.monotonic() < until:
        reading.read(PATIENCE_S)
    began_ns = time.monotonic_ns()
    daemon.kill()
    daemon.launch()
    ends = {"spawned": time.monotonic_ns()}

    def watch() -> None:
        assert daemon.await_ready()
        ends["ready"] = time.monotonic_ns()

    watcher = threading.Thread(target=watch)
    watcher.start()
    while reading.read(PATIENCE_S).written_ns < began_ns:  # what was under way
        pass
    ends["next token"] = time.monotonic_ns()
    watcher.join()
    return {part: (ends[part] - began_ns) / 1e6 for part in PARTS}


def kills(count: int, *, far: bool = False) -> dict[str, list[float]]:
    """Each kill's parts. `far`: the client reads by tcp, as one of another host."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory(prefix="clawd-bench-") as directory:
        keep_bytecode(Path(directory) / "bytecode")
        flags = ["--pace", "off", "--spool-bytes", "64M", "--keep", "1s"]
        port = ports.pair()
        if far:
            flags += ["--tcp-listen", f"127.0.0.1:{port}"]
        daemon = Daemon(Path(directory) / "run", *flags)
        try:
            daemon.start()
            command = [sys.executable, str(Path(__file__).resolve()), str(daemon.runtime_dir)]
            place = {"endpoint": f"tcp://127.0.0.1:{port}"} if far else {"runtime_dir": daemon.runtime_dir}
            with subprocess.Popen(command, stdin=subprocess.PIPE) as producer, Consumer(**place) as consumer:
                reading = consumer.attach("s")
                for number in range(count):
                    for part, took_ms in kill_once(daemon, reading, 0.1 + number * SPREAD_S % 0.3).items():
                        times[part].append(took_ms)
                assert producer.stdin
                producer.stdin.close()
        finally:
            daemon.discard()
    return times


def spool_ms(size: int) -> float:
    """To take over a spool of `size` bytes, all of it used."""
    with tempfile.TemporaryDirectory(prefix="clawd-bench-") as directory:
        program = compile_c(Path(directory) / "recovery_time", [NATIVE / "recovery_time.c", *core_sources()], "-O2")
        run = run_c(program, str(size), "16384", "40")
    assert run.returncode == 0, run.stderr
    found = re.search(r"recovered in ([0-9.]+)", run.stdout)
    assert found, run.stdout
    return float(found[1])


def measure(count: int, rounds: int, size: int) -> dict[str, Any]:
    times = kills(count)
    times["next token by tcp"] = kills(count, far=True)["next token"]
    spool = statistics.median(spool_ms(size) for _ in range(rounds))
    return {
        "kills": count,
        "bound_ms": BOUND_MS,
        "parts": {
            part: {"p50_ms": quantile(each, 0.5), "p99_ms": quantile(each, 0.99)} for part, each in times.items()
        },
        "spool_bytes": size,
        "spool_ms": spool,
        "spool_ms_per_gib": spool * (1 << 30) / size,
    }


def show(result: dict[str, Any]) -> str:
    rows = [(part, f"{each['p50_ms']:.0f}", f"{each['p99_ms']:.0f}") for part, each in result["parts"].items()]
    table = render.table(("kill -9 until", "p50", "p99"), rows, 60)
    spool = f"recovery: {result['spool_ms']:.0f} ms for {result['spool_bytes'] >> 20} MiB of spool"
    return (
        f"recovery (milliseconds; {result['kills']} kills, bound of the next token's p99 {result['bound_ms']:.0f})\n"
        f"{table}\n{spool}, {result['spool_ms_per_gib']:.0f} a GiB\n"
    )


def produce(runtime_dir: str) -> None:
    """A token now and then, until stdin ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with Producer("p", runtime_dir) as producer:
        stream = producer.open("s")
        while not over.wait(TOKEN_S):
            stream.write(b"token")
        stream.close()


if __name__ == "__main__":
    produce(sys.argv[1])
