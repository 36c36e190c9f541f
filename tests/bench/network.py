# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench network`: what lanes and second copies are worth on a bad way, what tcp and CURVE cost on a good one.
The bad way is two network namespaces with a tunnel between them that loses, delays and is slow as told.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from clawd.consumer import Consumer, Reading
from clawd.ctl import render
from clawd.farlink import FarLink
from clawd.keys import Allowed, allow, make_pair, make_server, write_pair
from clawd.producer import Producer
from tests import net, ports
from tests.daemon import PATIENCE_S, Daemon
from tests.net import NEAR, PORT, NearDaemon, Net

WRITER = """
import sys
from clawd.producer import Producer
directory, count = sys.argv[1], int(sys.argv[2])
with Producer("bench", directory, 1 << 20) as producer:
    streams = [producer.open(f"s{number}") for number in range(100)]
    sys.stdin.readline()
    for _ in range(count // 100):
        producer.write_many([(stream, b"0123456789abcdef") for stream in streams], block=60)
    for stream in streams:
        stream.close(block=60)
"""


class OneLane(FarLink):
    """A client that had only bulk: copies on express are acked and thrown away."""

    def _is_first(self, number: int, charge: int) -> bool:
        if self._on_express:
            self._ack(charge)
            return False
        return True


def _keys(directory: Path) -> dict[str, Any]:
    server, pair = make_server(directory / "keys"), make_pair()
    key = directory / "bench.key"
    write_pair(key, pair, "bench")
    allow(directory / "keys", Allowed("bench", pair.public, "consumer"))
    return {"key": key, "server_key": server.public}


@contextmanager
def _far(seed: int, lanes: bool, **quality: float) -> Iterator[tuple[Consumer, Producer]]:
    """A daemon, and a client on the other end of such a way."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        way = stack.enter_context(Net(seed, delay_s=quality.get("delay_s", 0.0)))
        keys = _keys(directory)
        flags = ["--tcp-listen", f"{NEAR}:{PORT}", "--keys-dir", str(directory / "keys"), "--pace", "off"]
        daemon = stack.enter_context(
            NearDaemon(way, directory / "run", *flags, *(() if lanes else ("--loss-threshold", "100")))
        )
        consumer = stack.enter_context(way.there(lambda: Consumer(endpoint=way.endpoint, **keys)))
        if not lanes:
            consumer._link.__class__ = OneLane
        producer = stack.enter_context(Producer("bench", daemon.runtime_dir))
        _first(consumer, producer, "warm")
        way.be(**quality)
        yield consumer, producer


def _first(consumer: Consumer, producer: Producer, name: str) -> float:
    """Milliseconds from a stream's first write to the first read."""
    reading, stream = consumer.attach(name), producer.open(name)
    time.sleep(0.1)  # so that the attach is there: what is measured is the way of the token
    started = time.monotonic()
    stream.write("first")
    assert reading.read(PATIENCE_S)
    took = 1000 * (time.monotonic() - started)
    stream.close()
    reading.close()
    return took


