# SPDX-License-Identifier: Apache-2.0
"""Pacing between commit and outbox: what readers get when, on a clock that the test moves."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from clawd.core import Pace, lib
from clawd.errors import CoreError
from tests import pace_model
from tests.pace_model import MS, SECOND
from tests.rig import CREDIT, Item, Rig, RingWriter

PACE = Pace(**asdict(pace_model.Pace()))
CHOICE = {"default": lib.CLAW_PACE_DEFAULT, "off": lib.CLAW_PACE_OFF, "smooth": lib.CLAW_PACE_SMOOTH,
          "steady": lib.CLAW_PACE_STEADY}  # fmt: skip


class Clock:
    """A rig whose turns come when something is due, on a clock of its own."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.now = time.monotonic_ns()
        self.number = rig.core.connect()

    def read(self, name: str, id: int = 1) -> None:
        until = self.now + 10 * SECOND
        assert self.rig.core.attach(self.number, id, name.encode(), credit=CREDIT, deadline_ns=until) >= 0

    def turn(self) -> list[Item]:
        found: list[Item] = []
        while items := self.rig.turn(self.now):
            found += items
            self.rig.ack(self.number, self.rig.charged[self.number])
        return found

    def run(self, ns: int) -> list[tuple[int, Item]]:
        """What comes in so much time, with when it came: a turn each millisecond."""
        found = []
        end = self.now + ns
        while True:
            found += [(self.now, item) for item in self.turn()]
            if self.now >= end:
                return found
            self.now = min(self.now + MS, end)


@contextmanager
def paced(mode: str, pace: Pace = PACE, **limits: int) -> Iterator[tuple[Clock, RingWriter]]:
    with Rig(limits=limits) as rig:
        rig.core.pace(mode, pace)
        ring = rig.ring()
        yield Clock(rig), ring


