# SPDX-License-Identifier: Apache-2.0
"""Delays of many tokens in little memory, exact to one part in 128."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_BITS = 8


def _bucket(value: int) -> int:
    """The middle of the values that share the first 8 bits with this one."""
    spare = value.bit_length() - _BITS
    return value if spare <= 0 else (value >> spare << spare) + (1 << spare >> 1)


class Delays:
    """How long tokens were on their way, in ns."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, written_ns: Iterable[int], received_ns: int) -> None:
        """Count one token for each time in `written_ns`; all were received at `received_ns`."""
        # a call of write_many has one time for all of its tokens, so there are few different ones
        for written, count in Counter(written_ns).items():
            self._counts[_bucket(max(0, received_ns - written))] += count

    def merge(self, other: Delays) -> None:
        self._counts.update(other._counts)

    def percentile(self, percent: int) -> int | None:
        """The smallest delay that `percent` of all do not exceed; None when there are none."""
        wanted = -(-self._counts.total() * percent // 100)
        for value in sorted(self._counts):
            wanted -= self._counts[value]
            if wanted <= 0:
                return value
        return None
