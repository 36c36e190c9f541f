# SPDX-License-Identifier: Apache-2.0
"""Carries changes out and takes them back. Nothing is written before the journal has it, nothing taken back unless the
place still holds what was written; a run that died is made whole, or undone, by the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from clawd.kernel.change import GONE, INVALID, Change, Lever, Place, Trouble
from clawd.kernel.journal import Entry, Journal, no_step


@dataclass(frozen=True)
class Outcome:
    """What became of a place. `result` is done, kept (it holds what somebody else wrote), gone, elsewhere (it is in
    another network namespace) or failed; `why` says more.
    """

    place: Place
    result: str
    value: str | None
    why: str = ""


@dataclass(frozen=True)
class Scope:
    """Who writes, in which network namespace; `inodes` are all there are, None when that cannot be seen."""

    who: str
    netns: int = 0
    inode: int = 0
    inodes: frozenset[int] | None = None

    def holds(self, entry: Entry) -> bool:
        return entry.place.netns in (None, self.netns)

    def lost(self, entry: Entry) -> bool:
        """Whether its namespace is no more: the number is free, or another namespace has it."""
        if self.holds(entry):
            return False
        return entry.inode == self.inode or (self.inodes is not None and entry.inode not in self.inodes)


Planner = Callable[[Sequence[Entry]], Sequence[Change]]


class Tuner:
    """One for a command. Every method takes the journal's lock: see its errors."""

    def __init__(
        self,
        levers: Mapping[str, Lever],
        journal: Journal,
        scope: Scope,
        *,
        step: Callable[[str], None] = no_step,
    ) -> None:
        self._levers = levers
        self._journal = journal
        self._scope = scope
        self._step = step

    def apply(self, planner: Planner, profile: str) -> list[Outcome]:
        """Carry out what `planner` makes of the entries that there are. One that fails leaves the others."""
        with self._journal.locked():
            entries, _void = self._journal.load()
            outcomes = self._recover(entries)
            # threads and devices that ended took theirs along
            entries = [entry for entry in entries if not self._is_gone(entry)]
            changes = list(planner(entries))
            known = self._journal.profiles
            if not changes and known.get(self._scope.netns) == profile:
                return outcomes
            for change in changes:
                self._intend(entries, change, profile)
            if changes:
                self._journal.save(entries)
            # Each stays unfinished until all are done: after a crash in between all of them go back
            ends = [self._carry_out(entries, change) for change in changes]
            for change, (outcome, entry) in zip(changes, ends, strict=True):
                outcomes.append(outcome)
                _put(entries, change.place, entry)
            known[self._scope.netns] = profile
            self._journal.save(entries)
            return outcomes

    def revert(self) -> list[Outcome]:
        """Take back all that is of this network namespace or of none."""
        with self._journal.locked():
            entries, void = self._journal.load()
            outcomes = []
            is_news = bool(void) or self._journal.profiles.pop(self._scope.netns, None) is not None
            for entry in reversed(list(entries)):
                outcome = self._take_back(entry)
                outcomes.append(outcome)
                if outcome.result not in ("elsewhere", "failed"):
                    entries.remove(entry)
                    self._journal.save(entries)
            if is_news:
                self._journal.save(entries)
            return outcomes

    def recover(self) -> list[Outcome]:
        """Finish or undo what an earlier run left unfinished."""
        with self._journal.locked():
            entries, _void = self._journal.load()
            return self._recover(entries)

    # --- forward ---

    def _intend(self, entries: list[Entry], change: Change, profile: str) -> None:
        earlier = next((entry for entry in entries if entry.place == change.place), None)
        # what somebody wrote over ours is what goes back
        old = earlier.old if earlier and earlier.new == change.old else change.old
        made = Entry(
            change.place, old, change.new, change.old, profile, self._scope.who, time.time_ns(),
            self._scope.inode if change.place.netns is not None else 0,
        )  # fmt: skip
        if earlier:
            entries[entries.index(earlier)] = made
        else:
            entries.append(made)

    def _carry_out(self, entries: Sequence[Entry], change: Change) -> tuple[Outcome, Entry | None]:
        """What came of it, and the entry that then holds."""
        entry = next(entry for entry in entries if entry.place == change.place)
        lever = self._levers[change.place.kind]
        try:
            found = lever.read(change.place)
        except Trouble as error:
            return Outcome(change.place, "failed", None, str(error)), None if error.why == GONE else _settled(
                entry, change.old
            )
        if found != change.old:
            why = f'{change.place}: somebody else wrote "{found}" this very moment; try again'
            return Outcome(change.place, "failed", found, why), None
        try:
            self._write(lever, change.place, change.new)
        except Trouble as error:
            return Outcome(change.place, "failed", change.old, str(error)), self._let_go(entry, lever)
        return Outcome(change.place, "done", change.new), _settled(entry, change.new)

    def _write(self, lever: Lever, place: Place, value: str) -> None:
        self._step("write")
        lever.write(place, value)
        self._step("written")
        found = lever.read(place)
        if found != value:
            raise Trouble(INVALID, f'{place} holds "{found}" after "{value}" was written')

    def _let_go(self, entry: Entry, lever: Lever) -> Entry | None:
        """After a write that failed: back to what was there before it."""
        assert entry.before is not None
        try:
            if lever.read(entry.place) != entry.before:
                self._write(lever, entry.place, entry.before)
        except Trouble as error:
            return None if error.why == GONE else entry  # unfinished: the next run tries again
        return _settled(entry, entry.before)

    # --- back ---

    def _recover(self, entries: list[Entry]) -> list[Outcome]:
        """All writes of the run that died are there, then it is finished; else those that are there are undone."""
        left = [entry for entry in entries if entry.before is not None and self._scope.holds(entry)]
        if not left:
            return []
        if all(self._live(entry) == entry.new for entry in left):
            outcomes = []
            for entry in left:
                _put(entries, entry.place, _settled(entry, entry.new))
        else:
            # in the journal all stay unfinished until all are back, so a crash in here goes on here
            outcomes = [self._roll_back(entries, entry) for entry in reversed(left)]
        self._journal.save(entries)
        return outcomes

    def _roll_back(self, entries: list[Entry], entry: Entry) -> Outcome:
        assert entry.before is not None
        outcome = self._take_back(replace(entry, old=entry.before))
        if outcome.result == "done":
            _put(entries, entry.place, _settled(entry, entry.before))
        elif outcome.result != "failed":
            _put(entries, entry.place, None)
        return outcome

    def _is_gone(self, entry: Entry) -> bool:
        if not self._scope.holds(entry):
            return self._scope.lost(entry)
        try:
            self._levers[entry.place.kind].read(entry.place)
        except Trouble as error:
            return error.why == GONE
        return False

    def _live(self, entry: Entry) -> str | None:
        try:
            return self._levers[entry.place.kind].read(entry.place)
        except Trouble:
            return None

    def _take_back(self, entry: Entry) -> Outcome:
        place = entry.place
        if self._scope.lost(entry):
            return Outcome(place, "gone", None, "its network namespace is gone")
        if not self._scope.holds(entry):
            return Outcome(place, "elsewhere", None, f"it is in network namespace {entry.inode}: give that as --netns")
        lever = self._levers[place.kind]
        try:
            live = lever.read(place)
            if live == entry.old:
                return Outcome(place, "done", live)
            mine = live == entry.new or (entry.before is not None and (live == entry.before or lever.is_partial(live)))
            if not mine:
                return Outcome(place, "kept", live, f'somebody else wrote "{live}" over our "{entry.new}"')
            self._write(lever, place, entry.old)
        except Trouble as error:
            return Outcome(place, "gone" if error.why == GONE else "failed", None, str(error))
        return Outcome(place, "done", entry.old)


def _settled(entry: Entry, value: str) -> Entry | None:
    """The entry of a place that holds `value` for good; none when that is what was there before all."""
    return None if value == entry.old else replace(entry, new=value, before=None)


def _put(entries: list[Entry], place: Place, entry: Entry | None) -> None:
    at = next(index for index, one in enumerate(entries) if one.place == place)
    entries[at : at + 1] = [] if entry is None else [entry]


def who(command: str) -> str:
    """For the journal: the program, its process and user."""
    return f"{command} pid={os.getpid()} uid={os.getuid()}"
