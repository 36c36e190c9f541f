# SPDX-License-Identifier: Apache-2.0
"""The core without a daemon: rings written byte by byte, frames parsed. For tests of spool, streams and outbox."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import wire
from clawd.core import Core, Limits, ffi, lib

HEAD_AT = 128
CREDIT = 1 << 30
SECOND = 1_000_000_000
DEFAULTS = {
    "spool_bytes": 1 << 20,
    "stream_bytes": 1 << 18,
    "keep_ns": 60_000_000_000,
    "max_streams": 64,
    "max_rings": 4,
    "max_connections": 16,
    "max_attachments": 64,
}


class RingWriter:
    """A producer's end of a ring, with nothing checked."""

    def __init__(self, rig: Rig, ring_bytes: int, ring_id: int) -> None:
        self.rig = rig
        self.ring_bytes = ring_bytes
        self.ring_id = ring_id
        data_fd, ctl_fd = os.memfd_create("data"), os.memfd_create("ctl")
        os.ftruncate(data_fd, lib.CLAW_PAGE + ring_bytes)
        os.ftruncate(ctl_fd, ffi.sizeof("struct claw_ctl"))
        event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.index = rig.core.add_ring(data_fd, ctl_fd, event_fd, ring_bytes, ring_id, 9)
        self.data = mmap.mmap(data_fd, 0)
        self.ctl_map = mmap.mmap(ctl_fd, 0)
        self.ctl = ffi.from_buffer("struct claw_ctl *", self.ctl_map)
        self.data_fd, self.ctl_fd, self.event_fd = data_fd, ctl_fd, event_fd
        self.head = 0
        self.seq = 1

    def adopt(self) -> None:
        """Go on with the rig's new core."""
        self.index = self.rig.core.adopt_ring(self.data_fd, self.ctl_fd, self.ring_bytes, self.ring_id, 10)

    def hear(self) -> None:
        """Attach again: a new eventfd, and the kick that comes with it."""
        os.close(self.event_fd)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.rig.core.hear_ring(self.index, self.event_fd)
        os.eventfd_write(self.event_fd, 1)

    def put(self, kind: int, handle: int, payload: bytes = b"", *, flags: int = 0, count: int = 1, at: int = 0) -> int:
        """One record, published at once. Returns its ring_seq."""
        record = struct.pack("<IBBHQQII", len(payload), kind, flags, handle, self.seq, at, count, 0) + payload
        record += bytes(-len(record) % 32)
        for i in range(0, len(record), 32):
            offset = lib.CLAW_PAGE + (self.head + i) % self.ring_bytes
            self.data[offset : offset + 32] = record[i : i + 32]
        self.head += len(record)
        self.data[HEAD_AT : HEAD_AT + 8] = struct.pack("<Q", self.head)
        self.seq += 1
        return self.seq - 1

    def open(self, handle: int, name: str | bytes, meta: bytes = b"", requested_ns: int = 0, pace: int = 0) -> int:
        label = name.encode() if isinstance(name, str) else name
        return self.put(
            lib.CLAW_OPEN,
            handle,
            struct.pack("<QHHI", requested_ns, len(label), len(meta), pace) + label + meta,
            count=0,
        )

    def write(self, handle: int, text: bytes, *, urgent: bool = False) -> int:
        return self.put(lib.CLAW_TOKEN, handle, text, flags=lib.CLAW_URGENT if urgent else 0)

    def close(self, handle: int, reason: bytes = b"stop") -> int:
        return self.put(lib.CLAW_CLOSE, handle, reason, count=0)

    def stopped(self, handle: int) -> tuple[int, int]:
        """(open_seq, reason) as clawd told it."""
        value = int(self.ctl.stopped[handle])
        return value >> 8, value & 0xFF


@dataclass
class Item:
    connection: int
    attachment: int
    incarnation: int
    kind: int
    seq: int
    data: bytes
    klass: int
    count: int
    cost: int


