# SPDX-License-Identifier: Apache-2.0
"""The tuner's journal: whatever dies at whatever step, the places are as before or as planned, and go back exactly."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd.errors import AlreadyRunning, HostError
from clawd.kernel.change import Change, Place
from clawd.kernel.journal import Entry, Journal
from clawd.kernel.sysctl import KIND, Sysctls
from clawd.kernel.tuner import Outcome, Scope, Tuner

pytestmark = pytest.mark.plain
EXAMPLES = int(os.environ.get("CLAWD_TEST_EXAMPLES") or 20)
NETNS = 77
NAMES = ("a.one", "a.two", "b.three", "b.four")
Values = Mapping[str, str]


class Crash(BaseException):
    """Stands for the death of the process."""


class Steps:
    """Counts the steps of a run, and ends it at one of them."""

    def __init__(self, crash_at: int = -1) -> None:
        self.names: list[str] = []
        self._crash_at = crash_at

    def __call__(self, name: str) -> None:
        if len(self.names) == self._crash_at:
            raise Crash(name)
        self.names.append(name)


class Tree:
    """A directory that stands for /proc/sys, and a journal beside it."""

    def __init__(self, directory: Path, values: Values) -> None:
        self.root = directory / "sys"
        self.state = directory / "state"
        for name, value in values.items():
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    def path(self, name: str) -> Path:
        return self.root / name.replace(".", "/")

    def values(self) -> dict[str, str]:
        return {name: self.path(name).read_text().strip() for name in NAMES}

    def tuner(self, steps: Callable[[str], None] | None = None, netns: int = NETNS, inode: int = 1) -> Tuner:
        step = steps or Steps()
        scope = Scope("test", netns, inode, frozenset({1, 2}))
        return Tuner({KIND: Sysctls(self.root)}, Journal(self.state, step=step, boot_id="boot"), scope, step=step)

    def apply(self, wanted: Values, steps: Callable[[str], None] | None = None, netns: int = NETNS) -> list[Outcome]:
        def plan(entries: object) -> list[Change]:
            now = self.values()
            return [
                Change(Place(KIND, name, netns), now[name], value)
                for name, value in wanted.items()
                if now[name] != value
            ]

        return self.tuner(steps, netns).apply(plan, "test")

    def journal(self) -> list[Entry]:
        return Journal(self.state, boot_id="boot").load()[0]


VALUES = st.fixed_dictionaries({name: st.integers(0, 3).map(str) for name in NAMES})
CHOICES = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3).map(str), min_size=1)


def overlay(values: Values, wanted: Values) -> dict[str, str]:
    return {**values, **wanted}


@settings(max_examples=EXAMPLES, deadline=None)
@given(before=VALUES, first=CHOICES, second=CHOICES)
def test_a_crash_at_any_step_of_an_apply_leaves_it_as_before_or_as_planned(
    tmp_path_factory: pytest.TempPathFactory, before: Values, first: Values, second: Values
) -> None:
    at, ended = 0, False
    while not ended:
        tree = Tree(tmp_path_factory.mktemp("tree"), before)
        tree.apply(first)
        assert tree.values() == overlay(before, first)
        steps = Steps(crash_at=at)
        try:
            tree.apply(second, steps)
            ended = True
        except Crash:
            pass
        tree.tuner().recover()
        planned = overlay(overlay(before, first), second)
        assert tree.values() in (overlay(before, first), planned), (at, steps.names)
        assert all(entry.before is None for entry in tree.journal())
        tree.tuner().revert()
        assert tree.values() == before, (at, steps.names)
        assert tree.journal() == []
        at += 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(before=VALUES, wanted=CHOICES, data=st.data())
def test_a_crash_in_a_recovery_or_a_revert_is_nothing_new(
    tmp_path_factory: pytest.TempPathFactory, before: Values, wanted: Values, data: st.DataObject
) -> None:
    tree = Tree(tmp_path_factory.mktemp("tree"), before)
    for run in (lambda steps: tree.apply(wanted, steps), lambda steps: tree.tuner(steps).recover(),
                lambda steps: tree.tuner(steps).revert(), lambda steps: tree.tuner(steps).revert()):  # fmt: skip
        with contextlib.suppress(Crash):
            run(Steps(crash_at=data.draw(st.integers(0, 30))))
    tree.tuner().revert()
    assert tree.values() == before
    assert tree.journal() == []


def test_a_crash_at_any_step_of_the_recovery_from_a_crash_at_any_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    before, wanted = dict.fromkeys(NAMES, "0"), dict.fromkeys(NAMES[:3], "1")
    tree = Tree(tmp_path_factory.mktemp("tree"), before)
    first, second, is_done = 0, 0, False
    while not is_done:
        is_done = is_recovered = True
        with contextlib.suppress(Crash):
            is_done = False
            tree.apply(wanted, Steps(first))
            is_done = True
        with contextlib.suppress(Crash):
            is_recovered = False
            tree.tuner(Steps(second)).recover()
            is_recovered = True
        tree.tuner().recover()
        assert tree.values() in (before, overlay(before, wanted)), (first, second)
        tree.tuner().revert()
        assert tree.values() == before, (first, second)
        first, second = (first + 1, 0) if is_recovered else (first, second + 1)
        is_done = is_done and is_recovered
    assert first > 12


@settings(max_examples=EXAMPLES, deadline=None)
@given(before=VALUES, wanted=CHOICES, data=st.data())
def test_what_somebody_else_wrote_meanwhile_is_kept(
    tmp_path_factory: pytest.TempPathFactory, before: Values, wanted: Values, data: st.DataObject
) -> None:
    tree = Tree(tmp_path_factory.mktemp("tree"), before)
    with contextlib.suppress(Crash):
        tree.apply(wanted, Steps(crash_at=data.draw(st.integers(0, 60))))
    name = data.draw(st.sampled_from(NAMES))
    tree.path(name).write_text("9\n")
    tree.tuner().revert()
    assert tree.values() == overlay(before, {name: "9"})


def test_the_old_value_is_on_disk_before_the_first_write(tmp_path: Path) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    steps = Steps()

    def look(name: str) -> None:
        if name == "write":
            assert {(entry.place.name, entry.old, entry.new) for entry in tree.journal()} >= {("a.one", "0", "1")}
        steps(name)

    tree.apply({"a.one": "1"}, look)
    assert steps.names.index("journal safe") < steps.names.index("write")


def test_what_an_admin_wrote_over_ours_is_what_goes_back(tmp_path: Path) -> None:
    before = dict.fromkeys(NAMES, "0")
    tree = Tree(tmp_path, before)
    tree.apply({"a.one": "1", "a.two": "1"})
    tree.path("a.one").write_text("7\n")
    tree.apply({"a.one": "2", "a.two": "2"})
    tree.tuner().revert()
    assert tree.values() == overlay(before, {"a.one": "7"})


def test_a_place_that_fails_leaves_the_others(tmp_path: Path) -> None:
    before = dict.fromkeys(NAMES, "0")
    tree = Tree(tmp_path, before)
    changes = [Change(Place(KIND, name, NETNS), "0", "1") for name in ("a.one", "a.none", "a.two")]
    outcomes = tree.tuner().apply(lambda entries: changes, "test")
    assert [outcome.result for outcome in outcomes] == ["done", "failed", "done"]
    assert "a.none: this kernel or network namespace has it not" in outcomes[1].why
    assert [entry.place.name for entry in tree.journal()] == ["a.one", "a.two"]
    tree.tuner().revert()
    assert tree.values() == before


def test_what_is_of_another_namespace_waits_for_it_and_what_is_of_none_is_let_go(tmp_path: Path) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    tree.apply({"a.one": "1"})
    other = tree.tuner(netns=78, inode=2).revert()
    assert [(outcome.result, outcome.why) for outcome in other] == [
        ("elsewhere", "it is in network namespace 1: give that as --netns")
    ]
    assert tree.values()["a.one"] == "1"
    # the same number, another namespace: the one of the entry is gone
    gone = tree.tuner(netns=78, inode=1).revert()
    assert [outcome.result for outcome in gone] == ["gone"]
    assert tree.journal() == []


def test_a_journal_of_an_earlier_boot_counts_for_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    tree.apply({"a.one": "1"})
    later = Journal(tree.state, boot_id="later")
    assert later.load() == ([], "the journal is of an earlier boot, which took all of it along")
    tuner = Tuner({KIND: Sysctls(tree.root)}, later, Scope("test", NETNS, 1))
    assert tuner.revert() == []
    assert tree.values()["a.one"] == "1"
    assert not later.path.exists()


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda data: data[: len(data) // 2], "its checksum is wrong"),
        (lambda data: data.replace(b'"old": "0"', b'"old": "5"'), "its checksum is wrong"),
        (lambda data: b"", "Expecting value"),
        (lambda data: b"\xff" * 40, "codec can't decode"),
        (lambda data: data.replace(b'"format": 1', b'"format": 2'), "format 2 is not known here"),
        (lambda data: data * 10000, "it is too long"),
    ],
)
def test_a_harmed_journal_is_one_line_and_nothing_is_changed(
    tmp_path: Path, harm: Callable[[bytes], bytes], told: str
) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    tree.apply({"a.one": "1"})
    path = tree.state / "tune.journal"
    path.write_bytes(harm(path.read_bytes()))
    for run in (tree.tuner().revert, tree.tuner().recover, lambda: tree.apply({"a.two": "2"})):
        with pytest.raises(HostError, match=told) as caught:
            run()
        assert "\n" not in str(caught.value)
    assert tree.values() == overlay(dict.fromkeys(NAMES, "0"), {"a.one": "1"})


def test_a_journal_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    tree.apply({"a.one": "1"})
    for path, mode in ((tree.state / "tune.journal", 0o602), (tree.state, 0o770)):
        path.chmod(mode)
        with pytest.raises(HostError, match="can be written by others than root"):
            tree.tuner().revert()
        path.chmod(0o700)
    assert tree.values()["a.one"] == "1"


def test_a_second_writer_is_told_no(tmp_path: Path) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    with tree.tuner()._journal.locked(), pytest.raises(AlreadyRunning, match="another clawctl tune or clawd-kernel"):
        tree.apply({"a.one": "1"})
    assert tree.values()["a.one"] == "0"


def test_a_journal_without_room_changes_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    tree.state.write_text("no directory")
    with pytest.raises(HostError, match="no journal in"):
        tree.apply({"a.one": "1"})
    assert tree.values()["a.one"] == "0"


def test_the_file_can_be_read_by_people(tmp_path: Path) -> None:
    tree = Tree(tmp_path, dict.fromkeys(NAMES, "0"))
    tree.apply({"a.one": "1"})
    _, head, line = (tree.state / "tune.journal").read_text().splitlines()
    assert json.loads(head) == {"boot_id": "boot", "profiles": [[NETNS, "test"]]}
    entry = json.loads(line)
    assert (entry["place"]["name"], entry["old"], entry["new"], entry["who"]) == ("a.one", "0", "1", "test")
