# SPDX-License-Identifier: Apache-2.0
"""The parser of data frames, against frames built in Python and against bytes nobody meant."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wire
from clawd.core import ffi, lib
from wire import Record, Segment

EXAMPLES = int(os.environ.get("CLAWD_TEST_EXAMPLES", "200"))
ITEMS = 700
I64_MAX = 2**63 - 1


def parse(data: bytes, item_count: int = ITEMS, *, shift: int = 0):
    """Parse from memory that ends where the frame does, so that a sanitizer sees one byte too many."""
    memory = ffi.new("uint8_t[]", shift + len(data)) if shift + len(data) else ffi.new("uint8_t[1]")
    ffi.memmove(memory + shift, data, len(data))
    items = ffi.new("struct claw_item[]", item_count)
    connection = ffi.new("uint32_t *", 77)
    found = lib.claw_frame_parse(memory + shift, len(data), items, item_count, connection)
    return found, items, connection[0]


records = st.builds(
    Record,
    kind=st.sampled_from([lib.CLAW_TOKEN, lib.CLAW_TOKEN, lib.CLAW_GAP, lib.CLAW_OPEN]),
    data=st.binary(max_size=40),
    count=st.integers(1, 2**32 - 1),
    klass=st.integers(0, 2),
    written_ns=st.integers(0, 2**64 - 1),
    ring_seq=st.integers(0, 2**64 - 1),
)
closes = st.builds(wire.closed, st.sampled_from(["stop", "length", "error:x" * 8]))
segments = st.builds(
    lambda attachment, incarnation, first_seq, body, end: Segment(attachment, incarnation, first_seq, (*body, *end)),
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**40),
    st.lists(records, max_size=6),
    st.lists(closes, max_size=1),
)
frames = st.lists(segments, max_size=5)


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(frames, st.integers(0, 2**32 - 1), st.integers(0, 7))
def test_a_frame_is_listed_as_it_was_built_at_any_alignment(built, connection, shift):
    data = wire.frame(connection, built)
    found, items, told = parse(data, shift=shift)
    expected = [(segment, record) for segment in built for record in segment.records]
    assert (found, told) == (len(expected), connection)
    seq, last = 0, None
    for item, (segment, record) in zip(items[0:found], expected, strict=True):
        seq = segment.first_seq if segment is not last else seq
        last = segment
        assert (item.attachment, item.incarnation, item.seq) == (segment.attachment, segment.incarnation, seq)
        assert (item.kind, item.klass, item.count) == (record.kind, record.klass, record.count)
        assert item.written_ns == record.written_ns
        assert data[item.offset : item.offset + item.len] == record.data
        assert item.bytes == len(record.pack())
        seq += record.advance()


def holds(data: bytes, item_count: int = ITEMS) -> None:
    """Whatever the bytes, the answer is a count whose items lie in the frame, or a refusal."""
    found, items, connection = parse(data, item_count)
    if found < 0:
        assert found in (-errno.EBADMSG, -errno.ENOBUFS)
        assert connection == 77
        return
    assert found <= item_count
    for item in items[0:found]:
        assert item.offset + item.len <= len(data)
        assert item.kind in (1, 2, 3, 4)
        assert item.klass <= 2
        assert item.seq <= I64_MAX


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(st.binary(max_size=400), st.integers(0, 5))
def test_arbitrary_bytes_are_refused_or_listed(data, item_count):
    holds(data, item_count)
    head = wire.HEADER.pack(lib.CLAW_FRAME_DATA, lib.CLAW_FRAME_VERSION, 1, 5, wire.HEADER.size + len(data), 0)
    holds(head + data, item_count)


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(
    frames,
    st.lists(
        st.tuples(st.integers(0, 4000), st.sampled_from([0, 1, 2, 3, 7, 8, 127, 128, 254, 255])), min_size=1, max_size=4
    ),
    st.integers(-40, 40),
)
@example([Segment(1, 1, 0, (wire.token(b"x"),))], [(0, 0xDA)], -1)
def test_a_damaged_frame_is_refused_or_listed(built, damage, longer):
    data = bytearray(wire.frame(1, built))
    if longer >= 0:
        data += bytes(longer)
    else:
        del data[longer:]
    for at, value in damage:
        if data:
            data[at % len(data)] = value
    holds(bytes(data))
    if len(data) >= 12:  # with a matching length the damage gets past the first check
        data[8:12] = len(data).to_bytes(4, "little")
        holds(bytes(data))


def refused(data: bytes) -> bool:
    return parse(data)[0] == -errno.EBADMSG


def one(*body: Record, first_seq: int = 0, **change: int) -> bytes:
    data = bytearray(wire.frame(1, [Segment(1, 1, first_seq, body)]))
    offsets = {
        "kind": (0, 1),
        "version": (1, 1),
        "segments": (2, 2),
        "len": (8, 4),
        "segment_len": (32, 4),
        "records": (36, 4),
    }
    for name, value in change.items():
        at, size = offsets[name]
        data[at : at + size] = value.to_bytes(size, "little")
    return bytes(data)


TOKEN = wire.token(b"twelve bytes")


@pytest.mark.parametrize(
    ("why", "data"),
    [
        ("empty", b""),
        ("a header less one byte", wire.frame(1, [])[:-1]),
        ("another kind", one(TOKEN, kind=lib.CLAW_FRAME_FLOW)),
        ("another version", one(TOKEN, version=2)),
        ("a length that is not the frame's", one(TOKEN, len=79)),
        ("a segment less", one(TOKEN, segments=0)),
        ("a segment more", one(TOKEN, segments=2)),
        ("65535 segments", one(TOKEN, segments=65535)),
        ("a segment longer than the frame", one(TOKEN, segment_len=48)),
        ("a segment of 4 GiB", one(TOKEN, segment_len=2**32 - 8)),
        ("a segment that cuts its record", one(TOKEN, segment_len=32)),
        ("a segment that is not aligned", one(TOKEN, segment_len=36)),
        ("a record less", one(TOKEN, records=0)),
        ("a record more", one(TOKEN, records=2)),
        ("kind 0", one(Record(0))),
        ("kind 5", one(Record(5))),
        ("class 3", one(Record(lib.CLAW_TOKEN, klass=3))),
        ("a gap of nothing", one(wire.gap(0))),
        ("a gap's reason of 256 bytes", one(wire.gap(1, "x" * 256))),
        ("an end's reason of 256 bytes", one(wire.closed("x" * 256))),
        ("a token of 3585 bytes", one(wire.token(bytes(3585)))),
        ("words after the end", one(wire.closed("stop"), TOKEN)),
        ("a first sequence of 2^63", one(TOKEN, first_seq=2**63)),
        ("a first sequence of 2^64 - 1", one(TOKEN, first_seq=2**64 - 1)),
        ("a token that reaches 2^63", one(TOKEN, first_seq=I64_MAX)),
        ("a gap that reaches 2^63", one(wire.gap(8), first_seq=I64_MAX - 7)),
        ("more than a frame may hold", one(*[wire.token(bytes(3000))] * 6)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frame_that_breaks_a_rule_is_refused(why, data):
    assert refused(data), why


@pytest.mark.parametrize(
    "data",
    [
        wire.frame(1, []),
        one(wire.token(b"")),
        one(wire.token(bytes(3584))),
        one(wire.gap(1, "x" * 255)),
        one(wire.closed("x" * 255)),
        one(wire.closed("")),
        one(TOKEN, first_seq=I64_MAX - 1),
        one(wire.gap(7), first_seq=I64_MAX - 7),
    ],
)
def test_a_frame_at_the_edge_of_a_rule_is_taken(data):
    assert parse(data)[0] >= 0


def test_more_records_than_there_is_room_for_is_its_own_refusal():
    data = one(*[TOKEN] * 5)
    assert parse(data, 5)[0] == 5
    assert parse(data, 4)[0] == -errno.ENOBUFS


def gather(data: bytes, base: int, items, count: int, room: int):
    joined, written, used = ffi.new("uint8_t[]", room or 1), ffi.new("uint64_t[]", count), ffi.new("size_t *")
    memory = ffi.new("uint8_t[]", data)
    taken = lib.claw_frame_gather(memory, len(data), base, items, count, joined, room, written, used)
    return taken, bytes(ffi.buffer(joined, used[0])), list(written[0 : max(taken, 0)])


def test_gather_joins_tokens_up_to_the_first_other_record():
    body = [
        wire.token(b"ab", written_ns=3),
        wire.token(b""),
        wire.token(b"cde", written_ns=2**64 - 1),
        wire.gap(1),
        TOKEN,
    ]
    data = one(*body)
    found, items, _ = parse(data)
    assert gather(data, 0, items, found, 5) == (3, b"abcde", [3, 0, 2**64 - 1])
    assert gather(data[40:], 40, items, found, 5) == (3, b"abcde", [3, 0, 2**64 - 1])
    assert gather(data, 0, items + 3, found - 3, 99) == (0, b"", [])


def test_gather_refuses_items_of_another_frame_and_too_little_room():
    data = one(wire.token(b"ab"), TOKEN)
    found, items, _ = parse(data)
    assert gather(data, 0, items, found, 13)[0] == -errno.ENOBUFS
    assert gather(data[:-5], 0, items, found, 99)[0] == -errno.EBADMSG
    assert gather(data, 65, items, found, 99)[0] == -errno.EBADMSG
    assert gather(b"", 0, items, found, 99)[0] == -errno.EBADMSG
