# SPDX-License-Identifier: Apache-2.0
"""What the histograms make of the times that records bear and the clock that turns and sends are told."""

from __future__ import annotations

import json
import time

import pytest

from clawd.consumer import Consumer
from clawd.core import lib
from clawd.producer import Producer
from rig import CREDIT, Rig
from tests.daemon import PATIENCE_S, Daemon, until
from tests.pace_model import MS
from tests.test_ctl import clawctl
from tests.test_pacing import paced

TOKEN = lib.CLAW_TOKEN


def test_what_is_written_while_a_turn_goes_on_is_accounted_as_taken_at_once() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        now = time.monotonic_ns()
        ring.open(0, "s", requested_ns=now - 5)
        for later in (0, 1, 3_000_000):
            ring.put(TOKEN, 0, b"a", at=now + later)
        rig.turn(now)
        assert rig.core.attach(client, 1, b"s", credit=CREDIT) == 0
        rig.turn(now)
        rig.core.sent(rig.frames[0], now + 1_000_000)
        assert rig.core.refresh_totals().odd_clock == 0
        assert rig.core.quantiles(lib.CLAW_HIST_COMMIT, (1.0,)) == (3, [0])
        assert rig.core.quantiles(lib.CLAW_HIST_SEND, (0.0,)) == (3, [0])


def test_times_are_accounted_once_a_frame_is_sent() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        now = time.monotonic_ns()
        ring.open(0, "s", requested_ns=now - 5_000_000)
        ring.put(TOKEN, 0, b"a", at=now)
        ring.put(TOKEN, 0, b"b", at=now + 10**13)  # a clock that makes no sense
        rig.turn()
        rig.core.attach(client, 1, b"s", credit=CREDIT)
        rig.turn()
        rig.core.sent(rig.frames[0], now + 1_000_000)
        totals = rig.core.refresh_totals()
        assert (totals.sent, totals.odd_clock) == (2, 2)
        count, (p50,) = rig.core.quantiles(lib.CLAW_HIST_SEND, (0.5,))
        assert count == 1
        assert p50 == pytest.approx(1_000_000, rel=0.035)
        count, (p50,) = rig.core.quantiles(lib.CLAW_HIST_FIRST, (0.5,))
        assert count == 1
        assert p50 == pytest.approx(6_000_000, rel=0.035)
        count, (p50,) = rig.core.quantiles(lib.CLAW_HIST_WRITTEN, (0.5,))
        assert count == 1
        assert p50 == pytest.approx(5_000_000, rel=0.035)


def spread(rig: Rig, which: int) -> list[int]:
    """The values in milliseconds, as near as buckets tell."""
    count, _ = rig.core.quantiles(which, (0.0,))
    return [round(ns / MS) for ns in rig.core.quantiles(which, [(at + 0.5) / count for at in range(count)])[1]]


def test_gaps_are_accounted_as_they_were_sent_to_each_reader() -> None:
    with Rig() as rig:
        ring, clients = rig.ring(), [rig.core.connect(), rig.core.connect()]
        ring.open(0, "s")
        rig.turn()
        now = time.monotonic_ns()
        for client in clients:
            rig.core.attach(client, 1, b"s", credit=CREDIT)
        for texts, later_ms in ((b"ab", (1, 3)), (b"c", (41, 103))):
            for text in texts:
                ring.put(TOKEN, 0, bytes([text]), at=now)
            rig.turn(now)
            for frame, ms in zip(rig.frames, later_ms, strict=True):
                rig.core.sent(frame, now + ms * MS)
        assert spread(rig, lib.CLAW_HIST_GAP_SENT) == pytest.approx([0, 0, 40, 100], rel=0.05)
        assert spread(rig, lib.CLAW_HIST_GAP) == [0, 0]


def test_what_waits_for_room_at_a_client_waits_between_its_release_and_its_sending() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        rig.turn()
        now = time.monotonic_ns()
        rig.core.attach(client, 1, b"s", credit=CREDIT)
        rig.core.block(client, True)
        for ms in (0, 20):  # the second one comes while the first is timed
            ring.put(TOKEN, 0, b"a", at=now + ms * MS)
            rig.turn(now + ms * MS)
        rig.core.block(client, False)
        rig.turn(now + 30 * MS)
        rig.core.sent(rig.frames[0], now + 30 * MS)
        ring.put(TOKEN, 0, b"b", at=now + 40 * MS)
        rig.turn(now + 40 * MS)
        rig.core.sent(rig.frames[0], now + 41 * MS)
        assert spread(rig, lib.CLAW_HIST_QUEUED) == [1, 30]
        assert spread(rig, lib.CLAW_HIST_QUEUED_FIRST) == [30]
        assert spread(rig, lib.CLAW_HIST_COMMIT) == spread(rig, lib.CLAW_HIST_HELD) == [0, 0, 0]


def test_urgent_tokens_are_accounted_and_gaps_are_not() -> None:
    with paced("steady") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        ring.write(1, b"first")
        clock.run(30 * MS)
        for text in (b"held", b"one", b"two"):
            ring.write(1, text, urgent=text != b"held")
        clock.run(10 * MS)
        ring.put(lib.CLAW_GAP, 1, b"ring_full", count=1_000_000)
        clock.run(10 * MS)
        ring.put(lib.CLAW_GAP, 1, b"ring_full", count=1_000_000)
        ring.write(1, b"three", urgent=True)
        clock.run(10 * MS)
        rig = clock.rig
        assert rig.core.quantiles(lib.CLAW_HIST_HELD, (1.0,)) == (5, [0])
        assert spread(rig, lib.CLAW_HIST_GAP) == spread(rig, lib.CLAW_HIST_GAP_RAW) == [0, 0, 20, 30]


def test_people_see_what_pacing_added_and_how_even_it_made_it(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream, reading = producer.open("s"), consumer.attach("s")
        for _ in range(10):
            stream.write("x")
        for _ in range(10):
            assert reading.read(PATIENCE_S)
        until(lambda: daemon.total("sent") == 10, "they are accounted")
        status = json.loads(clawctl(daemon.runtime_dir, "status", "--json").stdout)
        held, gap = status["latency"]["held"], status["latency"]["gap"]
        assert held["max_ns"] >= 0.97 * held["p99_ns"] > 50_000_000
        assert gap["max_ns"] >= 0.97 * gap["p99_ns"] > 5_000_000
        shown = clawctl(daemon.runtime_dir, "status").stdout
        full, empty = (status["totals"][f"paced_{what}_water"] for what in ("high", "low"))
        assert full, "of ten that come at once"
        assert f" turned slower, {full} nearly full, {empty} ran empty," in shown
        live = clawctl(daemon.runtime_dir, "top", "--count", "1", "--interval", "0.1").stdout
        gaps = next(line for line in live.splitlines() if line.startswith("latency    gap:"))
        assert "; raw p50" in gaps
        assert next(line for line in live.splitlines() if line.startswith("s ")).endswith(" ms")
        value = json.loads(clawctl(daemon.runtime_dir, "top", "--count", "1", "--interval", "0.1", "--json").stdout)
        assert value["tokens_per_wakeup"] is None, "nothing was sent"
        assert value["streams"][0]["pace"] == "smooth"
