# SPDX-License-Identifier: Apache-2.0
"""When clawd asks for the processor: what waits and how short the host is in, what to ask for out. No clock, no I/O.

A boost rises at once and falls late, so that a stream of OPENs is one boost and not many. How often it changes is
bounded: each change writes weights, for which the kernel takes the lock of every run queue.
"""

from __future__ import annotations

from dataclasses import dataclass

REST, PRESSURE, FIRST = range(3)
"""Levels, as CLAW_BOOST_ in csrc/first.cdef.h; the more urgent one is the larger."""
HOLD_NS = 200_000_000
"""How long a level is kept when nothing asks for it any more."""
PAUSE_NS = 100_000_000
"""Between two changes, at least."""
CHANGES_PER_S_MAX = 1_000_000_000 // PAUSE_NS
LEASE_NS = 600_000_000
"""What is asked for ends by itself so soon, unless it is asked for again."""
RENEW_NS = 250_000_000


@dataclass(frozen=True)
class Ask:
    """To be told to clawd-kernel: `level` for `lease_ns` from now on."""

    level: int
    lease_ns: int


class Boost:
    """One step after another, `now_ns` never less than before."""

    def __init__(self) -> None:
        self.level = REST
        self._changed_ns = -PAUSE_NS
        self._wanted = REST
        self._wanted_ns = [0, 0, 0]
        """When each level was last wanted, or a higher one."""
        self._asked_ns = 0
        self.due_ns = 0
        """When to step again though nothing happens, 0: not."""

    def step(self, now_ns: int, first_until_ns: int, pressure: int) -> Ask | None:
        """`first_until_ns`: a first token is waited for so long, 0: none is. `pressure`: 0 none."""
        wanted = FIRST if now_ns < first_until_ns else PRESSURE if pressure else REST
        for level in range(max(wanted, self._wanted) + 1):  # what was wanted before this step was so until now
            self._wanted_ns[level] = now_ns
        self._wanted = wanted
        aim = self._aim(now_ns, wanted)
        if aim != self.level:
            self.level = aim
            self._changed_ns = now_ns
        elif not self.level or now_ns < self._asked_ns + RENEW_NS:
            self._set_due(now_ns, wanted, first_until_ns)
            return None
        self._asked_ns = now_ns
        self._set_due(now_ns, wanted, first_until_ns)
        return Ask(self.level, LEASE_NS)

    def _aim(self, now_ns: int, wanted: int) -> int:
        if now_ns < self._changed_ns + PAUSE_NS:
            return self.level
        # down to the highest level that was wanted a short while ago
        held = (level for level in range(self.level, REST, -1) if now_ns < self._wanted_ns[level] + HOLD_NS)
        return max(wanted, next(held, REST))

    def _set_due(self, now_ns: int, wanted: int, first_until_ns: int) -> None:
        times = []
        if wanted > self.level:
            times.append(self._changed_ns + PAUSE_NS)
        if self.level:
            times.append(self._asked_ns + RENEW_NS)
            if wanted < self.level:
                times.append(max(self._wanted_ns[self.level] + HOLD_NS, self._changed_ns + PAUSE_NS))
        if wanted == FIRST:
            times.append(first_until_ns)
        self.due_ns = max(now_ns + 1, min(times)) if times else 0
