# SPDX-License-Identifier: Apache-2.0
"""How soon clawd's pacers know that a way changed, by times on its page, which are of the clock that is read here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from clawd.page import Page

LOOK_S = 0.001


class Known(NamedTuple):
    """What pacers know of a way: the names are those of struct claw_page_connection."""

    rtt_us: int
    jitter_us: int
    loss_ppm: int
    way_ns: int
    way_seen_ns: int

    def rtts(self, since_ns: int) -> float:
        """How many round trips, as they are now, after this time they knew."""
        return (self.way_seen_ns - since_ns) / 1000 / self.rtt_us

    def lag_ns(self) -> int:
        """How much later than the kernel."""
        return self.way_seen_ns - self.way_ns


class Watch:
    """Of the one tcp client of the clawd there."""

    def __init__(self, runtime_dir: Path, patience_s: float) -> None:
        self._page = Page(runtime_dir)
        self._patience_s = patience_s
        self.lags_ns: list[int] = []
        """Of each row that was taken while somebody looked, how much later than the kernel had it."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._page.close()

    def look(self) -> Known | None:
        for row in self._page.connections():
            if row.way_seen_ns:
                return Known(*(int(getattr(row, name)) for name in Known._fields))
        return None

    def until(self, is_so: Callable[[Known], bool], what: str) -> Known:
        """The first that is seen of which that is so."""
        deadline = time.monotonic() + self._patience_s
        last = None
        while time.monotonic() < deadline:
            known = self.look()
            if known and (last is None or known.way_seen_ns != last.way_seen_ns):
                if last:
                    self.lags_ns.append(known.lag_ns())
                last = known
            if known and is_so(known):
                return known
            time.sleep(LOOK_S)
        raise AssertionError(f"waited {self._patience_s:.0f} s in vain for {what}; the last was {last}")

    def rise(self, name: str, by: int, what: str) -> Known:
        """The first of which this is so much more than the least since now."""
        least = None

        def is_more(known: Known) -> bool:
            nonlocal least
            value = getattr(known, name)
            least = value if least is None else min(least, value)
            return bool(value >= least + by)

        return self.until(is_more, what)
