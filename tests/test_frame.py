# SPDX-License-Identifier: Apache-2.0
"""The parser of data frames, against frames built in Python and against bytes nobody meant."""

from __future__ import annotations

import errno
import os
from codecs import utf_8_decode

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wire
from clawd.core import ffi, lib
from wire import Record, Segment

EXAMPLES = int(os.environ.get("CLAWD_TEST_EXAMPLES", "200"))
PARTS = 700
I64_MAX = 2**63 - 1


def split(data: bytes, part_count: int = PARTS, *, shift: int = 0):
    """Split in memory that ends where the frame does, so that a sanitizer sees one byte too many."""
    memory = ffi.new("uint8_t[]", shift + len(data)) if shift + len(data) else ffi.new("uint8_t[1]")
    ffi.memmove(memory + shift, data, len(data))
    parts = ffi.new("struct claw_part[]", part_count)
    connection = ffi.new("uint32_t *", 77)
    found = lib.claw_frame_split(memory + shift, len(data), parts, part_count, connection)
    return found, parts, connection[0]


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
    found, parts, told = split(data, shift=shift)
    assert (found, told) == (len(built), connection)
    for part, segment in zip(parts[0:found], built, strict=True):
        assert (part.attachment, part.incarnation, part.first_seq) == (*segment[:3],)
        assert part.end_seq == segment.first_seq + sum(record.advance() for record in segment.records)
        assert tuple(wire.records(data[part.offset : part.offset + part.len])) == segment.records
        kinds = [record.kind for record in segment.records]
        assert part.tokens == kinds.count(lib.CLAW_TOKEN)
        assert bool(part.flags & lib.CLAW_PART_PLAIN) == (set(kinds) == {lib.CLAW_TOKEN})
        assert bool(part.flags & lib.CLAW_PART_CLOSES) == (kinds[-1:] == [lib.CLAW_CLOSE])


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(st.lists(st.one_of(st.binary(max_size=6), st.sampled_from("a é 一 🙂".encode().split())), max_size=5), st.data())
@example(["🙂".encode()[:3]], None)
@example(["🙂".encode()[:2], "🙂".encode()[2:]], None)
@example([b"\xe4\xbd", b""], None)
def test_a_text_that_is_not_said_to_be_begun_ends_with_a_character(texts, data):
    found, parts, _ = split(wire.frame(1, [Segment(1, 1, 0, tuple(map(wire.token, texts)))]))
    assert found == 1
    before = "🙂".encode()[: data.draw(st.integers(0, 3))] if data else b""
    _, used = utf_8_decode(before + b"".join(texts), "replace", False)
    begun = used < len(before + b"".join(texts))
    if texts and not parts[0].flags & lib.CLAW_PART_BEGUN:
        assert not begun
    if texts and texts[-1].isascii() and texts[-1]:
        assert not parts[0].flags & lib.CLAW_PART_BEGUN  # else it would be no help


def holds(data: bytes, part_count: int = PARTS) -> None:
    """Whatever the bytes, the answer is a count whose parts lie in the frame, or a refusal."""
    found, parts, connection = split(data, part_count)
    if found < 0:
        assert found in (-errno.EBADMSG, -errno.ENOBUFS)
        assert connection == 77
        return
    assert found <= part_count
    behind = 0
    for part in parts[0:found]:
        assert behind < part.offset <= len(data) - part.len
        behind = part.offset + part.len
        assert part.first_seq <= part.end_seq <= I64_MAX
        for record in wire.records(data[part.offset : behind]):
            assert record.kind in (1, 2, 3, 4)
            assert record.klass <= 2
            assert len(record.data) <= lib.CLAW_RECORD_MAX


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
    return split(data)[0] == -errno.EBADMSG


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
    assert split(data)[0] >= 0


def test_more_segments_than_there_is_room_for_is_its_own_refusal():
    data = wire.frame(1, [Segment(number, 1, 0, (TOKEN,)) for number in range(1, 6)])
    assert split(data, 5)[0] == 5
    assert split(data, 4)[0] == -errno.ENOBUFS


def run(data: bytes) -> tuple[int, int]:
    tokens = ffi.new("uint32_t *")
    kept = ffi.from_buffer(bytearray(data)) if data else ffi.new("uint8_t[1]")
    return lib.claw_records_run(kept, len(data), tokens), tokens[0]


def join(data: bytes, room: int, count: int):
    kept = ffi.from_buffer(bytearray(data)) if data else ffi.new("uint8_t[1]")
    joined, written = ffi.new("uint8_t[]", room or 1), ffi.new("uint64_t[]", count or 1)
    used = lib.claw_records_join(kept, len(data), joined, room, written, count)
    return used, bytes(ffi.buffer(joined, max(used, 0))), list(written[0:count])


def test_a_run_is_the_tokens_up_to_the_first_other_record_and_joins_to_their_payloads():
    body = [wire.token(b"ab", written_ns=3), wire.token(b""), wire.token(b"cde", written_ns=2**64 - 1)]
    packed = b"".join(record.pack() for record in body)
    whole = packed + wire.gap(1).pack() + TOKEN.pack()
    assert run(whole) == run(packed) == (len(packed), 3)
    assert run(wire.gap(1).pack() + packed) == run(b"") == (0, 0)
    assert join(packed, 5, 3) == join(whole, 5, 3) == (5, b"abcde", [3, 0, 2**64 - 1])
    assert join(b"", 0, 0)[0] == 0


def test_records_that_are_cut_and_too_little_room_are_refused():
    packed = wire.token(b"ab").pack() + TOKEN.pack()
    for cut in (1, 4, 5, 23, 25, 39, 41, 48, 71):
        assert run(packed[:-cut])[0] == -errno.EBADMSG
        assert join(packed[:-cut], 99, 9)[0] == -errno.EBADMSG
    assert join(packed, 13, 2)[0] == -errno.ENOBUFS
    assert join(packed, 14, 1)[0] == -errno.ENOBUFS
    assert join(packed, 14, 2)[0] == 14
