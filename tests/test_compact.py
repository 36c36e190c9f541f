# SPDX-License-Identifier: Apache-2.0
"""Compact encoding: the same frame comes out, fewer bytes go over the way, and nothing in it is believed."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd.core import ffi, lib
from counts import count
from tests.pace_model import MS
from tests.test_pacing import paced
from tests.wire import HEADER, SEGMENT, Record, Segment, closed, frame, token

ROOM = lib.CLAW_FRAME_MAX


def pack(frame: bytes) -> bytes | None:
    """None: it would not become shorter."""
    out = ffi.new("uint8_t[]", ROOM)
    length = lib.claw_frame_pack(frame, len(frame), out, ROOM)
    return bytes(ffi.buffer(out, length)) if length else None


def unpack(packed: bytes, room: int = ROOM) -> bytes | int:
    """A copy of exact size, so that a read beyond it is seen by the sanitizer."""
    data = ffi.new("uint8_t[]", packed) if packed else ffi.NULL
    out = ffi.new("uint8_t[]", room)
    length = lib.claw_frame_unpack(data, len(packed), out, room)
    return bytes(ffi.buffer(out, length)) if length >= 0 else length


RECORDS = st.builds(
    Record,
    kind=st.integers(1, 4),
    data=st.binary(max_size=40),
    count=st.one_of(st.just(1), st.integers(0, 2**32 - 1)),
    klass=st.integers(0, 2),
    written_ns=st.integers(0, 2**64 - 1),
    ring_seq=st.just(0),  # it does not travel
)
SEGMENTS = st.builds(
    Segment,
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**62),
    st.lists(RECORDS, min_size=1, max_size=20).map(tuple),
)


@given(st.lists(SEGMENTS, max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_same_frame_comes_out(segments: list[Segment]) -> None:
    whole = frame(9, segments)
    packed = pack(whole)
    if packed is not None:
        assert len(packed) < len(whole)
        assert unpack(packed) == whole


def test_a_short_token_takes_a_third() -> None:
    start = 10**15
    tokens = tuple(token(b" token", written_ns=start + i * 20 * MS) for i in range(100))
    whole = frame(9, [Segment(1, 77, 5, tokens)])
    packed = pack(whole)
    assert packed is not None
    assert len(packed) / 100 <= 14, "bytes a token"
    assert len(whole) / 100 >= 32


@pytest.mark.parametrize("seed", range(4))
def test_nothing_in_it_is_believed(seed: int) -> None:
    luck = random.Random(seed)
    records = (token(b"some text", count=3, written_ns=5), closed("stop"))
    good = pack(frame(9, [Segment(number, 77, 5, records) for number in range(1, 4)]))
    assert good is not None
    cases = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(luck.randrange(1, 5)):
            bad[luck.randrange(len(bad))] = luck.choice([0, 1, 0x7F, 0x80, 0xFF, luck.randrange(256)])
        bad = bad[: luck.randrange(len(bad) + 1)] if luck.random() < 0.3 else bad + luck.randbytes(luck.randrange(3))
        if luck.random() < 0.7 and len(bad) >= HEADER.size:
            struct.pack_into("<I", bad, 8, len(bad))  # so that more than the length is looked at
        result = unpack(bytes(bad), luck.choice([ROOM, 0, 15, 16, 60]))
        assert isinstance(result, bytes) or result == -74
        cases += 1
    count(cases, "fuzz cases")


@pytest.mark.parametrize(
    "body",
    [
        b"\x01" + b"\xff" * 10,  # a length without an end
        b"\x01" + b"\x80" * 9 + b"\x02",  # of 65 bits
        b"\x01\xff\xff\xff\x7f\x00",  # far too long
        b"\x81\x01\xff\xff\xff\xff\xff\x01\x00a",  # a count beyond 32 bits
        b"\x61\x01\x00a",  # a class that there is not
        b"\x01",
        b"\x01\x05\x00abcd",  # cut off
    ],
)
def test_each_wrong_record_is_refused(body: bytes) -> None:
    segment = SEGMENT.pack(1, 77, 0, len(body), 1) + body
    head = HEADER.pack(lib.CLAW_FRAME_PACKED, lib.CLAW_FRAME_VERSION, 1, 9, HEADER.size + len(segment), 0)
    assert unpack(head + segment) == -74


def test_a_congested_client_gets_it_until_it_has_caught_up() -> None:
    with paced("off") as (clock, ring):
        clock.rig.core.open_way(clock.number)
        clock.read("s")
        ring.open(1, "s")
        seqs, kinds = [], []

        def take() -> None:
            seqs.extend(item.seq for item in clock.rig.turn(clock.now) if item.kind == lib.CLAW_TOKEN)
            kinds.extend(clock.rig.kinds)

        for number in range(6000):
            ring.write(1, b"%d" % number)
            if number % 300 == 299:
                take()
        behind = len(seqs)
        assert behind < 3000, "not congested"
        for _ in range(100):
            clock.rig.ack(clock.number, clock.rig.charged[clock.number])
            take()
        assert seqs == list(range(6000))
        assert lib.CLAW_FRAME_PACKED in kinds
        ring.write(1, b"and then")
        kinds.clear()
        take()
        assert kinds == [lib.CLAW_FRAME_DATA], "caught up"
        totals = clock.rig.core.refresh_totals()
        assert totals.compact_saved_bytes > (6000 - behind) * 15
        assert totals.frame_bytes == sum(clock.rig.charged.values()) - totals.frames * lib.CLAW_FRAME_CHARGE


def test_a_client_on_this_host_does_not_get_it() -> None:
    with paced("off") as (clock, ring):
        clock.read("s")
        ring.open(1, "s")
        for number in range(3000):
            ring.write(1, b"%d" % number)
            if number % 300 == 299:
                clock.rig.turn(clock.now)
                assert set(clock.rig.kinds) <= {lib.CLAW_FRAME_DATA}
