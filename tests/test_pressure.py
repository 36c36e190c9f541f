# SPDX-License-Identifier: Apache-2.0
"""How short of processor time the host is: the level that becomes of figures, and the figures of this kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd.errors import HostError
from clawd.server.pressure import CALM_NS, LOOK_NS, WAIT_US, Pressure, Sight, look, read_delay, read_some
from tests.daemon import until

pytestmark = pytest.mark.plain


class World:
    """Figures of one second after the other."""

    def __init__(self) -> None:
        self.pressure = Pressure()
        self.at = self.some = self.delay = self.runs = 0
        self.step(0, 0)

    def step(self, some_permille: int | None, wait_us: int | None, runs: int = 1000) -> int:
        self.at += LOOK_NS
        self.some += (some_permille or 0) * 1000
        self.delay += (wait_us or 0) * 1000 * runs
        self.runs += runs
        some = None if some_permille is None else self.some
        delay, times = (None, None) if wait_us is None else (self.delay, self.runs)
        return self.pressure.step(Sight(self.at, some, delay, times))


def test_both_must_be_bad() -> None:
    world = World()
    assert world.step(900, 100) == 0
    assert world.step(100, 50_000) == 0
    assert world.step(900, WAIT_US[0] - 1) == 0
    assert world.step(900, WAIT_US[0]) == 1
    assert (world.pressure.some_permille, world.pressure.wait_us) == (900, WAIT_US[0])
    assert world.step(900, WAIT_US[2]) == 3


def test_it_rises_at_once_and_falls_slowly() -> None:
    world = World()
    assert world.step(900, WAIT_US[1]) == 2
    levels = [world.step(0, 0) for _ in range(3 * CALM_NS // LOOK_NS)]
    assert levels == sorted(levels, reverse=True)
    assert [levels.count(level) for level in (2, 1)] == [CALM_NS // LOOK_NS - 1, CALM_NS // LOOK_NS]
    assert levels[-1] == 0


def test_a_moment_of_calm_changes_nothing() -> None:
    world = World()
    world.step(900, WAIT_US[0])
    for _ in range(20):
        assert world.step(0, 0) == 1
        assert world.step(900, WAIT_US[0]) == 1


def test_a_few_runs_say_nothing_but_long_waits_do() -> None:
    world = World()
    assert world.step(900, 10_000, runs=3) == 0
    assert world.step(900, 300_000, runs=3) == 3, "starved"


def test_with_one_of_them_alone() -> None:
    world = World()
    world.step(None, 0)
    assert world.step(None, WAIT_US[1]) == 2
    world = World()
    world.step(0, None)
    assert world.step(400, None) == 0
    assert world.step(1000, None) == 1, "however bad: it may not concern clawd"
    world.step(None, None)
    assert world.pressure.some_permille is None


def test_threads_that_ended_took_theirs_along() -> None:
    world = World()
    world.delay = -(10**12)
    assert world.step(900, 0) == 0
    assert world.pressure.wait_us == 0


# --- this kernel's ---


@pytest.fixture
def busy() -> Iterator[None]:
    """Twice as many as there are processors, that want to run all the time."""
    made = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel has no CONFIG_SCHED_INFO")
def test_a_thread_that_has_to_wait_is_seen(busy: None) -> None:
    before = read_delay(Path("/proc/self/task"))

    def waited() -> bool:
        delay, runs = read_delay(Path("/proc/self/task"))
        return delay - before[0] > 5_000_000 and runs > before[1]

    until(waited, "a processor that is somebody else's")


def test_what_is_not_to_be_seen_is_named(tmp_path: Path) -> None:
    sight, why = look(1, tmp_path)
    assert (sight.some_us, sight.delay_ns) == (None, None)
    assert "(PSI); boot it with psi=1" in why
    assert "how long threads wait" in why
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=123\nfull total=9\n")
    assert read_some(tmp_path / "pressure/cpu") == 123
    (tmp_path / "pressure/cpu").write_text("some avg10=0.00\n")
    with pytest.raises(HostError):
        read_some(tmp_path / "pressure/cpu")
    (tmp_path / "self/task/1").mkdir(parents=True)
    (tmp_path / "self/task/1/schedstat").write_text("0 0 0\n")
    with pytest.raises(HostError):
        read_delay(tmp_path / "self/task")
