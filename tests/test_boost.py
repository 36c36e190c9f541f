# SPDX-License-Identifier: Apache-2.0
"""When the processor is asked for: any traffic on a clock of the test's own."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd.core import lib
from clawd.server.boost import CHANGES_PER_S_MAX, FIRST, HOLD_NS, LEASE_NS, PAUSE_NS, PRESSURE, RENEW_NS, REST, Boost

pytestmark = pytest.mark.plain
MS = 1_000_000
SECOND = 1000 * MS
WAIT_NS = lib.CLAW_FIRST_WAIT_MS * MS


@dataclass
class World:
    """Streams that open and get their first token, a host that comes under pressure, and a loop that steps when
    something happens or is due. `asked` and `changes` are what came of it.
    """

    boost: Boost = field(default_factory=Boost)
    now: int = SECOND
    waits: dict[int, int] = field(default_factory=dict)
    pressure: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0

    def step(self) -> None:
        self.steps += 1
        self.waits = {stream: until for stream, until in self.waits.items() if until > self.now}
        level = self.boost.level
        ask = self.boost.step(self.now, max(self.waits.values(), default=0), self.pressure)
        if ask:
            assert ask.lease_ns == LEASE_NS
            self.asked.append((self.now, ask.level))
        if self.boost.level != level:
            assert ask
            assert ask.level == self.boost.level
            self.changes.append((self.now, ask.level))

    def run(self, until: int) -> None:
        """Let time pass; the loop wakes when the step said."""
        while self.boost.due_ns and self.boost.due_ns <= until:
            assert self.boost.due_ns > self.now
            self.now = self.boost.due_ns
            self.step()
        self.now = max(self.now, until)

    def held(self, level: int) -> int:
        """How long it was at that level or above."""
        total, since = 0, None
        for at, reached in [*self.changes, (self.now, REST)]:
            if reached >= level and since is None:
                since = at
            elif reached < level and since is not None:
                total, since = total + at - since, None
        return total


def most_in_a_second(times: list[int]) -> int:
    window: list[int] = []
    most = 0
    for at in times:
        heapq.heappush(window, at)
        while window[0] <= at - SECOND:
            heapq.heappop(window)
        most = max(most, len(window))
    return most


EVENTS = st.lists(
    st.tuples(st.integers(0, 700 * MS), st.sampled_from(["open", "first", "pressure", "calm"]), st.integers(0, 5)),
    max_size=120,
)


@given(EVENTS)
def test_whatever_happens(events: list[tuple[int, str, int]]) -> None:
    world = World()
    opened = 0
    for gap, what, number in events:
        world.run(world.now + gap)
        if what == "open":
            world.waits[opened] = world.now + WAIT_NS
            opened += 1
        elif what == "first" and world.waits:
            del world.waits[sorted(world.waits)[number % len(world.waits)]]
        elif what in ("pressure", "calm"):
            world.pressure = 1 + number % 3 if what == "pressure" else 0
        world.step()
        # what is urgent waits for no more than the pause
        if world.waits and world.boost.level < FIRST:
            assert world.now < world.changes[-1][0] + PAUSE_NS
    world.pressure = 0
    world.run(world.now + WAIT_NS + HOLD_NS + PAUSE_NS)
    assert world.boost.level == REST, "it always comes back"
    assert world.boost.due_ns == 0, "and then nothing is done"
    assert most_in_a_second([at for at, _ in world.changes]) <= CHANGES_PER_S_MAX
    assert all(later - at >= PAUSE_NS for (at, _), (later, _) in itertools.pairwise(world.changes))
    assert world.held(FIRST) <= opened * (WAIT_NS + HOLD_NS + PAUSE_NS)
    for (at, level), (later, _) in itertools.pairwise([*world.asked, (world.now, REST)]):
        assert level == REST or later - at <= RENEW_NS, "renewed before its lease is over"


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_a_storm_is_one_boost(seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    for number, at in enumerate(sorted(rng.randrange(SECOND) for _ in range(1000))):
        world.run(2 * SECOND + at)
        if rng.random() < 0.3:  # the others are answered within the same turn
            world.waits[number] = world.now + WAIT_NS
        world.step()
    world.run(world.now + WAIT_NS + HOLD_NS + PAUSE_NS)
    assert world.boost.level == REST
    assert most_in_a_second([at for at, _ in world.changes]) <= CHANGES_PER_S_MAX
    assert len(world.asked) <= 2 * CHANGES_PER_S_MAX
    assert world.held(FIRST) <= SECOND + WAIT_NS + HOLD_NS + PAUSE_NS


def test_a_stream_is_boosted_half_a_second_and_no_longer() -> None:
    world = World()
    world.waits[0] = world.now + WAIT_NS
    world.step()
    assert world.changes == [(SECOND, FIRST)]
    world.run(10 * SECOND)
    assert world.changes[1] == (SECOND + WAIT_NS + HOLD_NS, REST)
    assert world.steps < 10, "and nobody wakes for more than renewals"


def test_what_is_urgent_right_after_a_fall_waits_for_the_pause() -> None:
    world = World()
    world.waits[0] = world.now + WAIT_NS
    world.step()
    world.run(SECOND + WAIT_NS + HOLD_NS + MS)
    assert world.boost.level == REST
    world.waits[1] = world.now + WAIT_NS
    world.step()
    assert world.boost.level == REST
    world.run(world.now + PAUSE_NS)
    assert world.changes[2] == (SECOND + WAIT_NS + HOLD_NS + PAUSE_NS, FIRST)


def test_a_wait_that_is_over_is_none_though_no_turn_has_said_so() -> None:
    boost = Boost()
    assert boost.step(2 * SECOND, 2 * SECOND, 0) is None
    assert boost.step(2 * SECOND, 2 * SECOND - 1, 1) is not None
    assert boost.level == PRESSURE


def test_pressure_stays_when_a_boost_ends() -> None:
    world = World()
    world.pressure = 2
    world.step()
    world.run(world.now + 150 * MS)
    world.waits[0] = world.now + WAIT_NS
    world.step()
    world.waits.clear()
    world.step()
    world.run(world.now + SECOND)
    assert [level for _, level in world.changes] == [PRESSURE, FIRST, PRESSURE]
    assert world.boost.level == PRESSURE


def test_levels_are_those_of_the_core() -> None:
    assert (REST, PRESSURE, FIRST) == (lib.CLAW_BOOST_REST, lib.CLAW_BOOST_PRESSURE, lib.CLAW_BOOST_FIRST)
