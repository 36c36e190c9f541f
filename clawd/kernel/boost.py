# SPDX-License-Identifier: Apache-2.0
"""Flips the weights of clawd's slices as long as somebody holds a lease for it, and puts back what was there. Before
the first write old and new values are in a journal; before each write the weight is read, since systemd and admins
write it too: what is not ours is not written over. How often it writes in a second is bounded.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawd import log, protocol
from clawd.errors import AlreadyRunning, HostError
from clawd.kernel.change import Place, Trouble
from clawd.kernel.journal import BOOST, DIRECTORY, Entry, Journal
from clawd.kernel.tree import Branch
from clawd.kernel.weight import KIND, Weights

WRITES_PER_S = 20
"""In any second, the ways back included."""
SECOND_NS = 1_000_000_000
QUIET_NS = 30 * SECOND_NS
"""After so long at rest the journal goes: until then the next boost needs no disk."""
AGAIN_NS = SECOND_NS
"""When a weight is tried again that could not be put back."""


@dataclass(frozen=True)
class Lease:
    """Who asked for what, and why; it ends at `until_ns`."""

    pid: int
    uid: int
    level: int
    waiting: int
    pressure: int
    until_ns: int


@dataclass
class Held:
    """A slice whose weight is ours: `rest` is what was there, `now` what we wrote."""

    rest: int
    now: int


class Booster:
    """`clock` and `step` are others in tests. Nothing is written before `recover` was called."""

    def __init__(
        self,
        branches: Sequence[Branch],
        weights: Weights,
        directory: Path = DIRECTORY,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        step: Callable[[str], None] = lambda _name: None,
        boot_id: str | None = None,
    ) -> None:
        self._branches = branches
        self._weights = weights
        self._journal = Journal(directory, name=BOOST, step=step, boot_id=boot_id)
        self._step = step
        self._clock = clock
        self._lock = contextlib.ExitStack()
        self._entries: dict[str, Entry] | None = None
        """As in the journal; None: its lock is not ours."""
        self._leases: dict[Hashable, Lease] = {}
        self._held: dict[str, Held] = {}
        self._level = 0
        self._kept: dict[str, str] = {}
        self._times: deque[int] = deque()
        self._writes = self._limited = 0
        self._rested_ns = 0
        self._failure = ""
        self._off = "it is not known yet what an earlier clawd-kernel left"

    # --- leases ---

    def ask(self, key: Hashable, lease: Lease) -> None:
        """Of level 0 it ends the one there is."""
        self._leases[key] = lease
        self.settle()

    def drop(self, key: Hashable) -> None:
        """Whose it was is gone."""
        if self._leases.pop(key, None):
            self.settle()

    def due_ns(self) -> int | None:
        """When to call `settle` though nobody asks; None: not."""
        times = [lease.until_ns for lease in self._leases.values()]
        if self._held and not self._leases:
            times.append(self._clock() + AGAIN_NS)
        elif self._entries is not None and not self._leases:
            times.append(self._rested_ns + QUIET_NS)
        return min(times) if times else None

    def settle(self) -> None:
        """Bring the weights to what leases ask for."""
        now = self._clock()
        self._leases = {key: each for key, each in self._leases.items() if each.level and each.until_ns > now}
        level = max((lease.level for lease in self._leases.values()), default=0)
        try:
            if level and not self._off:
                self._raise(level, now)
            else:
                self._relax(now)
                if self._entries is not None and not self._held and now >= self._rested_ns + QUIET_NS:
                    self._rested_ns = now  # what fails is tried again as late
                    self._disarm()
            self._failure = ""
        except HostError as error:
            if str(error) != self._failure:
                log.failure("weights not flipped", error)
            self._failure = str(error)

    def close(self) -> None:
        """All back, and the journal gone."""
        self._leases.clear()
        self.settle()
        if self._entries is not None and not self._held:
            with contextlib.suppress(HostError):
                self._disarm()
        self._lock.close()

    def recover(self) -> list[str]:
        """Put back what a helper that died has left: the slices that were. Raises HostError."""
        back = []
        try:
            if self._journal.path.exists():
                back = self._put_back()
        except HostError as error:
            self._off = str(error)
            raise
        self._off = ""
        return back

    def _put_back(self) -> list[str]:
        back = []
        with contextlib.ExitStack() as lock:
            self._take(lock)
            entries, _void = self._journal.load()
            for entry in entries:
                try:
                    if self._weights.read(entry.place) in entry.new.split():
                        self._weights.put(entry.place, entry.old)
                        back.append(entry.place.name)
                except Trouble as error:
                    log.failure("a weight is not to be put back", error)
            self._journal.save(())
        return back

    # --- weights ---

    def _raise(self, level: int, now: int) -> None:
        if not self._level:
            self._kept = {}
        writes = []
        for branch in self._branches:
            found = self._look(branch.name)
            if found is None:
                continue
            held = self._held.get(branch.name)
            rest = found if held is None else held.rest
            aim = branch.aim(level, rest)
            if aim != found:
                writes.append((branch, rest, aim))
        if not writes:
            self._level = level
            return
        back = len(self._held.keys() | {branch.name for branch, _rest, _aim in writes})
        if self._recent(now) + len(writes) + back > WRITES_PER_S:
            self._limited += 1
            if level < self._level:
                self._relax(now)  # for which there is room kept
            return
        self._arm(writes)
        for branch, rest, aim in writes:
            self._held[branch.name] = Held(rest, aim)
            self._write(branch.name, aim, now)
        self._level = level

    def _look(self, name: str) -> int | None:
        """What it weighs; None when it is not for us."""
        held = self._held.get(name)
        try:
            found = int(self._weights.read(Place(KIND, name)))
        except Trouble as error:
            # a slice that nothing is in is not there, which says nothing of the others
            self._held.pop(name, None)
            self._kept[name] = str(error)
            return None
        if found == 0:
            self._kept[name] = "it is idle (cpu.idle), and has no weight"
            return None
        # systemd writes its own again when a member of the slice restarts: that is what was there before
        if held and found not in (held.now, held.rest):
            self._kept[name] = f"somebody wrote {found} over our {held.now}"
            return None
        return found

    def _relax(self, now: int) -> None:
        for name, held in list(self._held.items()):
            if self._look(name) == held.now != held.rest:
                self._write(name, held.rest, now)
            self._held.pop(name, None)
        if self._level:
            self._rested_ns = now
        self._level = 0

    def _write(self, name: str, weight: int, now: int) -> None:
        self._step("write")
        self._times.append(now)
        self._writes += 1
        self._weights.put(Place(KIND, name), str(weight))

    def _recent(self, now: int) -> int:
        while self._times and self._times[0] <= now - SECOND_NS:
            self._times.popleft()
        return len(self._times)

    # --- journal ---

    def _take(self, lock: contextlib.ExitStack) -> None:
        try:
            lock.enter_context(self._journal.locked())
        except AlreadyRunning as error:
            raise HostError("another clawd-kernel flips weights", "end that one") from error

    def _arm(self, writes: Sequence[tuple[Branch, int, int]]) -> None:
        """Every value that may be written from here on is on disk."""
        if self._entries is None:
            self._take(self._lock)
            self._entries = {}
        wanted = dict(self._entries)
        for branch, rest, _aim in writes:
            known = wanted.get(branch.name)
            if known is None or known.old != str(rest):
                aims = {branch.aim(level, rest) for level in (1, 2)} - {rest}
                place = Place(KIND, branch.name)
                new = " ".join(map(str, sorted(aims)))
                wanted[branch.name] = Entry(place, str(rest), new, None, BOOST, "clawd-kernel", time.time_ns())
        if wanted != self._entries:
            self._journal.save(list(wanted.values()))
            self._entries = wanted

    def _disarm(self) -> None:
        self._journal.save(())
        self._entries = None
        self._lock.close()

    # --- looking ---

    def state(self) -> protocol.Boosting:
        self.settle()
        weights, kept, reason = {}, dict(self._kept), self._off or self._failure
        for branch in self._branches:
            try:
                weights[branch.name] = int(self._weights.read(Place(KIND, branch.name)))
            except Trouble as error:
                kept[branch.name] = str(error)
        if not weights:
            reason = reason or next(iter(kept.values()))
        return protocol.Boosting(
            "off" if reason else protocol.BOOSTS[self._level],
            reason or None,
            weights,
            {name: self._held[name].rest if name in self._held else live for name, live in weights.items()},
            kept,
            [[each.pid, each.uid, each.level, each.waiting, each.pressure] for each in self._leases.values()],
            self._writes,
            self._limited,
        )


def resting(directory: Path = DIRECTORY) -> Callable[[str, str], str]:
    """Of a slice and its weight what it goes back to, by the journal of a boost that runs."""

    def told(name: str, live: str) -> str:
        try:
            entries, _void = Journal(directory, name=BOOST).load()
        except HostError:
            return live  # not for us to read: then it is what it is
        return next((each.old for each in entries if each.place.name == name and live in each.new.split()), live)

    return told
