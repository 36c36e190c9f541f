# SPDX-License-Identifier: Apache-2.0
"""What clawd asks for, and of whom: with a core and a clawd-kernel that only note what they are told."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd import protocol
from clawd.config import Config
from clawd.server.boost import CHANGES_PER_S_MAX, HOLD_NS, PAUSE_NS
from clawd.server.pressure import WAIT_US, Sight
from clawd.server.urgency import OFF, Urgency

pytestmark = pytest.mark.plain
MS = 1_000_000
SECOND = 1000 * MS
ON = replace(Config(), boost=True)


@dataclass
class Outcome:
    first_until_ns: int = 0
    first_count: int = 0


@dataclass
class FakeCore:
    outcome: Outcome = field(default_factory=Outcome)
    levels: list[int] = field(default_factory=list)
    boosts: list[int] = field(default_factory=list)

    def pressure(self, level: int) -> None:
        self.levels.append(level)

    def boost(self, level: int, _run_delay_ns: int) -> None:
        self.boosts.append(level)


class World:
    def __init__(self, directory: Path, config: Config = ON) -> None:
        self.core = FakeCore()
        self.now = SECOND
        self.wait_us = 0
        self.delay = self.runs = 0
        self.urgency = Urgency(
            self.core,  # type: ignore[arg-type]
            config,
            directory=directory,
            look=self._look,
            clock=lambda: self.now,
        )

    def _look(self, now_ns: int) -> tuple[Sight, str]:
        self.runs += 100
        self.delay += self.wait_us * 1000 * 100
        return Sight(now_ns, now_ns // 1000, self.delay, self.runs), ""

    def open(self) -> None:
        self.core.outcome = Outcome(self.now + 500 * MS, 1)
        self.urgency.step()

    def sent(self) -> None:
        self.core.outcome = Outcome()
        self.urgency.step()

    def run(self, until: int) -> int:
        """The loop, which a core that never turns wakes only when it is told to; how often it did."""
        passes = 0
        while self.now < until:
            sleep = self.urgency.timeout_ns(SECOND)
            assert sleep > 0, "it would spin"
            self.now += sleep
            self.urgency.step()
            passes += 1
        return passes


class FakeKernel:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / protocol.KERNEL_SOCKET))
        self._listener.listen()
        self._listener.setblocking(False)
        self.peer: socket.socket | None = None

    def asked(self) -> list[protocol.SetBoost]:
        """What came since it was last asked."""
        if self.peer is None:
            try:
                self.peer, _ = self._listener.accept()
            except BlockingIOError:
                return []
            self.peer.setblocking(False)
        found = []
        while True:
            try:
                packet = self.peer.recv(4096)
            except BlockingIOError:
                return found
            if not packet:
                return found
            found.append(protocol.decode(packet, (protocol.SetBoost,), protocol.KERNEL_MESSAGE_MAX))

    def answer(self, reason: str | None) -> None:
        assert self.peer
        state = "off" if reason else "first"
        self.peer.send(protocol.encode(protocol.Boosting(state, reason, {}, {}, {}, [], 0, 0)))

    def hang_up(self) -> None:
        assert self.peer
        self.peer.close()
        self.peer = None

    def close(self) -> None:
        if self.peer:
            self.peer.close()
        self._listener.close()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[FakeKernel]:
    made = FakeKernel(tmp_path / "kernel")
    yield made
    made.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "kernel")
    yield made
    made.urgency.close()


def test_from_open_to_first_token_and_why(world: World, kernel: FakeKernel) -> None:
    world.urgency.step()
    assert kernel.asked() == []
    world.open()
    assert kernel.asked() == [protocol.SetBoost(2, 600, waiting=1)]
    assert world.urgency.told().level == 2
    world.now += 50 * MS
    world.sent()
    assert kernel.asked() == []
    world.run(world.now + 2 * HOLD_NS)
    assert kernel.asked() == [protocol.SetBoost(0, 600)]
    assert world.core.boosts[-1] == 0
    assert world.run(world.now + 10 * SECOND) <= 11, "then it sleeps"
    assert kernel.asked() == []


def test_a_first_token_that_never_comes_is_boosted_half_a_second(world: World, kernel: FakeKernel) -> None:
    world.open()
    started = world.now
    world.run(started + 500 * MS + HOLD_NS)
    assert [request.level for request in kernel.asked()][-1] == 0
    assert world.now - started <= 500 * MS + HOLD_NS + PAUSE_NS
    world.now += PAUSE_NS
    world.open()
    assert [request.level for request in kernel.asked()] == [2], "though no pass saw that nothing waited"


def test_pressure_is_told_to_engines_and_to_the_kernel_and_taken_back(
    world: World, kernel: FakeKernel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.wait_us = WAIT_US[1]
    world.run(world.now + 3 * SECOND)
    assert world.core.levels == [2]
    requests = kernel.asked()
    assert {(request.level, request.pressure) for request in requests} == {(1, 2)}
    assert len(requests) <= 12
    world.wait_us = 0
    world.run(world.now + 15 * SECOND)
    assert world.core.levels == [2, 1, 0]
    assert [record.getMessage().split()[:2] for record in caplog.records if "pressure" in record.getMessage()] == [
        ["pressure", f"pressure={level}"] for level in (2, 1, 0)
    ]
    assert kernel.asked()[-1].level == 0


def test_without_a_helper_it_says_so_and_tries_again(tmp_path: Path, world: World) -> None:
    world.open()
    assert world.urgency.told().reason == "clawd-kernel is not running"
    kernel = FakeKernel(tmp_path / "kernel")
    world.now += 1100 * MS
    world.open()
    world.run(world.now + 260 * MS)
    assert kernel.asked()
    kernel.answer("cgroup v2 lacks the cpu controller here")
    world.run(world.now + 1100 * MS)
    assert world.urgency.told().reason == "cgroup v2 lacks the cpu controller here"
    kernel.hang_up()
    world.open()
    assert world.urgency.told().reason == "clawd-kernel ended"
    kernel.close()


def test_a_helper_that_stands_still_holds_nothing_up(world: World, kernel: FakeKernel) -> None:
    for _ in range(2000):  # more than its socket takes
        world.now += 300 * MS
        world.open()
    assert world.urgency.told().reason in ("clawd-kernel does not answer", "clawd-kernel is too busy to be asked")
    assert kernel.asked()


def test_turned_off_it_asks_nobody(tmp_path: Path, kernel: FakeKernel) -> None:
    world = World(tmp_path / "kernel", replace(Config(), boost=False, pressure=False))
    world.wait_us = WAIT_US[2]
    world.open()
    world.run(world.now + 5 * SECOND)
    assert kernel.asked() == []
    assert world.core.levels == []
    told = world.urgency.told()
    assert (told.reason, told.unseen) == (OFF, "[kernel] pressure = off")
    world.urgency.apply(ON)
    world.open()
    assert [request.level for request in kernel.asked()] == [2]
    world.urgency.apply(replace(ON, boost=False))
    assert kernel.peer
    assert kernel.asked() == []
    assert kernel.peer.recv(10) == b"", "the lease ends with the connection"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 400 * MS), st.sampled_from(["open", "sent", "turn"])), max_size=60))
def test_it_never_spins_and_always_rests(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, str]]
) -> None:
    world = World(tmp_path_factory.mktemp("none"))
    for gap, what in events:
        world.run(world.now + gap)
        if what == "turn":  # which finds out what waited long enough
            if world.core.outcome.first_until_ns <= world.now:
                world.sent()
        else:
            getattr(world, what)()
    world.sent()
    world.run(world.now + SECOND)
    assert world.urgency.told().level == 0
    changes = sum(one != other for one, other in zip(world.core.boosts, world.core.boosts[1:], strict=False))
    assert changes <= CHANGES_PER_S_MAX * (world.now // SECOND)
    assert world.urgency.timeout_ns(SECOND) == SECOND