def write(ring: RingWriter, handle: int, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        ring.write(handle, b"%d" % number)


def tokens(found: list[tuple[int, Item]]) -> list[tuple[int, int]]:
    """(when, sequence) of the tokens."""
    return [(at, item.seq) for at, item in found if item.kind == lib.CLAW_TOKEN]


def test_smooth_lets_a_heap_out_one_by_one() -> None:
    with paced("smooth") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        for _ in range(8):
            write(ring, 1, 10)
            found = tokens(clock.run(200 * MS))
        gaps = [b[0] - a[0] for a, b in pairwise(found)]
        assert len(found) >= 9
        assert max(gaps) <= 22 * MS
        assert min(gaps) >= 17 * MS


def test_the_first_token_is_not_held_and_the_end_waits_for_the_last() -> None:
    with paced("smooth") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        write(ring, 1, 5)
        ring.close(1)
        start = clock.now
        found = clock.run(SECOND)
        kinds = [item.kind for _, item in found]
        assert kinds == [lib.CLAW_OPEN, *[lib.CLAW_TOKEN] * 5, lib.CLAW_CLOSE]
        assert found[1][0] == start
        assert found[-1][0] == found[-2][0], "the end comes with the last token"
        assert found[-1][0] - start <= 200 * MS


def test_off_holds_nothing() -> None:
    with paced("off") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        write(ring, 1, 50)
        assert len(tokens([(0, item) for item in clock.turn()])) == 50


def test_a_late_reader_gets_what_was_released_and_no_more() -> None:
    with paced("steady") as (clock, ring):
        ring.open(1, "s")
        write(ring, 1, 200)
        clock.run(SECOND)
        clock.read("s")
        first = [item.seq for item in clock.turn() if item.kind == lib.CLAW_TOKEN]
        assert 45 <= len(first) <= 60
        assert first == list(range(len(first)))
        later = [seq for _, seq in tokens(clock.run(SECOND))]
        assert later == list(range(len(first), len(first) + len(later)))
        assert 25 <= len(later) <= 50


def test_an_urgent_token_and_a_gap_take_what_is_before_them_along() -> None:
    with paced("steady") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        write(ring, 1, 20)
        assert len(clock.turn()) == 2  # OPEN and the first
        ring.write(1, b"urgent", urgent=True)
        assert [item.seq for item in clock.turn()] == list(range(1, 21))
        write(ring, 1, 5)
        ring.put(lib.CLAW_GAP, 1, b"ring_full", count=4_000_000_000)
        clock.turn()
        write(ring, 1, 1)
        found = [(item.kind, item.seq) for _, item in clock.run(SECOND)]
        assert found[-1] == (lib.CLAW_TOKEN, 26 + 4_000_000_000)


def test_a_stream_chooses_for_itself() -> None:
    with paced("steady") as (clock, ring):
        for id, name in enumerate(CHOICE, 1):
            clock.read(name, id)
            ring.open(id, name, pace=CHOICE[name])
            write(ring, id, 30)
        held = {id: 0 for id in range(1, 5)}
        for item in clock.turn():
            held[item.attachment] += item.kind == lib.CLAW_TOKEN
        assert held == {1: 1, 2: 30, 3: 1, 4: 1}
        clock.run(200 * MS)
        ring.open(9, "bad", pace=4)
        clock.turn()
        assert ring.ctl.state == lib.CLAW_STATE_QUARANTINED


def test_the_choice_outlives_a_restart_and_what_was_held_goes() -> None:
    with paced("off") as (clock, ring):
        ring.open(1, "s", pace=CHOICE["steady"])
        write(ring, 1, 100)
        clock.turn()
        clock.rig.restart()
        clock.number = clock.rig.core.connect()
        clock.read("s")
        assert len([item for item in clock.turn() if item.kind == lib.CLAW_TOKEN]) == 100
        write(ring, 1, 30, 100)
        assert len([item for item in clock.turn() if item.kind == lib.CLAW_TOKEN]) < 3
        assert len(tokens(clock.run(2 * SECOND))) >= 27


def test_switched_off_while_it_runs_what_is_held_goes_at_once() -> None:
    with paced("steady") as (clock, ring):
        for id, name in enumerate(("a", "b"), 1):
            clock.read(name, id)
            ring.open(id, name)
            write(ring, id, 40)
        clock.turn()
        assert clock.rig.core.pace_stream(b"a", "off")
        assert {item.attachment for item in clock.turn()} == {1}
        clock.rig.core.pace("off", PACE)
        assert [item.attachment for item in clock.turn()] == [2] * 39
        assert not clock.rig.core.pace_stream(b"c", "off")


def test_nothing_is_lost_to_a_pace_that_is_slower_than_the_time_a_stream_is_kept() -> None:
    with paced("steady", keep_ns=2 * SECOND) as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        write(ring, 1, 300)
        ring.close(1)
        found = clock.run(8 * SECOND)
        assert [seq for _, seq in tokens(found)] == list(range(300))
        assert found[-1][1].kind == lib.CLAW_CLOSE
        assert not [item for _, item in found if item.kind == lib.CLAW_GAP]


def test_evicted_while_it_is_held_is_told_as_a_gap() -> None:
    with paced("steady", spool_bytes=1 << 20, stream_bytes=1 << 15) as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        for first in range(0, 2000, 100):
            for number in range(first, first + 100):
                ring.write(1, b"%d" % number + bytes(100))
            clock.turn()
        clock.rig.core.pace_stream(b"s", "off")
        found = clock.turn()
        gaps = [item for item in found if item.kind == lib.CLAW_GAP]
        assert len(gaps) == 1
        seqs = [item.seq for item in found if item.kind == lib.CLAW_TOKEN]
        missing = set(range(gaps[0].seq, gaps[0].seq + gaps[0].count))
        assert seqs == [seq for seq in range(seqs[0], 2000) if seq not in missing]
        assert len(missing) > 1000


def test_no_tick_when_nothing_is_due() -> None:
    with Rig() as rig:
        rig.core.pace("smooth", PACE)
        ring = rig.ring()
        ring.open(1, "s")
        for _ in range(20):
            ring.write(1, b"x")
            rig.turns()
        deadline = time.monotonic() + 5
        while rig.core.quantiles(lib.CLAW_HIST_HELD, (0.5,))[0] < 20 and time.monotonic() < deadline:
            rig.core.wait(20 * MS)
            rig.core.turn()
        rig.core.turn()
        sleeps = rig.core.refresh_totals().sleeps
        start = time.monotonic()
        assert rig.core.wait(400 * MS) == []
        assert time.monotonic() - start >= 0.35, "woken for nothing"
        assert rig.core.refresh_totals().sleeps == sleeps + 1


def test_what_is_due_wakes_the_wait() -> None:
    with Rig() as rig:
        rig.core.pace("smooth", replace(PACE, max_delay_ns=60 * MS))
        ring = rig.ring()
        ring.open(1, "s")
        for _ in range(2):
            ring.write(1, b"x")
        rig.core.turn()
        rig.core.turn()
        start = time.monotonic()
        rig.core.wait(5 * SECOND)
        assert 0.005 <= time.monotonic() - start < 1, "20 ms is due"


def test_figures_tell_what_was_held() -> None:
    with paced("smooth") as (clock, ring):
        ring.open(1, "s")
        for _ in range(5):
            write(ring, 1, 10)
            clock.run(200 * MS)
        clock.run(SECOND)
        core = clock.rig.core
        assert core.quantiles(lib.CLAW_HIST_HELD, (0.5,))[0] == 50
        assert core.quantiles(lib.CLAW_HIST_HELD, (0.9,))[1][0] > 100 * MS
        raw, delivered = (core.quantiles(which, (0.5, 0.99)) for which in (lib.CLAW_HIST_GAP_RAW, lib.CLAW_HIST_GAP))
        assert raw == (49, [0, pytest.approx(200 * MS, rel=0.05)])
        assert delivered[1][1] < 60 * MS
        assert core.refresh_totals().paced_high_water


@pytest.mark.parametrize("mode", ["smooth", "steady"])
@pytest.mark.parametrize("seed", [1, 2])
def test_how_late_a_token_went_counts_from_when_it_became_due(mode: str, seed: int) -> None:
    luck = random.Random(seed)
    print(f"seed {seed}")
    with paced(mode) as (clock, ring):
        ring.open(1, "s")
        for _ in range(400):
            write(ring, 1, luck.choice([0, 1, 1, 2, 9]))
            clock.run(luck.randrange(60) * MS)
        clock.rig.core.pace("off", PACE)
        clock.run(SECOND)
        count, (late_ns,) = clock.rig.core.quantiles(lib.CLAW_HIST_RELEASE, (1.0,))
        assert count > 500
        assert late_ns <= 1.1 * MS, "turns come each millisecond"


def test_nonsense_changes_nothing() -> None:
    with paced("smooth") as (clock, ring):
        for wrong in (
            replace(PACE, refill_rate=0),
            replace(PACE, leak_rate=2**32 - 1),
            replace(PACE, prefetch=0),
            replace(PACE, prefetch=17),
            replace(PACE, bucket=4),
            replace(PACE, max_delay_ns=2**63),
            replace(PACE, burst=2**31),
        ):
            with pytest.raises(CoreError):
                clock.rig.core.pace("steady", wrong)
        ring.open(1, "s")
        write(ring, 1, 100)
        clock.read("s")
        assert len(tokens(clock.run(300 * MS))) == 100, "still smooth"


@pytest.mark.parametrize("seed", [7, 8])
def test_what_was_told_stays_told(seed: int) -> None:
    """Any mix of modes, streams and readers: each reader gets every token once and in order."""
    luck = random.Random(seed)
    print(f"seed {seed}")
    with paced("smooth") as (clock, ring):
        names = [f"s{i}" for i in range(6)]
        written = dict.fromkeys(names, 0)
        for id, name in enumerate(names, 1):
            clock.read(name, id)
            ring.open(id, name, pace=luck.randrange(4))
        seen: dict[int, list[int]] = {id: [] for id in range(1, 7)}
        for _ in range(300):
            for id, name in enumerate(names, 1):
                count = luck.choice([0, 0, 1, 1, 2, 7])
                write(ring, id, count, written[name])
                written[name] += count
            if luck.random() < 0.05:
                clock.rig.core.pace(luck.choice(["off", "smooth", "steady"]), PACE)
            if luck.random() < 0.05:
                clock.rig.core.pace_stream(luck.choice(names).encode(), luck.choice(["off", "smooth", "default"]))
            for _, item in clock.run(luck.randrange(30) * MS):
                if item.kind == lib.CLAW_TOKEN:
                    seen[item.attachment].append(item.seq)
        clock.rig.core.pace("off", PACE)
        for name in names:
            clock.rig.core.pace_stream(name.encode(), "off")
        for item in clock.turn():
            if item.kind == lib.CLAW_TOKEN:
                seen[item.attachment].append(item.seq)
        for id, name in enumerate(names, 1):
            assert seen[id] == list(range(written[name]))


@pytest.mark.parametrize("mode", ["smooth", "steady"])
@pytest.mark.parametrize("lie", [0, 1, 2**63, 2**64 - 1])
def test_a_producer_whose_clock_lies_changes_no_pace(mode: str, lie: int) -> None:
    came = []
    for at in (0, lie):
        with paced(mode) as (clock, ring):
            clock.read("s")
            ring.open(1, "s")
            start = clock.now
            for _ in range(3):
                for _ in range(5):
                    ring.put(lib.CLAW_TOKEN, 1, b"x", at=at)
                found = tokens(clock.run(100 * MS))
                came.append([(when - start, seq) for when, seq in found])
    assert came[:3] == came[3:]


def test_a_machine_that_slept_goes_on_at_once() -> None:
    with paced("smooth") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        write(ring, 1, 10)
        clock.turn()
        clock.now += 3600 * SECOND
        assert [item.seq for item in clock.turn()] == list(range(1, 10))
        write(ring, 1, 2)
        assert len(tokens(clock.run(200 * MS))) == 2


def test_credit_that_cannot_be_holds_up_nobody() -> None:
    with paced("smooth") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        write(ring, 1, 3)
        clock.turn()
        for limit in (0, 2**64 - 1):
            clock.rig.ack(clock.number, clock.rig.charged[clock.number], {1: limit, 77: limit})
        write(ring, 1, 3)
        assert len(tokens(clock.run(SECOND))) == 5
