# SPDX-License-Identifier: Apache-2.0
"""Data frames and flow messages in Python: what tests send to a client, and what they read from it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from clawd.core import lib

HEADER = struct.Struct("<BBHIII")
SEGMENT = struct.Struct("<IIQII")
RECORD = struct.Struct("<HBBIQQ")
FLOW = struct.Struct("<BBHIQ")
CREDIT = struct.Struct("<IIQ")


class Record(NamedTuple):
    kind: int
    data: bytes = b""
    count: int = 1
    klass: int = 2
    written_ns: int = 0
    ring_seq: int = 1

    def advance(self) -> int:
        return {lib.CLAW_TOKEN: 1, lib.CLAW_GAP: self.count}.get(self.kind, 0)

    def pack(self) -> bytes:
        head = RECORD.pack(len(self.data), self.kind, self.klass, self.count, self.ring_seq, self.written_ns)
        return head + self.data + bytes(-len(self.data) % lib.CLAW_SPOOLED_ALIGN)


class Segment(NamedTuple):
    attachment: int
    incarnation: int
    first_seq: int
    records: tuple[Record, ...]

    def pack(self) -> bytes:
        body = b"".join(record.pack() for record in self.records)
        head = SEGMENT.pack(self.attachment, self.incarnation, self.first_seq, len(body), len(self.records))
        return head + body


class Flow(NamedTuple):
    connection: int
    acked: int
    credits: dict[int, int]


def token(data: bytes, *, count: int = 1, klass: int = 2, written_ns: int = 0) -> Record:
    return Record(lib.CLAW_TOKEN, data, count, klass, written_ns)


def opened(meta: bytes = b"") -> Record:
    return Record(lib.CLAW_OPEN, meta, 0)


def closed(reason: str) -> Record:
    return Record(lib.CLAW_CLOSE, reason.encode(), 0)


def gap(count: int, reason: str = "evicted") -> Record:
    return Record(lib.CLAW_GAP, reason.encode(), count)


def frame(connection: int, segments: Iterable[Segment]) -> bytes:
    packed = [segment.pack() for segment in segments]
    body = b"".join(packed)
    size = HEADER.size + len(body)
    return HEADER.pack(lib.CLAW_FRAME_DATA, lib.CLAW_FRAME_VERSION, len(packed), connection, size, 0) + body


def records(body: bytes) -> Iterator[Record]:
    """The records of a segment that was checked."""
    at = 0
    while at < len(body):
        length, kind, klass, count, ring_seq, written_ns = RECORD.unpack_from(body, at)
        at += RECORD.size
        yield Record(kind, body[at : at + length], count, klass, written_ns, ring_seq)
        at += length + -length % lib.CLAW_SPOOLED_ALIGN


def parse_flow(message: bytes) -> Flow:
    kind, version, credits, connection, acked = FLOW.unpack_from(message)
    assert (kind, version) == (lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION)
    assert len(message) == FLOW.size + credits * CREDIT.size
    rows = list(CREDIT.iter_unpack(message[FLOW.size :]))
    assert all(reserved == 0 for _, reserved, _ in rows)
    return Flow(connection, acked, {attachment: limit for attachment, _, limit in rows})
