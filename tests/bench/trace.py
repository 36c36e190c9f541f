# SPDX-License-Identifier: Apache-2.0
"""What shaping and tracing cost a token, and what shaping gains a first token on a link that others fill."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from clawd.consumer import Consumer
from clawd.ctl import render
from clawd.kernel import bpfcall
from clawd.kernel.shaper import Policy, Shaper
from clawd.kernel.tracer import Tracer
from clawd.producer import Producer
from tests import ports
from tests.bench.run import daemon
from tests.bench.saturated import first_token_ms
from tests.cgroups import Cgroup, cgroup, why_no_bpf

POLICY = Policy(1, lowat=16384, priority=6, thin=1)
"""What clawd asks for its express lanes."""
PAIRS = 10
TOKENS = 20_000
TOKEN = bytes(60)
WARM = 200
BOUNDS = {"shaper": 1.05, "tracer": 1.10, "tracer, tracepoints": 1.10}


READER = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while peer.recv(1000):
    peer.send(b"k")
"""


class Shaped(AbstractContextManager["Shaped"]):
    """A shaper on a lane, from entry to exit."""

    def __init__(self, group: Cgroup, ports: dict[int, Policy]) -> None:
        self._shaper = Shaper(group.path)
        self._ports = ports

    def __enter__(self) -> Shaped:
        began_ns = time.monotonic_ns()
        for port, policy in self._ports.items():
            self._shaper.set_lane(port, policy)
        assert self._shaper.wait(60), self._shaper.state().reason
        self.load_ns = time.monotonic_ns() - began_ns
        return self

    def spent(self) -> tuple[int, int]:
        """Nanoseconds that its program ran, and how often, while the kernel takes the time of programs."""
        assert self._shaper._loaded
        return bpfcall.program_cost(self._shaper._loaded.programs["claw_sockops"])

    def __exit__(self, *_: object) -> None:
        self._shaper.close()


Cost = Callable[[int], float]
"""Of one token of so many, in microseconds of processor time."""


def written_us(listener: socket.socket, tokens: int) -> float:
    """Of the writer and its part of the kernel, when a token is a write of its own and nothing else is done: clawd has
    a good deal more to do, and writes many at once.
    """
    host, port = listener.getsockname()
    reader = subprocess.Popen([sys.executable, "-c", READER, host, str(port)])
    ours, _ = listener.accept()
    with ours:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = 0.0
        for number in range(-WARM, tokens):
            if number == 0:
                began = time.process_time()
            ours.send(TOKEN)
            ours.recv(1)
        took = time.process_time() - began
    reader.wait()
    return took / tokens * 1e6


def relayed_us(directory: str, pid: int, port: int, tokens: int) -> float:
    """Of clawd and its part of the kernel, when it relays a token at a time to a client by tcp."""
    with Producer("bench", directory) as producer, Consumer(endpoint=f"tcp://127.0.0.1:{port}") as consumer:
        name = f"s{time.monotonic_ns()}"  # those before are kept for a while
        stream, reading = producer.open(name), consumer.attach(name)
        began = 0.0
        for number in range(-WARM, tokens):
            if number == 0:
                began = busy_s(pid)
            stream.write(TOKEN)
            reading.read()
        took = busy_s(pid) - began
        stream.close()
        reading.read()
    return took / tokens * 1e6