@dataclass
class Rig:
    """A core with a mapped spool."""

    limits: dict[str, int] = field(default_factory=dict)
    page_fd: int = -1
    frames: list[bytes] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # of the last turn's frames, as they were sent
    charged: dict[int, int] = field(default_factory=dict)
    writers: list[RingWriter] = field(default_factory=list)

    def __post_init__(self) -> None:
        values = DEFAULTS | self.limits
        self.core = Core(Limits(**values), self.page_fd)
        self.spool_fd = os.memfd_create("spool")
        os.ftruncate(self.spool_fd, values["spool_bytes"])
        self.core.map_spool(self.spool_fd, values["spool_bytes"])
        self.spool = mmap.mmap(self.spool_fd, 0)

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def restart(self, *, adopt: bool = True, **limits: int) -> Any:
        """Another core on the same objects, as after a kill: nothing is written when one goes. What it found, a struct
        claw_recovered. Readers are gone with the old one.
        """
        self.core.close()
        self.charged.clear()
        values = DEFAULTS | self.limits | limits
        size = len(self.spool)
        self.core = Core(Limits(**values | {"spool_bytes": max(size, values["spool_bytes"])}), self.page_fd)
        self.core.map_spool(self.spool_fd, size)
        found = self.core.recover()
        if adopt:
            for writer in self.writers:
                writer.adopt()
            self.core.end_orphans(0, "producer_lost")
        return found

    def close(self) -> None:
        self.core.close()
        os.close(self.spool_fd)
        for writer in self.writers:
            for fd in (writer.data_fd, writer.ctl_fd, writer.event_fd):
                os.close(fd)

    def ring(self, ring_bytes: int = 1 << 16) -> RingWriter:
        self.writers.append(RingWriter(self, ring_bytes, 7 + len(self.writers)))
        return self.writers[-1]

    def block(self, index: int) -> Any:
        """The struct claw_block that a start after a crash would find there."""
        return ffi.from_buffer("struct claw_block *", memoryview(self.spool)[index * lib.CLAW_BLOCK_BYTES :])[0]

    @contextmanager
    def asleep(self, ring: RingWriter) -> Iterator[None]:
        """The body runs while the core sleeps in `wait`, for a quarter of a second in all."""
        sleeper = threading.Thread(target=self.core.wait, args=(250_000_000,))
        sleeper.start()
        while not int(ring.ctl.need_wake) & 1:
            time.sleep(0.001)  # there is nothing to wait on: this is the handshake's own word
        yield
        sleeper.join()

    def turn(self, now_ns: int | None = None) -> list[Item]:
        """One turn: what it sends, record by record."""
        self.core.turn(now_ns)
        frames = self.core.frames()
        self.frames = [bytes(self.core.out[offset : offset + length]) for _, offset, length in frames]
        for number, _, length in frames:
            self.charged[number] = self.charged.get(number, 0) + length + lib.CLAW_FRAME_CHARGE
        self.kinds = [frame[0] for frame in self.frames]
        self.frames = [unpacked(frame) for frame in self.frames]
        return [item for frame in self.frames for item in parse(frame)]

    def turns(self) -> list[Item]:
        """Turn until nothing comes any more, each frame acked when it came."""
        found: list[Item] = []
        while items := self.turn():
            found += items
            for number, total in self.charged.items():
                self.ack(number, total)
        return found

    def ack(self, number: int, total: int, credits: dict[int, int] | None = None) -> bool:
        rows = list((credits or {}).items())
        message = struct.pack("<BBHIQ", lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, len(rows), number, total)
        return self.core.flow(number, message + b"".join(struct.pack("<IIQ", id, 0, limit) for id, limit in rows))


def unpacked(frame: bytes) -> bytes:
    """The data frame, however it was sent."""
    if frame[0] != lib.CLAW_FRAME_PACKED:
        return frame
    out = ffi.new("uint8_t[]", lib.CLAW_FRAME_MAX)
    length = lib.claw_frame_unpack(frame, len(frame), out, lib.CLAW_FRAME_MAX)
    assert length > 0, f"bad packed frame: {length}"
    return bytes(ffi.buffer(out, length))


def parse(frame: bytes) -> list[Item]:
    parts = ffi.new("struct claw_part[700]")
    connection = ffi.new("uint32_t *")
    count = lib.claw_frame_split(frame, len(frame), parts, 700, connection)
    assert count >= 0, f"bad frame: {count}"
    return [item for part in parts[0:count] for item in _items(int(connection[0]), part, frame)]


def _items(connection: int, part: Any, frame: bytes) -> Iterator[Item]:
    seq = part.first_seq
    for record in wire.records(frame[part.offset : part.offset + part.len]):
        kind, data, count, klass, _, _ = record
        cost = len(record.pack())
        yield Item(connection, part.attachment, part.incarnation, kind, seq, data, klass, count, cost)
        seq += record.advance()
    assert seq == part.end_seq


def read(rig: Rig, name: str, *, after: int = -1, incarnation: int | None = None) -> list[Item]:
    """All that a new reader gets, once the rings are drained."""
    rig.turns()
    number = rig.core.connect()
    result = rig.core.attach(number, 1, name.encode(), after=after, incarnation=incarnation, credit=CREDIT)
    assert result == 0, f"attach to {name}: {result}"
    items = rig.turns()
    rig.core.disconnect(number)
    return items


def told(items: list[Item]) -> list[tuple[int, bytes]]:
    """(seq, text) of tokens, (seq, reason) of the rest."""
    names = {lib.CLAW_OPEN: b"open:", lib.CLAW_CLOSE: b"close:", lib.CLAW_GAP: b"gap:"}
    return [(item.seq, names.get(item.kind, b"") + item.data) for item in items]


def rewind(ring: RingWriter, to: int = 0) -> None:
    """As if clawd was killed before it gave the ring bytes from there on back."""
    ring.ctl.ack_pos = to


def row(rig: Rig, name: str) -> Any:
    """A copy of the stream's row."""
    for index in range(64):
        found = rig.core.stream_row(index)
        if found is not None and bytes(ffi.buffer(found.name, found.name_len)) == name.encode():
            copy = ffi.new("struct claw_stream_row *")
            ffi.memmove(copy, found, ffi.sizeof("struct claw_stream_row"))
            return copy
    raise AssertionError(f"no stream {name}")


def write_some(ring: RingWriter, handle: int, first: int, count: int, size: int = 5) -> list[bytes]:
    texts = [(b"%d " % (first + i)).ljust(size, b"x") for i in range(count)]
    for text in texts:
        ring.write(handle, text)
    return texts
