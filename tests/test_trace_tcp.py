# SPDX-License-Identifier: Apache-2.0
"""`clawctl trace` as root beside a clawd whose client is on another host: every stage by class, a slow way in its stage
alone, and nothing left of a trace that is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd.consumer import Consumer
from clawd.ctl import trace_stages
from clawd.ctl.trace_stages import Trace
from clawd.kernel import bpfcall, tracer
from clawd.producer import Producer
from tests import net, ports
from tests.cgroups import alone
from tests.daemon import PATIENCE_S, Daemon, until
from tests.net import Net
from tests.test_ctl import clawctl, command
from tests.test_tcp import Site, site

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(net.reason()), reason=net.reason() or "can")]
TOKENS = 41


@pytest.fixture(autouse=True)
def _alone(tracer: None) -> Iterator[None]:
    with alone():
        yield


@contextmanager
def served(seed: int, directory: Path, **quality: float) -> Iterator[tuple[Site, Producer, Consumer]]:
    with (
        Net(seed, **quality) as way,
        site(way, directory) as made,
        Producer("p", made.daemon.runtime_dir) as producer,
        made.consumer() as consumer,
    ):
        yield made, producer, consumer


def stream(producer: Producer, consumer: Consumer, name: str) -> None:
    """TOKENS tokens, each read before the next is written."""
    opened = producer.open(name)
    reading = consumer.attach(name, wait=PATIENCE_S)
    for _ in range(TOKENS):
        opened.write("x")
        assert reading.read(PATIENCE_S)
    opened.close()
    assert reading.read(PATIENCE_S) is None


def rows(value: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["class"]): row for row in value["stages"]}


def attached(pid: int) -> list[int]:
    group = os.open(tracer.cgroup_of(pid), os.O_RDONLY)
    try:
        kinds = (bpfcall.EGRESS, bpfcall.INGRESS, bpfcall.SOCK_OPS, bpfcall.SETSOCKOPT)
        return [number for kind in kinds for number in bpfcall.programs_at(group, kind)]
    finally:
        os.close(group)


def test_every_stage_tells_first_tokens_from_the_rest(seed: int, tmp_path: Path) -> None:
    with served(seed, tmp_path) as (made, producer, consumer):
        stream(producer, consumer, "before")
        with Trace(made.daemon.runtime_dir, ("writes",)) as trace:
            stream(producer, consumer, "s")
            until(lambda: rows(trace.collect())["acked", "rest"]["count"] >= TOKENS - 1, "acknowledged")
            value = trace.collect()
    found = rows(value)
    assert set(found) == {(stage, klass) for stage in trace_stages.STAGES for klass in ("first", "rest")} - {
        ("written", "rest")
    }
    for stage in ("committed", "released", "relay"):
        assert (found[stage, "first"]["count"], found[stage, "rest"]["count"]) == (1, TOKENS - 1), stage
    assert found["sent", "rest"]["count"] == TOKENS - 1, "each went before the next was written"
    for stage in ("socket", "device", "acked", "network"):
        row = found[stage, "first"]
        assert row["count"] >= 1, stage  # the first token, on the express lane
        assert row["p50_us"] <= row["p99_us"] <= row["max_us"], stage
        assert not row["backend"].startswith("none"), stage
    assert value["counters"]["missed"] <= 2
    assert 1 <= value["counters"]["express_frames"] <= 2, "the first token, and the open before it"
    text = trace_stages.show(value)
    assert max(map(len, text.splitlines())) <= 80, text


def test_a_long_way_shows_at_the_acknowledgement_alone(seed: int, tmp_path: Path) -> None:
    with served(seed, tmp_path, delay_s=0.02) as (made, producer, consumer):
        stream(producer, consumer, "before")
        with Trace(made.daemon.runtime_dir, ("writes",)) as trace:
            stream(producer, consumer, "s")
            until(lambda: rows(trace.collect())["acked", "rest"]["count"] >= TOKENS - 1, "acknowledged")
            value = trace.collect()
    found = rows(value)
    slow = {place for place, row in found.items() if row["count"] and row["p50_us"] >= 15_000}
    # The first token waits for its reader, who is as far away
    far = {(stage, klass) for stage in ("acked", "network") for klass in ("first", "rest")}
    assert slow - {("relay", "first")} == far
    assert all(found["network", klass]["budget_us"] == 50_000 for klass in ("first", "rest"))
    assert "%" not in next(line for line in trace_stages.show(value).splitlines() if line.startswith("acked"))


def test_a_client_has_its_lane(seed: int, tmp_path: Path) -> None:
    with served(seed, tmp_path) as (made, producer, consumer):
        stream(producer, consumer, "s")
        run = clawctl(made.daemon.runtime_dir, "trace", "sockets", "--json")
        text = clawctl(made.daemon.runtime_dir, "trace", "sockets").stdout
    assert sorted(row["lane"] for row in json.loads(run.stdout)["sockets"]) == ["bulk", "express"], run.stderr
    assert max(map(len, text.splitlines())) <= 80


def test_what_else_went_by_the_express_lane_is_told(seed: int, tmp_path: Path) -> None:
    with served(seed, tmp_path) as (made, producer, consumer), Trace(made.daemon.runtime_dir, ("writes",)) as trace:
        opened, reading = producer.open("s"), consumer.attach("s", wait=PATIENCE_S)
        for _ in range(5):
            opened.write("x", urgent=True)
            assert reading.read(PATIENCE_S)
        until(lambda: trace.collect()["counters"]["express_frames"] >= 5, "copies")
        value = trace.collect()
    [note] = value["notes"]
    assert "while 1 first tokens were sent" in note
    assert note in trace_stages.show(value).replace("\n    ", " ")


INSIDE = ("unshare", "--pid", "--fork", "--mount-proc")


def test_a_clawd_in_a_container_is_traced_from_its_host(tmp_path: Path) -> None:
    port = ports.pair()
    daemon = Daemon(tmp_path / "run", "--tcp-listen", f"127.0.0.1:{port}", prefix=INSIDE)
    with daemon:
        [pid] = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
        with (
            Producer("p", daemon.runtime_dir) as producer,
            Consumer(endpoint=f"tcp://127.0.0.1:{port}") as consumer,
            Trace(daemon.runtime_dir, ("writes",)) as trace,
        ):
            stream(producer, consumer, "s")
            until(lambda: rows(trace.collect())["acked", "rest"]["count"] >= TOKENS - 1, "acknowledged")
            assert trace.tracer
            assert trace.tracer.pid == int(pid)
            told = json.loads(clawctl(daemon.runtime_dir, "trace", "sockets", "--json").stdout)
            assert sorted(row["lane"] for row in told["sockets"]) == ["bulk", "express"]
        status = daemon.status()
        os.kill(int(pid), signal.SIGTERM)  # unshare would not hand it on
        daemon.await_stop(status)


def test_from_a_container_it_says_that_clawd_is_not_seen(tmp_path: Path) -> None:
    with Daemon(tmp_path / "run") as daemon:
        words = [*INSIDE, *command(daemon.runtime_dir, "trace", "sockets")]
        run = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (
            1, "clawctl: clawd is in a PID namespace that is not seen from here; run it on clawd's host\n")  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_a_trace_that_ended_is_left(seed: int, tmp_path: Path, how: int) -> None:
    with served(seed, tmp_path) as (made, producer, consumer):
        pid = made.daemon.pid
        before = attached(pid)
        words = command(made.daemon.runtime_dir, "trace", "--json", "--interval", "0.1")
        run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert run.stdout
        assert json.loads(run.stdout.readline())["cost"]["programs"] > 0
        assert len(attached(pid)) > len(before)
        run.send_signal(how)
        _, told = run.communicate(timeout=PATIENCE_S)
        assert (run.returncode, told) == (0 if how == signal.SIGTERM else -how, b"")
        until(lambda: attached(pid) == before, "detached")
        stream(producer, consumer, "after")