@contextmanager
def on_one_processor() -> Iterator[None]:
    """This process and those it starts, which take turns anyway: waking another processor costs more than all that is
    measured here, and is never twice the same.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [max(allowed)])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def busy_s(pid: int) -> float:
    """How long the threads of a process ran."""
    return sum(int((each / "schedstat").read_text().split()[0]) for each in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def ratio(cost: Cost, attach: Callable[[], AbstractContextManager[Any]], pairs: int, tokens: int) -> Any:
    """With ÷ without, pair by pair, the order changed each time."""
    ratios, with_us, without_us = [], [], []
    for number in range(pairs):
        taken = {}
        for attached in (True, False) if number % 2 else (False, True):
            with attach() if attached else nullcontext():
                taken[attached] = cost(tokens)
        ratios.append(taken[True] / taken[False])
        with_us.append(taken[True])
        without_us.append(taken[False])
    middle, spread = statistics.mean(ratios), statistics.stdev(ratios) if pairs > 1 else 0.0
    half = 2.26 * spread / pairs**0.5  # Student's t for 10 pairs, 95 %
    return {
        "ratio": middle,
        "interval": [middle - half, middle + half],
        "with_us": statistics.median(with_us),
        "without_us": statistics.median(without_us),
    }


def ratios(group: Cgroup, cost: Cost, pid: int, port: int, pairs: int, tokens: int) -> dict[str, Any]:
    """Of all that can be attached, to a process that has a lane on that port."""
    return {
        "shaper": ratio(cost, lambda: Shaped(group, {port: POLICY}), pairs, tokens),
        "tracer": ratio(cost, lambda: _traced(pid, port), pairs, tokens),
        "tracer, tracepoints": ratio(cost, lambda: _traced(pid, port, is_stamped=False), pairs, tokens),
    }


@contextmanager
def _relay(group: Cgroup) -> Iterator[tuple[int, int, Cost]]:
    port = ports.pair()
    with tempfile.TemporaryDirectory() as directory, group.entered():
        flags = ("--tcp-listen", f"127.0.0.1:{port}", "--pace", "off")
        with daemon(directory, *flags) as process:
            yield process.pid, port, lambda tokens: relayed_us(directory, process.pid, port, tokens)


def _traced(pid: int, port: int, *, is_stamped: bool = True) -> Tracer:
    return Tracer(pid, {port: "first"}, ("writes",), is_stamped=is_stamped)


def _told(load_ns: int, ran_ns: int, runs: int, tokens: int) -> dict[str, float]:
    return {"load_ms": load_ns / 1e6, "event_ns": ran_ns / max(1, runs), "events": runs / (tokens + WARM)}


def compare(*, smoke: bool) -> dict[str, Any]:
    """Empty where BPF cannot be loaded."""
    if why_no_bpf():
        return {}
    pairs, tokens = (2, 2000) if smoke else (PAIRS, TOKENS)
    result: dict[str, Any] = {}
    with cgroup("-bench") as group, on_one_processor():
        with _relay(group) as (pid, port, cost):
            result["relayed"] = ratios(group, cost, pid, port, pairs, tokens // 4)
        with group.listen() as listener:
            port = listener.getsockname()[1]
            result["written"] = ratios(
                group, lambda tokens: written_us(listener, tokens), os.getpid(), port, pairs, tokens
            )
            with group.entered(), _traced(os.getpid(), port) as traced:
                written_us(listener, tokens)
                spent, result["backend"] = traced.cost(), traced.backends["socket"]
            result["tracer"] = _told(spent.load_ns, spent.bpf_ns or 0, spent.bpf_runs or 0, tokens)
            with Shaped(group, {port: POLICY}) as attached:
                clock = bpfcall.measure_cost()
                try:
                    written_us(listener, tokens)
                    result["shaper"] = _told(attached.load_ns, *attached.spent(), tokens)
                finally:
                    os.close(clock)
    with cgroup("-bench") as group:
        count = 10 if smoke else 200
        result["first"] = {
            name: first_token_ms(group, shaped=shaped, tokens=count)
            for name, shaped in (("unshaped", False), ("shaped", True))
        }
    return result


def show(result: dict[str, Any]) -> str:
    if not result:
        return f"trace: not measured: {why_no_bpf()}"
    rows = []
    for base, title in (("relayed", "clawd's own"), ("written", "a bare write")):
        for name, each in result[base].items():
            low, high = each["interval"]
            bound = f"{BOUNDS[name]:g}" if base == "relayed" else "-"
            rows.append((title, name, f"{each['without_us']:.2f}", f"{each['with_us']:.2f}", f"{each['ratio']:.3f}",
                         f"{low:.3f}-{high:.3f}", bound))  # fmt: skip
    lines = [f"trace (microseconds of processor time a token; the tracer without another word: {result['backend']})"]
    lines.append(render.table(("token", "attached", "without", "with", "ratio", "95 %", "bound"), rows, 110))
    for name in ("shaper", "tracer"):
        each = result[name]
        lines.append(
            f"{name}: to load {each['load_ms']:.0f} ms, {each['event_ns']:.0f} ns a run of a program,"
            f" {each['events']:.1f} runs a bare write"
        )
    first = result["first"]
    for name, each in first.items():
        lines.append(
            f"a first token while others resume on a full link, {name}:"
            f" p50 {each['p50_ms']:.1f} ms, p99 {each['p99_ms']:.1f} ms"
        )
    lines.append(f"shaped / unshaped: p99 {first['shaped']['p99_ms'] / first['unshaped']['p99_ms']:.4f}x")
    return "\n".join(lines)
