# SPDX-License-Identifier: Apache-2.0
"""What the gateway counts of itself, where readers are written to: the last place before the network."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
           1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # fmt: skip
"""Upper bounds of every histogram of times, those of W12 (0.15 and 0.2 s) among them."""
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """As prometheus-client wants them: cumulative."""
        rows, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return rows


class Figures:
    """All of them, of one gateway."""

    def __init__(self) -> None:
        self.first_token = Histogram()
        """From a request to the write of its first text."""
        self.delivered_gap = Histogram()
        """Between two tokens as they were written to a reader: those written together have none."""
        self.added = Histogram()
        """From an engine's write of a token to the gateway's write of it to a reader, while the reader keeps up."""
        self.burst = Histogram(TOKENS)
        """Tokens written to a reader at once."""
        self.requests: Counter[tuple[str, int]] = Counter()
        self.ends: Counter[str] = Counter()
        """Why readings ended."""
        self.gaps: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Connections that were over a limit."""
        self.tokens = self.bytes = 0
        self.stalled = self.moved = 0
        """Readers cut off, and readers that read for themselves since."""
