# SPDX-License-Identifier: Apache-2.0
"""clawd's side of a ring as a pure function: whatever the bytes, it yields records within bounds or names the rule that
was broken. Its writers here: this file, whose positions can be anywhere, and the SDK.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clawd.core import ffi, lib
from clawd.errors import RingFull
from clawd.producer import Producer
from tests.fake_clawd import FakeClawd

EXAMPLES = int(os.environ.get("CLAWD_TEST_EXAMPLES", "300"))
PAGE = int(lib.CLAW_PAGE)
HEAD = dict(ffi.typeof("struct claw_data").fields)["head"].offset
RECORD = struct.Struct("<IBBHQQII")
ALIGN = int(lib.CLAW_RECORD_ALIGN)
CAP = 4096
TOP = 2**64
SIZES = (4096, 8192, 16384, 32768, 65536)


def padded(length: int) -> int:
    return -(-(RECORD.size + length) // ALIGN) * ALIGN


class Ring:
    """Both ends of one ring: DATA written here, read by a struct claw_drain."""

    def __init__(self, ring_bytes: int = CAP, start: int = 0, fds: tuple[int, int] | None = None) -> None:
        self.ring_bytes = ring_bytes
        data_fd, ctl_fd = fds or (os.memfd_create("data"), os.memfd_create("ctl"))
        os.ftruncate(data_fd, PAGE + ring_bytes)
        os.ftruncate(ctl_fd, ffi.sizeof("struct claw_ctl"))
        self.drain = ffi.new("struct claw_drain *")
        assert lib.claw_drain_init(self.drain, data_fd, ctl_fd, ring_bytes) == 0
        self.data = mmap.mmap(data_fd, PAGE + ring_bytes)
        if not fds:
            os.close(data_fd)
            os.close(ctl_fd)
        self.record_max = int(self.drain.record_max)
        self.record = ffi.new("struct claw_record *")
        self.drain.pos = self.head = start
        self.drain.ctl.ack_pos = start
        self.seq = self.drain.next_seq = 1
        self.kinds: list[int] = []
        if start:
            self.set_head(start)

    def put(self, at: int, data: bytes) -> None:
        offset = at % self.ring_bytes
        first = min(len(data), self.ring_bytes - offset)
        self.data[PAGE + offset : PAGE + offset + first] = data[:first]
        self.data[PAGE : PAGE + len(data) - first] = data[first:]

    def set_head(self, head: int) -> None:
        struct.pack_into("<Q", self.data, HEAD, head % TOP)

    def write(self, payload: bytes, **fields: int) -> None:
        values = {
            "len": len(payload),
            "kind": lib.CLAW_TOKEN,
            "flags": 0,
            "handle": 0,
            "ring_seq": self.seq,
            "written_ns": 0,
            "count": 1,
            "reserved": 0,
            **fields,
        }
        self.put(self.head, RECORD.pack(*values.values()) + payload)
        self.head = (self.head + padded(len(payload))) % TOP
        self.seq += 1
        self.set_head(self.head)

    def room(self) -> int:
        return self.ring_bytes - (self.head - int(self.drain.ctl.ack_pos)) % TOP

    def take(self, budget: int = 1 << 30) -> tuple[int, list[bytes]]:
        """One turn: what stopped it (0 or -CLAW_BAD_…), and the payloads before. Nothing it does may leave the ring."""
        result, payloads = lib.claw_drain_begin(self.drain), []
        assert result < 0 or (int(self.drain.head) - int(self.drain.pos)) % TOP <= self.ring_bytes
        while result == 0 and len(payloads) < budget:
            result = lib.claw_drain_next(self.drain, self.record)
            if result != 1:
                break
            left = (int(self.drain.head) - int(self.drain.pos)) % TOP
            length = int(self.record.len)
            assert length <= self.record_max
            assert padded(length) <= left
            assert self.record.kind in (lib.CLAW_TOKEN, lib.CLAW_OPEN, lib.CLAW_CLOSE, lib.CLAW_GAP)
            assert self.record.handle < lib.CLAW_HANDLE_COUNT
            assert self.record.reserved == 0
            payload = ffi.new("uint8_t[]", length)  # exactly as long, so that a sanitizer sees one byte too many
            lib.claw_drain_copy(self.drain, self.record, payload)
            payloads.append(bytes(ffi.buffer(payload)))
            self.kinds.append(int(self.record.kind))
            lib.claw_drain_advance(self.drain, self.record)
            result = 0
        lib.claw_drain_ack(self.drain)
        assert self.drain.ctl.ack_pos == self.drain.pos
        return result, payloads

    def close(self) -> None:
        lib.claw_drain_deinit(self.drain)
        self.data.close()


@contextmanager
def ring(ring_bytes: int = CAP, start: int = 0) -> Iterator[Ring]:
    made = Ring(ring_bytes, start)
    try:
        yield made
    finally:
        made.close()


BAD: dict[str, tuple[dict[str, int], int]] = {
    "longer than the longest": ({"len": CAP // 4 + 1}, lib.CLAW_BAD_LEN),
    "as long as the longest, which is not there": ({"len": CAP // 4}, lib.CLAW_BAD_LEN),
    "2^31 long": ({"len": 2**31}, lib.CLAW_BAD_LEN),
    "2^32-1 long": ({"len": 2**32 - 1}, lib.CLAW_BAD_LEN),
    "2^32-32 long": ({"len": 2**32 - 32}, lib.CLAW_BAD_LEN),
    "a line longer than published": ({"len": 33}, lib.CLAW_BAD_LEN),
    "numbered 0": ({"ring_seq": 0}, lib.CLAW_BAD_SEQ),
    "numbered as the one before": ({"ring_seq": 1}, lib.CLAW_BAD_SEQ),
    "numbered one too high": ({"ring_seq": 3}, lib.CLAW_BAD_SEQ),
    "numbered 2^64-1": ({"ring_seq": TOP - 1}, lib.CLAW_BAD_SEQ),
    "of kind 0": ({"kind": 0}, lib.CLAW_BAD_KIND),
    "of kind 5": ({"kind": 5}, lib.CLAW_BAD_KIND),
    "of kind 255": ({"kind": 255}, lib.CLAW_BAD_KIND),
    "with flag 2": ({"flags": 2}, lib.CLAW_BAD_FLAGS),
    "with flag 128": ({"flags": 128}, lib.CLAW_BAD_FLAGS),
    "with reserved bits": ({"reserved": 1 << 31}, lib.CLAW_BAD_FLAGS),
    "with handle 4096": ({"handle": 4096}, lib.CLAW_BAD_HANDLE),
    "with handle 65535": ({"handle": 65535}, lib.CLAW_BAD_HANDLE),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("start", [0, CAP - 64, TOP - 64], ids=["at 0", "before the end", "before the counter wraps"])
def test_a_record_is_bad_that_is(case: str, start: int) -> None:
    fields, expected = BAD[case]
    with ring(start=start) as it:
        it.write(b"good")
        it.write(b"evil", **fields)
        result, payloads = it.take()
        assert (result, payloads) == (-expected, [b"good"])
        # one way: it stays bad, and nothing was taken
        assert it.take() == (-expected, [])


HEADS = {
    "back": lambda pos: pos - ALIGN,
    "back by a ring": lambda pos: pos - CAP,
    "a line beyond the ring": lambda pos: pos + CAP + ALIGN,
    "two rings ahead": lambda pos: pos + 2 * CAP,
    "misaligned": lambda pos: pos + 8,
    "misaligned by one": lambda pos: pos + 1,
    "2^63 ahead": lambda pos: pos + 2**63,
    "2^64-32 ahead": lambda pos: pos + TOP - 32,
}


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("start", [0, 3 * CAP + 32, 2**63, TOP - CAP])
def test_a_head_is_bad_that_is(case: str, start: int) -> None:
    with ring(start=start) as it:
        it.write(b"x" * 100)
        assert it.take() == (0, [b"x" * 100])
        it.set_head(HEADS[case](int(it.drain.pos)))
        assert it.take() == (-lib.CLAW_BAD_HEAD, [])


@pytest.mark.parametrize("what", ["head", "head a line short of the ring", "all zeros"])
def test_a_ring_of_zeros_is_never_a_record(what: str) -> None:
    with ring() as it:
        it.set_head(CAP - (ALIGN if "short" in what else 0))
        assert it.take() == (-lib.CLAW_BAD_SEQ, [])


def test_a_ring_taken_over_accepts_the_first_number_and_then_enforces_it() -> None:
    with ring() as it:
        it.drain.next_seq = 0
        it.seq = 77
        it.write(b"a")
        it.write(b"b")
        assert it.take() == (0, [b"a", b"b"])
        it.write(b"c", ring_seq=78)
        assert it.take() == (-lib.CLAW_BAD_SEQ, [])


def test_what_is_written_after_head_was_loaded_waits_for_the_next_turn() -> None:
    with ring() as it:
        it.write(b"a")
        assert lib.claw_drain_begin(it.drain) == 0
        it.write(b"b")
        assert lib.claw_drain_next(it.drain, it.record) == 1
        lib.claw_drain_advance(it.drain, it.record)
        assert lib.claw_drain_next(it.drain, it.record) == 0
        assert lib.claw_drain_has_data(it.drain)
        assert it.take() == (0, [b"b"])
        assert not lib.claw_drain_has_data(it.drain)


def test_a_header_that_changes_after_it_was_checked_is_not_looked_at_again() -> None:
    with ring() as it:
        it.write(b"abcd")
        assert lib.claw_drain_begin(it.drain) == 0
        assert lib.claw_drain_next(it.drain, it.record) == 1
        it.put(0, RECORD.pack(2**32 - 1, 9, 9, 9999, 9, 9, 9, 9))
        payload = ffi.new("uint8_t[4]")
        lib.claw_drain_copy(it.drain, it.record, payload)
        assert bytes(ffi.buffer(payload)) == b"abcd"
        lib.claw_drain_advance(it.drain, it.record)
        assert (it.drain.pos, it.drain.next_seq) == (64, 2)


def test_each_sleep_is_an_odd_generation_of_its_own() -> None:
    with ring() as it:
        seen = []
        for _ in range(3):
            lib.claw_drain_sleep(it.drain)
            lib.claw_drain_sleep(it.drain)
            seen.append(int(it.drain.ctl.need_wake))
            lib.claw_drain_awake(it.drain)
            lib.claw_drain_awake(it.drain)
            seen.append(int(it.drain.ctl.need_wake))
        assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ring_bytes", [0, 1, 2048, 4097, 12288, 1 << 27, TOP - 1, 2**63])
def test_a_size_that_no_ring_has_is_refused(ring_bytes: int) -> None:
    data_fd, ctl_fd = os.memfd_create("data"), os.memfd_create("ctl")
    os.ftruncate(data_fd, PAGE + 4096)
    os.ftruncate(ctl_fd, ffi.sizeof("struct claw_ctl"))
    drain = ffi.new("struct claw_drain *")
    assert lib.claw_drain_init(drain, data_fd, ctl_fd, ring_bytes) < 0
    assert drain.data == ffi.NULL
    # nor objects of another size than told
    assert lib.claw_drain_init(drain, data_fd, ctl_fd, 8192) < 0
    assert lib.claw_drain_init(drain, ctl_fd, data_fd, 4096) < 0
    assert lib.claw_drain_init(drain, data_fd, -1, 4096) < 0
    os.close(data_fd)
    os.close(ctl_fd)


lengths = st.one_of(st.integers(0, 40), st.integers(0, 3584))
starts = st.sampled_from([0, CAP - 32, 2**32 - 64, 2**63 - 32, TOP - 32, TOP - 4096])


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(st.sampled_from(SIZES), starts, st.lists(st.tuples(lengths, st.integers(1, 9)), min_size=1, max_size=60))
def test_writer_and_reader_agree_over_many_laps_and_the_counters_wrap(ring_bytes, start, steps):
    with ring(ring_bytes, start) as it:
        written: list[bytes] = []
        taken: list[bytes] = []
        for number, (length, budget) in enumerate(steps * 4):
            payload = (b"%d:" % number * (length // 2 + 1))[: min(length, it.record_max)]
            while it.room() < padded(len(payload)):
                result, payloads = it.take(budget)
                assert result == 0
                assert payloads
                taken += payloads
            it.write(payload)
            written.append(payload)
        result, payloads = it.take()
        assert result == 0
        assert taken + payloads == written
        assert it.drain.pos == it.head
        assert it.room() == ring_bytes


@pytest.mark.parametrize("ring_bytes", SIZES)
def test_the_sdk_and_the_reader_agree_over_many_laps(tmp_path: Path, dice: random.Random, ring_bytes: int) -> None:
    fake = FakeClawd(tmp_path)
    try:
        with Producer("p", tmp_path, ring_bytes, overflow_bytes=0) as producer:
            shared = fake.rings[0]
            it = Ring(ring_bytes, fds=(shared.data_fd, shared.ctl_fd))
            stream = producer.open("s")
            assert it.take()[0] == 0
            written, taken, lost = [], [], 0
            while sum(map(len, written)) < 20 * ring_bytes:
                data = dice.randbytes(dice.choice([dice.randrange(1, 40), dice.randrange(1, it.record_max + 1)]))
                try:
                    stream.write(data, urgent=dice.random() < 0.1)
                    written += [b"ring_full", data] if lost else [data]
                    lost = 0
                except RingFull:
                    lost += 1
                    result, payloads = it.take(dice.randrange(1, 20))
                    assert result == 0
                    assert payloads
                    taken += payloads
            result, payloads = it.take()
            assert (result, taken + payloads) == (0, written)
            assert set(it.kinds[1:]) == {lib.CLAW_TOKEN, lib.CLAW_GAP}
            assert it.drain.pos == shared.head
            it.close()
    finally:
        fake.close()


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(
    st.sampled_from(SIZES[:3]),
    starts,
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(0, 16383), st.binary(min_size=1, max_size=8)), max_size=12),
    st.one_of(st.none(), st.integers(0, TOP - 1), st.integers(0, 600).map(lambda n: n * 32)),
)
@example(CAP, 0, 0, [], CAP)
def test_hostile_bytes_yield_records_within_bounds_or_a_named_rule(ring_bytes, start, count, damage, head):
    """Good records, then bytes changed anywhere, then any head: `take` itself checks every bound."""
    with ring(ring_bytes, start) as it:
        for number in range(count):
            payload = bytes([number % 256]) * (number * 7 % 90)
            if it.room() < padded(len(payload)):
                break
            it.write(payload)
        for at, data in damage:
            it.put(at, data)
        if head is not None:
            it.set_head(start + head)
        before = int(it.drain.pos)
        result, payloads = it.take()
        assert result in range(-lib.CLAW_BAD_HANDLE, 1)
        if not damage and head is None:
            assert (result, it.drain.pos) == (0, it.head)
        if result:
            again, nothing = it.take()
            assert (again, nothing) == (result, [])
        assert (int(it.drain.pos) - before) % TOP <= ring_bytes
        assert all(len(payload) <= it.record_max for payload in payloads)


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(st.integers(0, 2**64), st.integers(1, CAP // 32), st.integers(0, 3))
def test_random_bytes_are_no_records(seed, lines, seq):
    with ring() as it:
        it.put(0, random.Random(seed).randbytes(CAP))
        it.drain.next_seq = seq
        it.set_head(lines * 32)
        result, _ = it.take()
        assert result in range(-lib.CLAW_BAD_HANDLE, 1)
