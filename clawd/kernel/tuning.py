# SPDX-License-Identifier: Apache-2.0
"""Tuning as a whole, for both who may ask for it: `clawctl tune` and clawd-kernel. observe → plan → apply → undo, each
a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawd.kernel import netns, origin
from clawd.kernel.change import DIFFERS, OK, Change, Place, Row, Trouble
from clawd.kernel.effect import effect
from clawd.kernel.journal import DIRECTORY, Entry, Journal, no_step
from clawd.kernel.profile import Profile
from clawd.kernel.survey import levers, survey
from clawd.kernel.tuner import Outcome, Scope, Tuner, who


@dataclass(frozen=True)
class Plan:
    """`rows` are the profile's, `changes` what `apply` would do now, those included that take back what another profile
    had set.
    """

    rows: tuple[Row, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Drift:
    """A place that is not as it was asked for; `by` says who may have written it, as far as that can be known."""

    place: Place
    wanted: str | None
    live: str | None
    what: str
    by: str = ""


@dataclass
class Tuning:
    """For the network namespace of this thread. `host`: also what is of none. Raises what Journal and survey raise."""

    command: str
    directory: Path = DIRECTORY
    devices: Sequence[str] = ()
    pids: Sequence[int] = ()
    host: bool = True
    root: Path = Path("/")
    namespace: netns.Namespace = field(default_factory=netns.current)
    step: Callable[[str], None] = no_step

    def __post_init__(self) -> None:
        self._levers = levers(self.directory)
        self.journal = Journal(self.directory, step=self.step)

    def rows(self, profile: Profile) -> list[Row]:
        return survey(profile, self._levers, self.namespace, devices=self.devices, pids=self.pids, host=self.host,
                      root=self.root)  # fmt: skip

    def plan(self, profile: Profile, entries: Sequence[Entry]) -> Plan:
        rows = self.rows(profile)
        wanted = {row.place for row in rows}
        back = [change for entry in reversed(entries) if entry.place not in wanted and (change := self._undo(entry))]
        forth = [row.change for row in rows if row.change]
        return Plan(tuple(rows), (*back, *forth))

    def _undo(self, entry: Entry) -> Change | None:
        """What puts a place back that this profile does not ask for."""
        place = entry.place
        if place.netns not in (None, self.namespace.cookie) or (place.netns is None and not self.host):
            return None
        if self.devices and place.kind == "qdisc" and place.name not in self.devices:
            return None
        lever = self._levers[place.kind]
        try:
            if lever.read(place) != entry.new:
                return None
        except Trouble:
            return None
        forth, back = lever.operations(place, entry.old, entry.new), lever.operations(place, entry.new, entry.old)
        return Change(place, entry.new, entry.old, tuple(back), tuple(forth), place.kind == "qdisc")

    def apply(self, profile: Profile) -> list[Outcome]:
        return self._tuner().apply(lambda entries: self.plan(profile, entries).changes, profile.name)

    def revert(self) -> list[Outcome]:
        return self._tuner().revert()

    def recover(self) -> list[Outcome]:
        return self._tuner().recover()

    def _tuner(self) -> Tuner:
        scope = Scope(who(self.command), self.namespace.cookie, self.namespace.inode, netns.inodes())
        return Tuner(self._levers, self.journal, scope, step=self.step)

    def undo(self, entries: Sequence[Entry]) -> list[Change]:
        """What `revert` would do now."""
        found = []
        for entry in reversed(entries):
            if entry.before is None and (change := self._undo(entry)):
                found.append(change)
        return found

    def verify(self, profile: Profile, entries: Sequence[Entry]) -> tuple[list[Row], list[Drift]]:
        rows = self.rows(profile)
        drifts = []
        ours = {entry.place: entry for entry in entries}
        for row in rows:
            if row.state == DIFFERS:
                drifts.append(Drift(row.place, row.wanted, row.live, "not as asked for", self._by(row, ours)))
            elif row.state == OK and (wrong := effect(row)):
                drifts.append(Drift(row.place, row.wanted, row.live, wrong))
        return rows, drifts

    def _by(self, row: Row, ours: dict[Place, Entry]) -> str:
        entry = ours.get(row.place)
        if entry is None:
            return "it was not applied"
        line = origin.winner(origin.boot_lines(self.root), row.place.name) if row.place.kind == "sysctl" else None
        if line and line.value == row.live:
            return f"{line} says so"
        running = origin.writers(self.root)
        suspects = f"; {', '.join(running)} may have" if running else ""
        if row.live == entry.old:
            return f"somebody put back what was there before {entry.who}{suspects}"
        return f"somebody wrote it after {entry.who}{suspects}"
