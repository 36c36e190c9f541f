# SPDX-License-Identifier: Apache-2.0
"""A producer that keeps to no rule: attaches by the real protocol, maps DATA itself and writes what a test says."""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from pathlib import Path
from types import TracebackType

from clawd import protocol
from clawd.core import ffi, lib

HELLO = struct.Struct("<IIIIIIQQ64s")
RECORD = struct.Struct("<IBBHQQII")
OPEN = struct.Struct("<QHHI")
HEAD = dict(ffi.typeof("struct claw_data").fields)["head"].offset
PAGE = int(lib.CLAW_PAGE)
PACKET = ffi.sizeof("struct claw_attached")
TOKEN, OPENED, CLOSE, GAP = int(lib.CLAW_TOKEN), int(lib.CLAW_OPEN), int(lib.CLAW_CLOSE), int(lib.CLAW_GAP)


def hello(**changed: int) -> bytes:
    """A good hello but for what is given."""
    values = {
        "magic": lib.CLAW_MAGIC,
        "layout": lib.CLAW_LAYOUT,
        "size": HELLO.size,
        "compatible": 0,
        "incompatible": 0,
        "reserved": 0,
        "ring_bytes": 4096,
        "ring_id": 0,
    }
    assert changed.keys() <= values.keys()
    return HELLO.pack(*{**values, **changed}.values(), b"rogue")


def dial(runtime_dir: Path, socket_name: str = protocol.CONTROL_SOCKET) -> socket.socket:
    kind = socket.SOCK_SEQPACKET if socket_name == protocol.CONTROL_SOCKET else socket.SOCK_STREAM
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        connection.connect(os.fspath(runtime_dir / socket_name))  # without a timeout, which would not wait for a place
    except OSError:
        connection.close()
        raise
    connection.settimeout(30)
    return connection


class Rogue:
    """One ring in the wrong hands. `seq` and `head` are what an honest producer would use next."""

    def __init__(self, runtime_dir: Path, ring_bytes: int = 4096) -> None:
        self.control = dial(runtime_dir)
        self.control.send(hello(ring_bytes=ring_bytes))
        packet, rights, _, _ = self.control.recvmsg(PACKET, socket.CMSG_SPACE(3 * 4))
        answer = ffi.from_buffer("struct claw_attached *", packet)
        assert answer.status == 0, bytes(ffi.buffer(answer.text))
        fds = array.array("i")
        fds.frombytes(rights[0][2])
        self.data_fd, self.ctl_fd, self.event_fd = fds
        self.ring_bytes = ring_bytes
        self.record_max = int(answer.record_max)
        self.data = mmap.mmap(self.data_fd, PAGE + ring_bytes)
        self.ctl = mmap.mmap(self.ctl_fd, ffi.sizeof("struct claw_ctl"), prot=mmap.PROT_READ)
        self.head = 0
        self.seq = 1

    def __enter__(self) -> Rogue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.control.close()
        self.data.close()
        self.ctl.close()
        for fd in (self.data_fd, self.ctl_fd, self.event_fd):
            os.close(fd)

    def put(self, at: int, data: bytes) -> None:
        """Bytes at a position of the ring, around its end if need be."""
        for number, byte in enumerate(data):
            self.data[PAGE + (at + number) % self.ring_bytes] = byte

    def record(
        self,
        kind: int,
        payload: bytes = b"",
        *,
        handle: int = 0,
        length: int | None = None,
        seq: int | None = None,
        flags: int = 0,
        count: int = 1,
        reserved: int = 0,
    ) -> None:
        """Write a record and move `head`, without telling."""
        size = len(payload) if length is None else length
        header = RECORD.pack(size, kind, flags, handle, self.seq if seq is None else seq, 1, count, reserved)
        self.put(self.head, header + payload)
        self.head += -(-(RECORD.size + len(payload)) // 32) * 32
        self.seq += 1

    def open(self, name: bytes, *, handle: int = 0, **lengths: int) -> None:
        values = {"name_len": len(name), "meta_len": 0, "reserved": 0, **lengths}
        self.record(OPENED, OPEN.pack(0, *values.values()) + name, handle=handle)

    def publish(self, head: int | None = None) -> None:
        """Store `head` (any number) and signal."""
        struct.pack_into("<Q", self.data, HEAD, (self.head if head is None else head) % 2**64)
        os.eventfd_write(self.event_fd, 1)

    def ack_pos(self) -> int:
        return int(ffi.from_buffer("struct claw_ctl *", self.ctl).ack_pos)

    def state(self) -> int:
        return int(ffi.from_buffer("struct claw_ctl *", self.ctl).state)

    def await_end(self) -> None:
        """clawd has closed the control connection."""
        assert self.control.recv(4096) == b""
