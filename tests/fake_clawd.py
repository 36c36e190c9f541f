# SPDX-License-Identifier: Apache-2.0
"""Plays clawd for a producer: makes the two shared-memory objects, answers on the control socket, and reads rings in
plain Python, checking every rule of ring.cdef.h on the way. Shares only the struct layouts with the code under test.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import posix_ipc

from clawd.core import ffi, lib
from clawd.errors import RingFull
from clawd.producer import Stream

PAGE = 4096
SMALL_RING = 4096
"""Bytes: the smallest that clawd gives."""
TOKEN, OPEN, CLOSE, GAP = 1, 2, 3, 4
RECORD = struct.Struct("<IBBHQQII")
OFFSET = {name: row.offset for name, row in ffi.typeof("struct claw_ctl").fields}
HEAD = dict(ffi.typeof("struct claw_data").fields)["head"].offset


@dataclass
class Record:
    kind: int
    flags: int
    handle: int
    seq: int
    written_ns: int
    count: int
    payload: bytes


@dataclass
class Opened:
    name: str
    meta: bytes
    requested_ns: int
    open_seq: int
    data: bytes = b""
    count: int = 0
    reason: str | None = None
    gaps: list[tuple[int, int, str]] = field(default_factory=list)
    """(bytes before it, records missing, reason)"""


def make_shm(size: int) -> int:
    shm = posix_ipc.SharedMemory(f"/clawd-test-{secrets.token_hex(8)}", posix_ipc.O_CREX, mode=0o600)
    shm.unlink()
    os.posix_fallocate(shm.fd, 0, size)
    return shm.fd


@dataclass
class Ring:
    """One producer's ring, as clawd sees it."""

    ring_bytes: int
    ring_id: int
    pos: int = 0
    seq: int = 1
    written_ns: int = 0
    live: dict[int, Opened] = field(default_factory=dict)
    streams: list[Opened] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    old_event_fds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record_max = min(self.ring_bytes // 4, 3584)
        self.data_fd = make_shm(PAGE + self.ring_bytes)
        self.ctl_fd = make_shm(ffi.sizeof("struct claw_ctl"))
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # clawd's own view of DATA is read-only
        self.data = mmap.mmap(self.data_fd, PAGE + self.ring_bytes, prot=mmap.PROT_READ)
        self.ctl = mmap.mmap(self.ctl_fd, ffi.sizeof("struct claw_ctl"))
        ctl = ffi.from_buffer("struct claw_ctl *", self.ctl)
        ctl.magic, ctl.layout, ctl.size = lib.CLAW_MAGIC, lib.CLAW_LAYOUT, ffi.sizeof("struct claw_ctl")
        ctl.record_max, ctl.ring_bytes, ctl.ring_id = self.record_max, self.ring_bytes, self.ring_id
        ctl.state = lib.CLAW_STATE_OPEN
        self.words = ctl  # cffi stores each word at once, as the protocol needs
        self._head = ffi.cast("uint64_t *", ffi.from_buffer(self.data) + HEAD)

    @property
    def head(self) -> int:
        return int(self._head[0])

    def answer(self) -> bytes:
        row = ffi.new("struct claw_attached *")
        row.magic, row.layout, row.size = lib.CLAW_MAGIC, lib.CLAW_LAYOUT, ffi.sizeof("struct claw_attached")
        row.ring_bytes, row.ring_id, row.record_max = self.ring_bytes, self.ring_id, self.record_max
        return bytes(ffi.buffer(row))

    def bytes_at(self, pos: int, length: int) -> bytes:
        start = pos % self.ring_bytes
        first = min(length, self.ring_bytes - start)
        return self.data[PAGE + start : PAGE + start + first] + self.data[PAGE : PAGE + length - first]

    def drain(self) -> list[Record]:
        """Read, check and acknowledge everything up to head."""
        head, new = self.head, []
        assert head % 32 == 0
        assert 0 <= head - self.pos <= self.ring_bytes
        while self.pos < head:
            length, kind, flags, handle, seq, written_ns, count, reserved = RECORD.unpack(self.bytes_at(self.pos, 32))
            assert length <= self.record_max
            assert kind in (TOKEN, OPEN, CLOSE, GAP)
            assert flags in (0, lib.CLAW_URGENT)
            assert handle < lib.CLAW_HANDLE_COUNT
            assert seq == self.seq
            assert written_ns >= self.written_ns > -1
            assert reserved == 0
            record = Record(kind, flags, handle, seq, written_ns, count, self.bytes_at(self.pos + 32, length))
            self.seq, self.written_ns = seq + 1, written_ns
            self.pos += 32 + (length + 31) // 32 * 32
            new.append(record)
            self._take(record)
        assert self.pos == head
        self.records += new
        self.words.ack_pos = self.pos
        return new

    def _take(self, record: Record) -> None:
        if record.kind == OPEN:
            assert record.handle not in self.live, "a handle is open once at a time"
            requested_ns, name_len, meta_len, reserved = struct.unpack_from("<QHHI", record.payload)
            assert reserved == 0
            assert len(record.payload) == 16 + name_len + meta_len
            name, meta = record.payload[16 : 16 + name_len].decode(), record.payload[16 + name_len :]
            self.live[record.handle] = Opened(name, meta, requested_ns, record.seq)
            self.streams.append(self.live[record.handle])
        elif record.kind == TOKEN:
            assert record.payload
            self.live[record.handle].data += record.payload
            self.live[record.handle].count += record.count
        elif record.kind == GAP:
            assert record.count
            row = self.live[record.handle]
            row.gaps.append((len(row.data), record.count, record.payload.decode()))
        else:
            self.live.pop(record.handle).reason = record.payload.decode()

    def stream(self, name: str) -> Opened:
        return next(row for row in reversed(self.streams) if row.name == name)

    def stop(self, name: str, reason: int) -> None:
        handle, row = next((handle, row) for handle, row in self.live.items() if row.name == name)
        self.words.stopped[handle] = row.open_seq << 8 | reason

    def is_held(self) -> bool:
        """Somebody still has the lock that clawd took on what it handed over."""
        other = self.reopen(os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(other)
        return False

    def reopen(self, flags: int) -> int:
        return os.open(f"/proc/self/fd/{self.data_fd}", flags | os.O_CLOEXEC)

    def wakes(self) -> int:
        """How often the producer signalled since the last look."""
        try:
            return os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return 0

    def renew_event(self) -> int:
        """The eventfd of a clawd that was started anew; the old one stays, heard by nobody."""
        self.old_event_fds.append(self.event_fd)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self.event_fd

    def close(self) -> None:
        for fd in (self.data_fd, self.ctl_fd, self.event_fd, *self.old_event_fds):
            os.close(fd)


Tamper = Callable[[bytes, list[int]], tuple[bytes, list[int]]]
"""What becomes of an answer and its descriptors before they are sent."""


def put(at: int, value: bytes) -> Tamper:
    """Other bytes from `at` on."""
    return lambda answer, fds: (answer[:at] + value + answer[at + len(value) :], fds)


class FakeClawd:
    """Serves `control.sock` in a directory; each producer that attaches becomes a Ring in `rings`, and one that
    attaches again gets a new eventfd.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rings: list[Ring] = []
        self.connections: list[socket.socket] = []
        self.hellos: list[tuple[str, int]] = []
        self.tamper: Tamper = lambda answer, fds: (answer, fds)
        self.default_bytes = 131072
        self.attached = threading.Event()  # the first ring exists
        self.let_go = threading.Event()  # and our own copy of its descriptors is closed
        self.again = threading.Semaphore(0)  # released for each that asked to attach again, and was answered
        self.start()

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.directory / "control.sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            packet = connection.recv(4096)
            assert len(packet) == ffi.sizeof("struct claw_hello")
            hello = ffi.new("struct claw_hello *")
            ffi.memmove(hello, packet, len(packet))
            assert (hello.magic, hello.layout, hello.size) == (lib.CLAW_MAGIC, lib.CLAW_LAYOUT, len(packet))
            self.hellos.append((ffi.string(hello.name).decode(), int(hello.ring_bytes)))
            if hello.ring_id:
                self._attach_again(connection, int(hello.ring_id), int(hello.ring_bytes))
                continue
            ring = Ring(int(hello.ring_bytes) or self.default_bytes, len(self.rings) + 1)
            self.rings.append(ring)
            self.attached.set()
            self.connections.append(connection)
            read_only = os.open(f"/proc/self/fd/{ring.ctl_fd}", os.O_RDONLY | os.O_CLOEXEC)
            locked = ring.reopen(os.O_RDWR)
            fcntl.flock(locked, fcntl.LOCK_EX)
            self._answer(connection, ring.answer(), [locked, read_only, ring.event_fd])
            os.close(read_only)
            os.close(locked)
            self.let_go.set()

    def _attach_again(self, connection: socket.socket, ring_id: int, ring_bytes: int) -> None:
        ring = self.rings[ring_id - 1]
        assert ring.ring_bytes == ring_bytes
        self.connections.append(connection)
        self._answer(connection, ring.answer(), [ring.renew_event()])
        self.again.release()

    def _answer(self, connection: socket.socket, answer: bytes, fds: list[int]) -> None:
        answer, fds = self.tamper(answer, fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        if answer:
            connection.sendmsg([answer], ancillary)
        else:
            connection.close()

    def stop(self) -> None:
        """Be gone as a clawd that was killed: rings and the socket's name stay."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self.connections:
            connection.close()
        self.connections.clear()

    def restart(self) -> None:
        self.stop()
        (self.directory / "control.sock").unlink()
        self.start()

    def close(self) -> None:
        self.stop()
        for ring in self.rings:
            ring.close()


def fill(stream: Stream, text: str = "x" * 1000) -> int:
    """Write until the ring is full; how often that went."""
    written = 0
    try:
        while True:
            stream.write(text)
            written += 1
    except RingFull:
        return written


class Drainer:
    """Drains a ring in a thread until `stop`, as a clawd that is awake would; keeps what went wrong."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.failure: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end.wait(0.0005):
                self.ring.drain()
            self.ring.drain()
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Drainer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        if self.failure and not exception[0]:
            raise self.failure
