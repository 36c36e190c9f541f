# SPDX-License-Identifier: Apache-2.0
"""Slices of threads, and weights of slices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd.kernel import sched
from clawd.kernel.change import Change, Place, Trouble
from clawd.kernel.netns import current
from clawd.kernel.tuning import Tuning
from clawd.kernel.weight import Weights, find_mount

pytestmark = pytest.mark.plain


def heeded() -> bool:
    found = []

    def probe() -> None:  # in a thread, which takes it along
        try:
            sched.set_slice(0, 300_000)
            found.append(True)
        except Trouble:
            pass

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return bool(found)


needs_slices = pytest.mark.skipif(
    not heeded(), reason="needs a kernel that heeds slices, 6.12 on, and the right to set"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    program = "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print('ready', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


@needs_slices
def test_threads_get_a_slice_that_reads_back_and_lose_it_again(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    places = sched.threads(child.pid)
    assert len(places) == 2
    lever = sched.Slices()
    before = [lever.read(place) for place in places]
    nice = os.getpriority(os.PRIO_PROCESS, child.pid)
    tuning = Tuning("test", tmp_path)

    def plan(entries: object) -> list[Change]:
        return [Change(place, lever.read(place), "500000") for place in places]

    assert [outcome.result for outcome in tuning._tuner().apply(plan, "test")] == ["done", "done"]
    assert [lever.read(place) for place in places] == ["500000", "500000"]
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == nice
    assert [outcome.result for outcome in tuning.revert()] == ["done", "done"]
    assert [lever.read(place) for place in places] == before


@needs_slices
def test_a_thread_that_ended_or_is_another_is_let_alone(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    place = sched.threads(child.pid)[0]
    other = Place(sched.KIND, place.name, None, "1")
    with pytest.raises(Trouble, match="has ended"):
        sched.Slices().write(other, "500000")
    tuning = Tuning("test", tmp_path)
    live = sched.Slices().read(place)
    tuning._tuner().apply(lambda entries: [Change(place, live, "700000")], "test")
    with subprocess.Popen(["sleep", "600"]) as second:
        other = sched.threads(second.pid)[0]
        tuning._tuner().apply(lambda entries: [Change(other, live, "700000")], "test")
        assert [entry.place for entry in tuning.journal.load()[0]] == [place, other]
        child.send_signal(signal.SIGKILL)
        child.wait()
        tuning._tuner().apply(lambda entries: [Change(other, "700000", "600000")], "test")
        assert [entry.place for entry in tuning.journal.load()[0]] == [other], "no memory of the dead"
        second.kill()
        second.wait()
    assert [outcome.result for outcome in tuning.revert()] == ["gone"]
    assert tuning.journal.load() == ([], "")


def test_another_policy_has_no_slice(child: subprocess.Popen[bytes]) -> None:
    os.sched_setscheduler(child.pid, os.SCHED_BATCH, os.sched_param(0))
    with pytest.raises(Trouble, match="scheduling policy"):
        sched.set_slice(child.pid, 500_000)


def test_no_process_is_said() -> None:
    with pytest.raises(Trouble, match="there is no process"):
        sched.threads(2**22 + 1)


def test_who_decides_instead_of_eevdf_is_told(tmp_path: Path) -> None:
    assert sched.scheduler(tmp_path) == ""
    (tmp_path / "sys/kernel/sched_ext/root").mkdir(parents=True)
    (tmp_path / "sys/kernel/sched_ext/state").write_text("disabled\n")
    assert sched.scheduler(tmp_path) == ""
    (tmp_path / "sys/kernel/sched_ext/state").write_text("enabled\n")
    (tmp_path / "sys/kernel/sched_ext/root/ops").write_text("lavd\n")
    assert sched.scheduler(tmp_path) == "lavd"


# --- weights ---


def tree(root: Path, controllers: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        "30 1 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n31 1 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    )
    (root / "sys/fs/cgroup/clawd.slice").mkdir(parents=True)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text(controllers)
    (root / "sys/fs/cgroup/clawd.slice/cpu.weight").write_text("100\n")


def test_a_weight_is_read_and_written_on_v2(tmp_path: Path) -> None:
    tree(tmp_path, "cpu memory\n")
    place, lever = Place("weight", "clawd.slice"), Weights(tmp_path)
    assert lever.read(place) == "100"
    lever.write(place, "400")
    assert lever.read(place) == "400"
    with pytest.raises(Trouble, match=r"there is no clawd_background\.slice"):
        lever.read(Place("weight", "clawd_background.slice"))
    with pytest.raises(Trouble, match="no slice's name"):
        lever.read(Place("weight", "../system.slice"))


def test_without_the_controller_on_v2_it_is_said_and_no_shares_are_written(tmp_path: Path) -> None:
    tree(tmp_path, "memory pids\n")
    with pytest.raises(Trouble, match="cgroup v2 lacks the cpu controller"):
        Weights(tmp_path).read(Place("weight", "clawd.slice"))
    with pytest.raises(Trouble, match="cgroup v2 lacks the cpu controller"):
        find_mount(tmp_path / "nowhere")


def test_the_namespace_of_this_thread_has_a_cookie_of_its_own() -> None:
    assert current() == current()
    assert current().inode == os.stat("/proc/self/ns/net").st_ino
