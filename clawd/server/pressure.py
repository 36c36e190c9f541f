# SPDX-License-Identifier: Apache-2.0
"""How short this host is of processor time, as far as clawd suffers from it: PSI says that work waited, the scheduler's
figures how long clawd's own threads did. Looked at once a second: a trigger of PSI would need a privilege for windows
below 2 s and comes at the end of them, and in a storm of its events nobody would have to be slowed down here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from clawd.errors import HostError

LOOK_NS = 1_000_000_000
CALM_NS = 5_000_000_000
"""It is one level less when it was less for so long."""
WAIT_US = (5_000, 10_000, 20_000)
"""From which on it is level 1, 2, 3: how long a thread of clawd's waits for a processor each time. A first token may
spend 30 ms in all of clawd.
"""
RUNS_LEAST = 20
WAITED_LEAST_NS = 50_000_000
"""From so many runs, or so much waiting, on a mean says something: who is starved runs seldom, and waits long."""
SOME_PERMILLE = 200
"""Of the time work waited: below it the host is not short."""
SOME_ALONE_PERMILLE = 500
"""The same where it is not known how long clawd's threads waited: then it is level 1 at most."""


@dataclass(frozen=True)
class Sight:
    """Counters since the start. `some_us`: work waited on this host. `delay_ns`, `runs`: how long clawd's threads
    waited, how often they ran. None: not to be seen.
    """

    at_ns: int
    some_us: int | None
    delay_ns: int | None
    runs: int | None


def look(at_ns: int, root: Path = Path("/proc")) -> tuple[Sight, str]:
    """And why what is None is not to be seen."""
    why = []
    some_us = delay_ns = runs = None
    try:
        some_us = read_some(root / "pressure/cpu")
    except HostError as error:
        why.append(str(error))
    try:
        delay_ns, runs = read_delay(root / "self/task")
    except HostError as error:
        why.append(str(error))
    return Sight(at_ns, some_us, delay_ns, runs), "; ".join(why)


def read_some(path: Path) -> int:
    """Microseconds that work waited. The whole system's `full` is always 0, so it is `some`."""
    try:
        first = path.read_text().splitlines()[0]
        words = dict(word.partition("=")[::2] for word in first.split()[1:])
        return int(words["total"])
    except (OSError, IndexError, KeyError, ValueError) as error:
        # compiled in and turned off, it can be opened and not be read
        raise HostError("the kernel does not tell pressure (PSI)", "boot it with psi=1") from error


def read_delay(tasks: Path) -> tuple[int, int]:
    """Of all threads of a process: nanoseconds that they waited for a processor, and times that they ran."""
    delay_ns = runs = 0
    try:
        for name in os.listdir(tasks):
            try:
                _ran, waited, times = (tasks / name / "schedstat").read_text().split()
            except FileNotFoundError:
                continue  # a thread that has just ended
            delay_ns, runs = delay_ns + int(waited), runs + int(times)
    except (OSError, ValueError) as error:
        raise HostError("the kernel does not tell how long threads wait", "it needs CONFIG_SCHED_INFO") from error
    if not runs:
        raise HostError("the kernel does not tell how long threads wait", "it needs CONFIG_SCHED_INFO")
    return delay_ns, runs


class Pressure:
    """One step a look; `level` 0 to 3 rises at once and falls slowly."""

    def __init__(self) -> None:
        self.level = 0
        self.some_permille: int | None = None
        self.wait_us: int | None = None
        self._last: Sight | None = None
        self._less_since_ns = 0

    def step(self, sight: Sight) -> int:
        last, self._last = self._last, sight
        if last is None or sight.at_ns <= last.at_ns:
            return self.level
        self.some_permille = self.wait_us = None
        if sight.some_us is not None and last.some_us is not None:
            passed_us = (sight.at_ns - last.at_ns) // 1000
            self.some_permille = max(0, min(1000, (sight.some_us - last.some_us) * 1000 // max(1, passed_us)))
        if (
            sight.delay_ns is not None
            and last.delay_ns is not None
            and sight.runs is not None
            and last.runs is not None
        ):
            runs = sight.runs - last.runs
            # threads that ended took theirs along
            waited_ns = max(0, sight.delay_ns - last.delay_ns)
            says_something = runs >= RUNS_LEAST or waited_ns >= WAITED_LEAST_NS
            self.wait_us = waited_ns // max(1, runs) // 1000 if says_something else 0
        found = self._found()
        if found >= self.level:
            self._less_since_ns = sight.at_ns
            self.level = found
        elif sight.at_ns - self._less_since_ns >= CALM_NS:
            self._less_since_ns = sight.at_ns
            self.level -= 1
        return self.level

    def _found(self) -> int:
        if self.wait_us is None:
            return int((self.some_permille or 0) >= SOME_ALONE_PERMILLE)
        if self.some_permille is not None and self.some_permille < SOME_PERMILLE:
            return 0
        return sum(self.wait_us >= least for least in WAIT_US)