@contextmanager
def _feed(consumer: Consumer, producer: Producer, streams: int, size: int, gap_s: float) -> Iterator[None]:
    """Streams that write all the time, and are read."""
    stop = threading.Event()
    pairs = [(producer.open(f"feed{number}"), consumer.attach(f"feed{number}")) for number in range(streams)]

    def write() -> None:
        while not stop.is_set():
            producer.write_many([(stream, b"x" * size) for stream, _ in pairs], block=60)
            time.sleep(gap_s)

    def read(reading: Reading) -> None:
        while not stop.is_set():
            try:
                if reading.read_batch(0.2) is None:
                    return
            except TimeoutError:
                continue

    threads = [threading.Thread(target=write), *(threading.Thread(target=read, args=(each,)) for _, each in pairs)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def lossy(rounds: int, count: int) -> dict[str, dict[str, float]]:
    """First tokens beside 20 answers of 30 tokens/s, at 3 % loss and 30 ms one way."""
    found: dict[str, list[float]] = {"both lanes": [], "one lane": []}
    for number in range(rounds):
        for name, times in found.items():
            with (
                _far(number, name == "both lanes", delay_s=0.03, loss=0.03) as (consumer, producer),
                _feed(consumer, producer, 20, 5, 1 / 30),
            ):
                time.sleep(3.0)  # until its loss is known
                times += [_first(consumer, producer, f"s{each}") for each in range(count)]
    return {name: _figures(times) for name, times in found.items()}


def backlog(rounds: int, count: int) -> dict[str, dict[str, float]]:
    """First tokens over 10 Mbit/s and 5 ms one way, idle and beside more than goes through."""
    found: dict[str, list[float]] = {"idle": [], "both lanes": [], "one lane": []}
    for number in range(rounds):
        for name, times in found.items():
            with _far(number, name != "one lane", delay_s=0.005, rate=1.25e6) as (consumer, producer):
                if name == "idle":
                    times += [_first(consumer, producer, f"s{each}") for each in range(count)]
                    continue
                with _feed(consumer, producer, 4, 2000, 0.002):
                    time.sleep(1.0)
                    times += [_first(consumer, producer, f"s{each}") for each in range(count)]
    return {name: _figures(times) for name, times in found.items()}


def _figures(times: list[float]) -> dict[str, float]:
    times.sort()
    p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
    return {"p50_ms": statistics.median(times), "p99_ms": p99, "count": len(times)}


@contextmanager
def _near(how: str) -> Iterator[tuple[Daemon, dict[str, Any]]]:
    """A daemon on this host, and how its client connects: `ipc`, `tcp` or `curve`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        port = ports.pair()
        keys = _keys(directory) if how == "curve" else {}
        flags = [] if how == "ipc" else ["--tcp-listen", f"127.0.0.1:{port}", "--keys-dir", str(directory / "keys")]
        with Daemon(directory / "run", "--pace", "off", *flags) as daemon:
            place = {"runtime_dir": daemon.runtime_dir} if how == "ipc" else {"endpoint": f"tcp://127.0.0.1:{port}"}
            yield daemon, {**place, **keys}


def local(rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """By ipc, tcp and tcp with CURVE on this host: from nothing to a first token, and tokens a second."""
    dialled: dict[str, list[float]] = {"ipc": [], "tcp": [], "curve": []}
    rates: dict[str, list[float]] = {"ipc": [], "tcp": [], "curve": []}
    for _ in range(rounds):
        for how in dialled:
            with _near(how) as (daemon, place):
                with Producer("bench", daemon.runtime_dir) as producer:
                    producer.open("there").write("x")
                    for _ in range(20):
                        started = time.monotonic()
                        with Consumer(**place) as consumer:
                            assert consumer.attach("there").read(PATIENCE_S)
                        dialled[how].append(1000 * (time.monotonic() - started))
                rates[how].append(_rate(daemon, place, tokens))
    return {
        how: {"dial_p50_ms": statistics.median(dialled[how]), "tokens_per_s": statistics.median(rates[how])}
        for how in dialled
    }


def _rate(daemon: Daemon, place: dict[str, Any], tokens: int) -> float:
    command = [sys.executable, "-c", WRITER, str(daemon.runtime_dir), str(tokens)]
    with Consumer(**place) as consumer, subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as writer:
        for number in range(100):
            consumer.attach(f"s{number}", credit=1 << 24)
        assert writer.stdin
        started = time.monotonic()
        writer.stdin.write("go\n")
        writer.stdin.flush()
        got = 0
        while got < tokens // 100 * 100:
            for reading in consumer.select(60):
                batch = reading.read_batch(60)
                got += batch.count if batch else 0
        return got / (time.monotonic() - started)


def run(rounds: int, count: int, tokens: int) -> dict[str, Any]:
    reason = net.reason()
    ways = {} if reason else {"lossy": lossy(rounds, count), "backlog": backlog(rounds, count)}
    return {"skipped": reason, **ways, "local": local(rounds, tokens)}


def _ratio(ours: dict[str, float], other: dict[str, float]) -> str:
    return ", ".join(f"{what} {ours[f'{what}_ms'] / other[f'{what}_ms']:.2f}x" for what in ("p50", "p99"))


def show(found: dict[str, Any]) -> str:
    lines = []
    for name, title in (("lossy", "first tokens, 3 % loss, 30 ms"), ("backlog", "first tokens, 10 Mbit/s, 5 ms")):
        if name not in found:
            lines.append(f"{title}: left out, {found['skipped']}\n")
            continue
        rows = [
            (way, f"{each['p50_ms']:.1f}", f"{each['p99_ms']:.1f}", each["count"]) for way, each in found[name].items()
        ]
        lines.append(f"{title}\n" + render.table(("way", "p50 ms", "p99 ms", "n"), rows, 90))
        for other in ("one lane", "idle"):
            if other in found[name]:
                lines.append(f"both lanes / {other}: {_ratio(found[name]['both lanes'], found[name][other])}")
        lines.append("")
    rows = [(how, f"{each['dial_p50_ms']:.1f}", f"{each['tokens_per_s']:.0f}") for how, each in found["local"].items()]
    lines.append("on this host\n" + render.table(("by", "dial to first token, ms", "tokens/s"), rows, 90))
    ipc = found["local"]["ipc"]["tokens_per_s"]
    lines += [f"{how} / ipc: tokens/s {found['local'][how]['tokens_per_s'] / ipc:.2f}x" for how in ("tcp", "curve")]
    return "\n".join(lines) + "\n"
