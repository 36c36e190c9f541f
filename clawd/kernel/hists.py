# SPDX-License-Identifier: Apache-2.0
"""What the tracer's programs count in their maps: durations by stage and class, and counters."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from clawd.errors import HostError
from clawd.kernel import bpfcall
from clawd.kernel.bpf import Loaded
from clawd.kernel.bpfcall import Table

STAGES = ("socket", "device", "acked", "network", "runq")
CLASSES = ("rest", "first")
COUNTERS = (
    "writes",
    "sent_bytes",
    "packets",
    "missed",
    "preempted",
    "full_sockets",
    "full_waits",
    "full_takers",
)
"""All three as in ebpf/tracer.h."""
CUT_BITS = 4
BUCKETS = 592


@dataclass(frozen=True)
class Hist:
    """Durations in nanoseconds, by bucket."""

    counts: array[int] = field(default_factory=lambda: array("Q"))
    max_ns: int = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> int:
        """The middle of the bucket that has it; 0 when empty."""
        left = max(1, -(-self.count * share // 1))
        for number, count in enumerate(self.counts):
            left -= count
            if left <= 0 and count:
                return middle(number)
        return 0


def middle(bucket: int) -> int:
    """Nanoseconds; the inverse of bucket_of in ebpf/tracer.bpf.c."""
    if bucket < 2 << CUT_BITS:
        return bucket
    octave = (bucket >> CUT_BITS) - 1
    return ((bucket - (octave << CUT_BITS)) << octave) + (1 << octave) // 2


def set_lanes(loaded: Loaded, lanes: Mapping[int, str]) -> None:
    """Tell a program the class of each port. Raises HostError."""
    table = Table(loaded.maps["lanes"])
    for port, klass in lanes.items():
        try:
            table.set(port, struct.pack("=I", CLASSES.index(klass)))
        except OSError as error:
            raise HostError(f"clawd has more lanes than can be traced: {loaded.maps['lanes'].entries}") from error


class Counted:
    """The maps of a program that was loaded, until `close`. The program itself stays the caller's."""

    def __init__(self, loaded: Loaded) -> None:
        self._longest = Table(loaded.maps["longest"])
        self._counters = Table(loaded.maps["counters"])
        self._hist: mmap.mmap = bpfcall.mapped(loaded.maps["hist"])

    def close(self) -> None:
        self._hist.close()

    def hist(self, stage: str, klass: str) -> Hist:
        place = STAGES.index(stage) * len(CLASSES) + CLASSES.index(klass)
        counts = array("Q", self._hist[place * BUCKETS * 8 : (place + 1) * BUCKETS * 8])
        (longest,) = struct.unpack_from("=Q", self._longest.get(place))
        return Hist(counts, longest)

    def counters(self) -> Mapping[str, int]:
        return {name: self._counters.total(at) for at, name in enumerate(COUNTERS)}
