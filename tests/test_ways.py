# SPDX-License-Identifier: Apache-2.0
"""Ways to clients of other hosts, read by the core where the kernel writes them: here the test does."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawd.core import Core, Limits, Told, ffi, lib, page_bytes
from clawd.errors import CoreError
from tests.pace_model import MS
from tests.rig import DEFAULTS, RingWriter
from tests.test_pacing import PACE, Clock, Rig, tokens, write

ENTRIES = 64
AT = {"cookie": (0, 8), "updated_ns": (8, 8), "rtt_us": (16, 4), "jitter_us": (20, 4), "segments": (24, 4),
      "again": (28, 4)}  # fmt: skip
LAYOUT = {"entries": ENTRIES, "row_bytes": 32} | {name: at for name, (at, _) in AT.items()}
COOKIE = 5 + 3 * ENTRIES
GAP_NS = 1_000_000_000 // 45


class Array:
    """What the kernel would write."""

    def __init__(self, size: int = mmap.PAGESIZE) -> None:
        self.fd = os.memfd_create("rows")
        os.ftruncate(self.fd, size)

    def put(self, slot: int = 5, **values: int) -> None:
        values = {"cookie": COOKIE, "rtt_us": 40_000} | values
        for name, (at, size) in AT.items():
            os.pwrite(self.fd, values.get(name, 0).to_bytes(size, "little"), slot * 32 + at)


@pytest.fixture
def array() -> Iterator[Array]:
    made = Array()
    yield made
    os.close(made.fd)


class Shown:
    """The row of the first connection on the page: what anybody sees of it."""

    def __init__(self, page_fd: int) -> None:
        self._view = lib.claw_view_open(page_fd, ffi.new("int *"))
        assert self._view != ffi.NULL
        self._row = ffi.new("struct claw_page_connection *")

    def __call__(self) -> Any:
        assert lib.claw_view_connection(self._view, 0, self._row) == 1
        return self._row

    def close(self) -> None:
        lib.claw_view_close(self._view)


@contextmanager
def far(array: Array) -> Iterator[tuple[Clock, RingWriter, Shown]]:
    """One client of another host, which reads the stream "s", paced as steady. A token of it went."""
    page_fd = os.memfd_create("page")
    limits = Limits(**DEFAULTS)
    os.ftruncate(page_fd, page_bytes(limits))
    with Rig(page_fd=page_fd) as rig:
        rig.core.publish(9, 1, "1", "/nowhere")
        shown = Shown(page_fd)
        os.close(page_fd)
        rig.core.pace("steady", PACE)
        rig.core.map_rows(array.fd, LAYOUT)
        clock = Clock(rig)
        rig.core.open_way(clock.number, COOKIE)
        ring = rig.ring()
        clock.read("s")
        ring.open(1, "s")
        write(ring, 1, 1)
        assert len(tokens(clock.run(MS))) == 1
        yield clock, ring, shown
        shown.close()


def gaps(clock: Clock, ring: RingWriter, count: int) -> list[int]:
    """Between the releases of so many tokens that are there at once."""
    clock.run(1000 * MS)  # whatever was before
    write(ring, 1, count + 1)
    found = [at for at, _ in tokens(clock.run(3000 * MS))]
    assert len(found) == count + 1
    return [b - a for a, b in pairwise(found)]


def test_a_row_that_changed_counts_at_the_very_next_release(array: Array) -> None:
    array.put()
    with far(array) as (clock, ring, shown):
        assert clock.rig.core.look_way(clock.number) == 0
        write(ring, 1, 1, 1)
        before = tokens(clock.run(500 * MS))
        assert len(before) == 1
        array.put(rtt_us=130_000, jitter_us=100_000, segments=10, updated_ns=777)
        write(ring, 1, 1, 2)
        [(at, _)] = tokens(clock.run(500 * MS))
        row = shown()
        assert (row.rtt_us, row.jitter_us, row.way_ns) == (130_000, 100_000, 777)
        assert row.way_seen_ns == at, "in the turn that released it"
        assert row.loss_ppm == 0


def test_jitter_and_loss_slow_the_release_after_the_one_that_saw_them(array: Array) -> None:
    array.put()
    with far(array) as (clock, ring, _):
        clock.rig.core.look_way(clock.number)
        [quick, *_rest] = gaps(clock, ring, 3)
        assert quick <= GAP_NS + 2 * MS
        array.put(jitter_us=100_000)
        [slow, *_rest] = gaps(clock, ring, 3)
        assert 2 * GAP_NS - 2 * MS <= slow <= 2 * GAP_NS + 2 * MS, "1 / (1 + 100 ms / 100 ms)"
        array.put(segments=1000, again=500)
        [slow, *_rest] = gaps(clock, ring, 3)
        assert 2 * GAP_NS - 2 * MS <= slow <= 2 * GAP_NS + 2 * MS, "1 - 0.5"


def test_a_row_that_stays_is_not_taken_again(array: Array) -> None:
    array.put(updated_ns=5)
    with far(array) as (clock, ring, shown):
        clock.rig.core.look_way(clock.number)
        clock.turn()
        seen_ns = shown().way_seen_ns
        assert seen_ns
        write(ring, 1, 10, 1)
        assert len(tokens(clock.run(1000 * MS))) == 10
        assert shown().way_seen_ns == seen_ns


@pytest.mark.parametrize("values", [{"cookie": 0}, {"cookie": 5}], ids=["ended", "another's"])
def test_the_slot_of_a_row_that_ended_says_nothing(array: Array, values: dict[str, int]) -> None:
    array.put(jitter_us=1000)
    with far(array) as (clock, ring, shown):
        assert clock.rig.core.look_way(clock.number) == 0
        array.put(jitter_us=90_000, segments=1000, again=900, **values)
        write(ring, 1, 2, 1)
        assert len(tokens(clock.run(500 * MS))) == 2
        assert (shown().jitter_us, shown().loss_ppm) == (1000, 0)
        assert clock.rig.core.look_way(clock.number) is None
        array.put(9, jitter_us=2000)
        assert clock.rig.core.look_way(clock.number) == 0, "found elsewhere"
        clock.turn()
        assert shown().jitter_us == 2000


@pytest.mark.parametrize(
    "values",
    [
        {"rtt_us": lib.CLAW_WAY_US_MAX + 1},
        {"jitter_us": 2**32 - 1},
    ],
)
def test_values_that_make_no_sense_have_no_effect(array: Array, values: dict[str, int]) -> None:
    array.put(jitter_us=1000)
    with far(array) as (clock, _, shown):
        clock.rig.core.look_way(clock.number)
        array.put(**{"jitter_us": 1001, "segments": 1000, "again": 1000} | values)
        assert clock.rig.core.look_way(clock.number) == 0
        clock.turn()
        assert (shown().rtt_us, shown().jitter_us) == (40_000, 1000)


def test_a_row_farther_than_the_kernel_puts_any_is_not_found(array: Array) -> None:
    with far(array) as (clock, _, _shown):
        array.put(5 + lib.CLAW_WAY_PROBES)
        assert clock.rig.core.look_way(clock.number) is None
        array.put(5 + lib.CLAW_WAY_PROBES - 1)
        assert clock.rig.core.look_way(clock.number) == 0
        clock.rig.core.open_way(clock.number, 0)
        array.put(0, cookie=0)
        assert clock.rig.core.look_way(clock.number) is None, "0 is of free slots"


def test_without_rows_what_is_known_stays_until_somebody_tells(array: Array) -> None:
    array.put(jitter_us=3000, segments=400, again=4)
    with far(array) as (clock, ring, shown):
        core, number = clock.rig.core, clock.number
        assert core.look_way(number) == 10_000
        core.unmap_rows()
        array.put(jitter_us=9000, segments=500, again=100)
        write(ring, 1, 2, 1)
        assert len(tokens(clock.run(500 * MS))) == 2
        assert (shown().jitter_us, shown().loss_ppm) == (3000, 10_000)
        assert core.look_way(number) is None
        assert core.tell_way(number, Told(1, 7, 8, 600, 4)) == 0
        clock.turn()
        assert (shown().rtt_us, shown().jitter_us, shown().loss_ppm) == (7, 8, 0)
        core.map_rows(array.fd, LAYOUT)
        array.put(jitter_us=4000, segments=800, again=6)
        assert core.look_way(number) == 10_000, "counted on from what was told"
        core.disconnect(number)
        for call in (lambda: core.look_way(number), lambda: core.open_way(number, 1)):
            with pytest.raises(CoreError, match="No such file"):
                call()
        with pytest.raises(CoreError, match="No such file"):
            core.tell_way(number, Told(1, 7, 8, 600, 4))


@pytest.mark.parametrize(
    "changed",
    [
        {"entries": 0},
        {"entries": 63},
        {"entries": 2 * lib.CLAW_ROWS_MAX},
        {"entries": ENTRIES * 4},  # more than the object has
        {"row_bytes": 0},
        {"row_bytes": 28},
        {"row_bytes": 24},
        {"row_bytes": lib.CLAW_ROW_BYTES_MAX + 8},
        {"cookie": 4},
        {"cookie": 32},
        {"updated_ns": 2**32 - 8},
        {"rtt_us": 30},
        {"jitter_us": 32},
        {"segments": 2**32 - 4},
        {"again": 29},
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_is_refused_and_the_one_before_stays(array: Array, changed: dict[str, int]) -> None:
    core = Core(Limits(**DEFAULTS))
    number = core.connect()
    core.open_way(number, COOKIE)
    core.map_rows(array.fd, LAYOUT)
    with pytest.raises(CoreError) as error:
        core.map_rows(array.fd, LAYOUT | changed)
    assert error.value.errno == errno.EINVAL
    array.put(63 & COOKIE)
    assert core.look_way(number) == 0
    core.close()


def test_what_is_no_array_is_refused() -> None:
    core = Core(Limits(**DEFAULTS))
    short, (pipe, other) = Array(mmap.PAGESIZE - 1), os.pipe()
    for fd in (short.fd, pipe, -1):
        with pytest.raises(CoreError):
            core.map_rows(fd, LAYOUT)
    for fd in (short.fd, pipe, other):
        os.close(fd)
    core.close()


# --- loss ---


class Counted:
    """A way whose loss is told."""

    def __init__(self) -> None:
        self.core = Core(Limits(**DEFAULTS))
        self.number = self.core.connect()
        self.core.open_way(self.number)
        self.at = self.segments = self.again = 0

    def went(self, segments: int, again: int) -> int:
        """The loss after so many more, of which so many were sent again."""
        self.at += 1
        self.segments = (self.segments + segments) % 2**32
        self.again = (self.again + again) % 2**32
        return self.core.tell_way(self.number, Told(self.at, 1, 1, self.segments, self.again))


@pytest.fixture
def way() -> Iterator[Counted]:
    made = Counted()
    yield made
    made.core.close()


def test_one_lost_of_five_counts_at_once_and_is_not_a_fifth(way: Counted) -> None:
    assert way.went(5, 1) == 5000
    assert way.went(0, 0) == 5000
    assert way.went(100, 0) == 2500
    assert way.went(lib.CLAW_WAY_SEGMENTS, 0) == 0


def test_many_at_once_are_what_they_are(way: Counted) -> None:
    assert way.went(1000, 50) == 50_000
    assert way.went(200, 300) == 1_000_000, "more cannot be"


def test_counters_that_wrap_or_go_back(way: Counted) -> None:
    assert way.went(2**31 - 1, 0) == 0
    assert way.went(2**31 - 1, 0) == 0
    assert way.went(1000, 50) == 50_000, "beyond 32 bits"
    assert way.went(-5000, -3) == 50_000, "of something else: neither is believed"
    assert way.went(400, 2) == 5000, "and it is counted on from there"


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=20))
def test_loss_is_a_share_whatever_is_told(told: list[tuple[int, int]]) -> None:
    way = Counted()
    for segments, again in told:
        assert 0 <= way.went(segments, again) <= 1_000_000
    way.core.close()


@pytest.mark.parametrize("share", [0.005, 0.02, 0.08])
def test_it_comes_to_what_is_lost_however_often_one_looks(seed: int, share: float) -> None:
    dice = random.Random(seed)
    often, seldom = Counted(), Counted()
    losses: dict[str, list[int]] = {"often": [], "seldom": []}
    sent = lost = total = 0
    for _ in range(20_000):
        again = dice.random() < share
        losses["often"].append(often.went(1, again))
        sent, lost, total = sent + 1, lost + again, total + again
        if dice.random() < 0.1:
            losses["seldom"].append(seldom.went(sent, lost))
            sent = lost = 0
    for way, found in losses.items():
        mean = sum(found) / len(found) / 1e6
        assert 0.85 * total / 20_000 <= mean <= 1.15 * total / 20_000, way
    often.core.close()
    seldom.core.close()
