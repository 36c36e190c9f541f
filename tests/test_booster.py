# SPDX-License-Identifier: Apache-2.0
"""Weights that are flipped under a lease: never oftener than the bound, always put back, never over another's value."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd import protocol
from clawd.errors import HostError
from clawd.kernel import boost, tree
from clawd.kernel.boost import QUIET_NS, SECOND_NS, WRITES_PER_S, Booster, Lease
from clawd.kernel.change import Place
from clawd.kernel.weight import KIND, Weights

pytestmark = pytest.mark.plain
MS = 1_000_000
RELAY, BACKGROUND = "clawd.slice", "clawd_background.slice"
REST = {RELAY: 400, BACKGROUND: 25}
FIRST = {RELAY: 3200, BACKGROUND: 1}
PRESSURE = {RELAY: 1600, BACKGROUND: 1}


class Crash(BaseException):
    """Stands for the death of the process."""


class World:
    """Two slices in a directory, a booster with a clock that is set by hand."""

    def __init__(self, directory: Path, crash_at: int = -1) -> None:
        self.mount, self.state = directory / "mount", directory / "state"
        self.now = 10 * SECOND_NS
        self.crash_at = crash_at
        self.steps: list[str] = []
        self.writes: list[int] = []
        if not self.mount.exists():
            for name, weight in REST.items():
                (self.mount / name).mkdir(parents=True)
                self.set(name, weight)
        self.booster = Booster(
            tree.load(), Weights(mount=self.mount), self.state, clock=lambda: self.now, step=self._step, boot_id="here"
        )
        self.booster.recover()

    def _step(self, name: str) -> None:
        if len(self.steps) == self.crash_at:
            raise Crash(name)
        self.steps.append(name)
        if name == "write":
            self.writes.append(self.now)

    def set(self, name: str, weight: int) -> None:
        (self.mount / name / "cpu.weight").write_text(f"{weight}\n")

    def weights(self) -> dict[str, int]:
        return {path.parent.name: int(path.read_text()) for path in sorted(self.mount.glob("*/cpu.weight"))}

    def ask(self, level: int, key: str = "clawd", lease_ms: int = 600) -> None:
        self.booster.ask(key, Lease(1, 2, level, 3, 0, self.now + lease_ms * MS))

    def journaled(self) -> bool:
        return (self.state / "boost.journal").exists()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_lease_flips_and_its_end_puts_back(world: World) -> None:
    world.ask(2)
    assert world.weights() == FIRST
    assert world.journaled()
    state = world.booster.state()
    assert (state.state, state.weights, state.resting, state.asked) == ("first", FIRST, REST, [[1, 2, 2, 3, 0]])
    world.ask(1)
    assert world.weights() == PRESSURE
    world.ask(0)
    assert world.weights() == REST
    assert (world.booster.state().state, world.booster.state().writes) == ("rest", 5)


def test_one_that_asks_no_more_is_let_go(world: World) -> None:
    world.ask(2)
    world.now += 599 * MS
    world.booster.settle()
    assert world.weights() == FIRST
    assert world.booster.due_ns() == world.now + MS
    world.now += MS
    world.booster.settle()
    assert world.weights() == REST
    world.ask(2)
    world.booster.drop("clawd")
    assert world.weights() == REST


def test_the_most_urgent_lease_counts(world: World) -> None:
    world.ask(1, "a")
    world.ask(2, "b")
    world.ask(0, "c")
    assert world.weights() == FIRST
    world.booster.drop("b")
    assert world.weights() == PRESSURE
    world.booster.drop("a")
    assert world.weights() == REST


def test_the_journal_goes_when_it_was_quiet_and_nothing_is_due_then(world: World) -> None:
    assert world.booster.due_ns() is None
    world.ask(2)
    world.ask(0)
    assert world.journaled()
    due = world.booster.due_ns()
    assert due == world.now + QUIET_NS
    world.now = due
    world.booster.settle()
    assert not world.journaled()
    assert world.booster.due_ns() is None


def test_what_systemd_writes_again_is_boosted_again(world: World) -> None:
    world.ask(2)
    world.set(RELAY, 400)
    world.ask(2)
    assert world.weights() == FIRST
    world.ask(0)
    assert world.weights() == REST


def test_what_another_wrote_is_left_until_the_next_boost_and_then_counts(world: World) -> None:
    world.ask(2)
    world.set(RELAY, 777)
    world.ask(2)
    assert world.weights() == {**FIRST, RELAY: 777}
    assert world.booster.state().kept == {RELAY: "somebody wrote 777 over our 3200"}
    world.ask(0)
    assert world.weights() == {**REST, RELAY: 777}
    world.ask(2)
    assert world.weights() == FIRST
    assert world.booster.state().kept == {}
    world.booster.close()
    assert world.weights() == {**REST, RELAY: 777}
    assert not world.journaled()


def test_a_slice_that_is_not_there_or_idle_is_named_and_the_other_flips(world: World) -> None:
    world.set(BACKGROUND, 0)
    world.ask(2)
    assert world.weights() == {RELAY: 3200, BACKGROUND: 0}
    assert "idle" in world.booster.state().kept[BACKGROUND]
    (world.mount / BACKGROUND / "cpu.weight").unlink()
    (world.mount / BACKGROUND).rmdir()
    world.ask(2)
    assert (
        world.booster.state().kept[BACKGROUND]
        == f"there is no {BACKGROUND}; it comes with clawd's units: scripts/install"
    )
    world.ask(0)
    assert world.weights() == {RELAY: 400}


def test_where_there_is_no_such_slice_nothing_is_written_and_it_says_why(tmp_path: Path) -> None:
    booster = Booster(tree.load(), Weights(mount=tmp_path), tmp_path / "state")
    booster.recover()
    booster.ask(1, Lease(1, 2, 2, 1, 0, 2**62))
    state = booster.state()
    assert (state.state, state.writes) == ("off", 0)
    assert state.reason
    assert "there is no clawd.slice" in state.reason
    assert not (tmp_path / "state").exists()


def test_on_v1_it_says_so(tmp_path: Path) -> None:
    booster = Booster(tree.load(), Weights(root=tmp_path), tmp_path / "state")
    booster.recover()
    reason = booster.state().reason
    assert reason
    assert "cgroup v2 lacks the cpu controller" in reason


def test_a_damaged_journal_means_that_none_is_flipped(world: World, tmp_path: Path) -> None:
    world.ask(2)
    path = world.state / "boost.journal"
    path.write_text(path.read_text().replace("400", "401"))
    world.booster._lock.close()  # it is dead
    booster = Booster(tree.load(), Weights(mount=world.mount), world.state, boot_id="here")
    with pytest.raises(HostError, match="damaged"):
        booster.recover()
    booster.ask(1, Lease(1, 2, 1, 1, 0, 2**62))
    assert world.weights() == FIRST
    assert "damaged" in (booster.state().reason or "")


def test_tuning_sees_what_a_flipped_weight_goes_back_to(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawd.kernel.journal.BOOT_ID", world.mount / "boot")
    (world.mount / "boot").write_text("here\n")
    seen = Weights(mount=world.mount, resting=boost.resting(world.state))
    place = Place(KIND, RELAY)
    world.ask(2)
    assert seen.read(place) == "400"
    world.set(RELAY, 777)
    assert seen.read(place) == "777", "that is drift"


def test_a_second_one_leaves_the_first_ones_alone(world: World) -> None:
    world.ask(2)
    second = Booster(tree.load(), Weights(mount=world.mount), world.state, boot_id="here")
    with pytest.raises(HostError, match="another clawd-kernel flips weights"):
        second.recover()
    assert world.weights() == FIRST
    state = second.state()
    assert state.state == "off"


@pytest.mark.parametrize("crash_at", range(40))
def test_a_death_at_any_step_is_put_back_by_the_next(tmp_path: Path, crash_at: int) -> None:
    world, rest = World(tmp_path, crash_at), 400
    with contextlib.suppress(Crash):
        for level in (2, 1, 2, 0):
            world.ask(level)
            world.now += 200 * MS
        world.set(RELAY, rest := 300)
        world.ask(2)
        world.booster.close()
    if len(world.steps) > crash_at:
        pytest.fail("it went on after its death")
    world.booster._lock.close()  # as the kernel does when a process ends
    World(tmp_path)
    assert world.weights() == {RELAY: rest, BACKGROUND: 25}
    assert not world.journaled()


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 400 * MS),
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(0, 2)),
            st.tuples(st.just("drop"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("systemd"), st.sampled_from((RELAY, BACKGROUND)), st.just(0)),
            st.tuples(st.just("admin"), st.sampled_from((RELAY, BACKGROUND)), st.sampled_from((3, 150, 5000))),
        ),
    ),
    max_size=80,
)


@settings(deadline=None)
@given(EVENTS)
def test_whatever_is_asked(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, tuple[str, str, int]]]
) -> None:
    world = World(tmp_path_factory.mktemp("booster"))
    rest = dict(REST)
    for gap, (what, name, number) in events:
        end = world.now + gap
        while (due := world.booster.due_ns()) is not None and due <= end:
            world.now = max(world.now, due)
            world.booster.settle()
        world.now = end
        if what == "ask":
            world.ask(number, name)
        elif what == "drop":
            world.booster.drop(name)
        elif what == "systemd":
            world.set(name, rest[name])
        else:
            rest[name] = number
            world.set(name, number)
        recent = [at for at in world.writes if at > world.now - SECOND_NS]
        assert len(recent) <= WRITES_PER_S
    for name in "abc":
        world.booster.drop(name)
    assert world.weights() == rest, "back, and nobody else's value lost"
    before = len(world.writes)
    world.now += 100 * SECOND_NS
    world.booster.settle()
    assert len(world.writes) == before
    assert not world.journaled()


def test_a_storm_of_asks_is_bounded_and_comes_back(world: World) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(5000):
        level = rng.randrange(3)
        world.ask(level)
        assert protocol.BOOSTS.index(world.booster.state().state) <= level
        assert sum(at > world.now - SECOND_NS for at in world.writes[-50:]) <= WRITES_PER_S
        world.now += rng.randrange(2 * MS)
    assert world.booster.state().limited > 0
    world.ask(0)
    assert world.weights() == REST
