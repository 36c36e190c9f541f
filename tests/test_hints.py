# SPDX-License-Identifier: Apache-2.0
"""Hints upstream: an engine that is too fast, a reader that does not take, a host under pressure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clawd.core import Told, lib
from clawd.errors import CoreError
from tests.pace_model import MS, SECOND
from tests.rig import CREDIT, Rig, RingWriter
from tests.test_pacing import PACE, paced, write

LAG, CONGESTED, PRESSURE = lib.CLAW_HINT_LAG, lib.CLAW_HINT_CONGESTED, lib.CLAW_HINT_PRESSURE
NOTHING = (0, 0, 0)


def hint(ring: RingWriter) -> tuple[int, int, int]:
    assert ring.ctl.hint_seq % 2 == 0
    return ring.ctl.target_rate, ring.ctl.degrade, ring.ctl.hint_reason


def test_a_stream_that_lags_asks_for_less_and_takes_it_back() -> None:
    with paced("steady") as (clock, ring):
        ring.open(1, "s")
        write(ring, 1, 150)
        clock.run(900 * MS)
        assert hint(ring) == NOTHING
        clock.run(2 * SECOND)
        assert hint(ring) == (30_000, 1, LAG)
        write(ring, 1, 300)
        clock.run(9 * SECOND)
        assert hint(ring) == (30_000, 2, LAG)
        clock.run(12 * SECOND)
        assert hint(ring) == NOTHING


def test_only_the_ring_that_lags_is_told() -> None:
    with paced("steady") as (clock, ring):
        other = clock.rig.ring()
        ring.open(1, "s")
        other.open(1, "t")
        write(ring, 1, 150)
        write(other, 1, 3)
        clock.run(3 * SECOND)
        assert hint(ring)[1] == 1
        assert hint(other) == NOTHING


def test_the_rate_asked_for_is_one_that_the_way_lets_through() -> None:
    with paced("steady") as (clock, ring):
        clock.read("s")
        clock.rig.core.open_way(clock.number, 0)
        clock.rig.core.tell_way(clock.number, Told(1, 1000, 100_000, 0, 0))
        ring.open(1, "s")
        write(ring, 1, 150)
        clock.run(4 * SECOND)
        assert hint(ring) == (15_000, 1, LAG), "jitter of 100 ms leaves half of it"


def test_smooth_asks_for_no_rate_however_long_it_may_hold() -> None:
    with paced("smooth", replace(PACE, max_delay_ns=5 * SECOND)) as (clock, ring):
        ring.open(1, "s")
        for _ in range(3):
            write(ring, 1, 80)
            clock.run(2 * SECOND)
        held_ns = clock.rig.core.quantiles(lib.CLAW_HIST_HELD, (0.9,))[1][0]
        assert held_ns > SECOND
        assert hint(ring) == NOTHING


def test_a_reader_that_does_not_take_is_told_to_the_engine() -> None:
    with paced("off") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        for _ in range(8):
            for _ in range(100):
                ring.write(1, bytes(500))
            clock.rig.turn(clock.now)  # nothing is acked
            clock.now += 100 * MS
        assert hint(ring) == (0, 1, CONGESTED)
        clock.rig.ack(clock.number, clock.rig.charged[clock.number])
        for _ in range(200):
            clock.turn()
            clock.now += 20 * MS
        assert hint(ring) == NOTHING


def test_one_who_only_watches_and_does_not_take_slows_nobody_down() -> None:
    with paced("steady") as (clock, ring):
        clock.read("s")
        watcher = clock.rig.core.connect()
        until = clock.now + 10 * SECOND
        assert clock.rig.core.attach(watcher, 1, b"s", credit=CREDIT, deadline_ns=until, observes=True) >= 0
        ring.open(1, "s")
        start, came = clock.now, 0
        while clock.now - start < 9 * SECOND:
            ring.write(1, bytes(3000))  # of which the watcher never says that it has them
            came += len([1 for _, item in clock.run(30 * MS) if item.connection == clock.number])
            assert hint(ring) == NOTHING
        assert clock.rig.charged[watcher] > lib.CLAW_WINDOW - 2 * lib.CLAW_FRAME_MAX, "its window is full"
        assert came >= 270


def test_pressure_is_told_to_all() -> None:
    with paced("off") as (clock, ring):
        other = clock.rig.ring()
        clock.rig.core.pressure(2)
        clock.turn()
        assert hint(ring) == hint(other) == (0, 2, PRESSURE)
        clock.rig.core.pressure(0)
        clock.run(500 * MS)
        assert hint(ring)[1] == 2, "it wavers"
        clock.run(SECOND)
        assert hint(ring) == hint(other) == NOTHING
        with pytest.raises(CoreError):
            clock.rig.core.pressure(4)


def test_an_engine_that_comes_later_is_told_of_the_pressure_too() -> None:
    with Rig() as rig:
        rig.core.pressure(2)
        rig.turn()
        ring = rig.ring()
        rig.core.wait(SECOND)
        rig.turn()
        assert hint(ring) == (0, 2, PRESSURE)


@pytest.mark.parametrize("torn", [False, True])
def test_what_an_earlier_clawd_told_is_taken_back(torn: bool) -> None:
    with paced("off") as (clock, ring):
        clock.rig.core.pressure(3)
        clock.turn()
        assert hint(ring) == (0, 3, PRESSURE)
        if torn:  # killed in the middle of telling
            ring.ctl.hint_seq |= 1
        clock.rig.restart()
        clock.turn()
        assert hint(ring) == (0, 3, PRESSURE), "it wavers"
        clock.now += 2 * SECOND
        clock.turn()
        assert hint(ring) == NOTHING


def test_clients_are_told_what_to_leave_out() -> None:
    with paced("off") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")

        def degrade() -> int:
            clock.turn()
            write(ring, 1, 1)
            clock.rig.turn(clock.now)
            return clock.rig.frames[0][12]

        assert degrade() == 0
        clock.rig.core.pressure(3)
        assert degrade() == 3
        clock.rig.core.pressure(0)
        for _ in range(6):
            for _ in range(50):
                ring.write(1, bytes(1000))
            clock.rig.turn(clock.now)
        levels = []
        for _ in range(60):
            clock.rig.ack(clock.number, clock.rig.charged[clock.number])
            clock.rig.turn(clock.now)
            levels += [frame[12] for frame in clock.rig.frames]
        assert 1 in levels, "it does not take what is sent"
        assert degrade() == 0, "caught up"
