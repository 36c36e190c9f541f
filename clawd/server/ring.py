# SPDX-License-Identifier: Apache-2.0
"""One producer's ring on the daemon's side: made, handed over by descriptors, let go."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from dataclasses import dataclass, field

from clawd.core import Core, ffi, lib
from clawd.errors import AttachRefused, ClawdError, CoreError, HostError, ProtocolError
from clawd.server import memory
from clawd.server.instance import Instance

_STATUS = {
    "layout": lib.CLAW_ATTACH_LAYOUT,
    "denied": lib.CLAW_ATTACH_DENIED,
    "limit": lib.CLAW_ATTACH_LIMIT,
    "no_space": lib.CLAW_ATTACH_NO_SPACE,
    "bad_request": lib.CLAW_ATTACH_BAD_REQUEST,
    "stopping": lib.CLAW_ATTACH_STOPPING,
    "lost": lib.CLAW_ATTACH_LOST,
}

VIOLATION = {
    lib.CLAW_BAD_HEAD: "head",
    lib.CLAW_BAD_LEN: "len",
    lib.CLAW_BAD_SEQ: "seq",
    lib.CLAW_BAD_KIND: "kind",
    lib.CLAW_BAD_FLAGS: "flags",
    lib.CLAW_BAD_HANDLE: "handle",
    lib.CLAW_BAD_OPEN: "open",
    lib.CLAW_BAD_CLOSE: "close",
    lib.CLAW_BAD_COUNT: "count",
    lib.CLAW_BAD_MEMORY: "memory",
}
"""What a quarantined producer did wrong, by CLAW_BAD_ number."""


def refuse(code: str, text: str) -> AttachRefused:
    return AttachRefused(text, code)


@dataclass(frozen=True)
class ProducerHello:
    ring_bytes: int
    ring_id: int
    name: str


def is_hello(packet: bytes) -> bool:
    """A producer's struct, told from JSON by its first word."""
    return packet[:4] == int(lib.CLAW_MAGIC).to_bytes(4, "little")


def read_hello(packet: bytes) -> ProducerHello:
    """Check a producer's hello. Raises AttachRefused, or ProtocolError for what no layout sends."""
    if len(packet) < 20:
        raise ProtocolError("hello is cut off")
    hello = ffi.new("struct claw_hello *")
    size = ffi.sizeof("struct claw_hello")
    ffi.memmove(hello, packet[:size], min(len(packet), size))
    if hello.layout != lib.CLAW_LAYOUT or hello.incompatible:
        raise refuse("layout", f"layout {hello.layout} is not served here, layout {lib.CLAW_LAYOUT} is")
    if hello.size != size or len(packet) != size or hello.reserved:
        raise refuse("bad_request", "hello has another size than its layout")
    low, high = lib.CLAW_RING_BYTES_MIN, lib.CLAW_RING_BYTES_MAX
    if hello.ring_bytes and (not low <= hello.ring_bytes <= high or hello.ring_bytes & (hello.ring_bytes - 1)):
        raise refuse("bad_request", f"a ring has a power of two bytes from {low} to {high}")
    label = bytes(ffi.buffer(hello.name)).split(b"\0", 1)[0].decode(errors="replace")
    return ProducerHello(int(hello.ring_bytes), int(hello.ring_id), label)


def answer(error: ClawdError) -> bytes:
    """The struct that tells a producer why not."""
    code = error.code if isinstance(error, AttachRefused) else "no_space" if _is_space(error) else "bad_request"
    return _attached(status=_STATUS[code], text=str(error).encode()[: lib.CLAW_ATTACHED_TEXT - 1])


def _is_space(error: ClawdError) -> bool:
    return isinstance(error, HostError | CoreError)


def _attached(**values: object) -> bytes:
    attached = ffi.new("struct claw_attached *", values)
    attached.magic = lib.CLAW_MAGIC
    attached.layout = lib.CLAW_LAYOUT
    attached.size = ffi.sizeof("struct claw_attached")
    return bytes(ffi.buffer(attached))


@dataclass(frozen=True)
class Owner:
    """Whose ring it is. The label is what the producer says of itself."""

    label: str
    pid: int
    uid: int


@dataclass
class Ring:
    """What clawd keeps of a ring besides the core's mapping: its names, and its descriptors until handed over."""

    index: int
    ring_bytes: int
    ring_id: int
    epoch: int
    data: memory.Object
    ctl: memory.Object
    owner: Owner
    fds: tuple[int, ...] = field(default=())

    def hand_over(self, connection: socket.socket) -> None:
        """Send a new ring's DATA (read-write, locked), CTL (read-only) and eventfd, or the eventfd alone of one that is
        attached again; then close ours. Raises OSError.
        """
        packet = _attached(
            status=lib.CLAW_ATTACH_OK,
            ring_bytes=self.ring_bytes,
            ring_id=self.ring_id,
            daemon_epoch=self.epoch,
            record_max=min(self.ring_bytes // 4, lib.CLAW_RECORD_MAX),
        )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self.fds))]
        try:
            connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
        finally:
            self._close_fds()

    def _close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def hear(self, core: Core) -> None:
        """A new eventfd for a ring that is attached again. Raises HostError or CoreError."""
        try:
            self.fds = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),)
        except OSError as error:
            raise HostError(f"cannot attach a ring again: {error.strerror}") from error
        core.hear_ring(self.index, self.fds[0])

    def settled(self, core: Core) -> str:
        """Why the ring can be dropped, empty when it cannot."""
        row = core.ring_row(self.index)
        if row.state == lib.CLAW_RING_BROKEN:
            return f"quarantined:{VIOLATION.get(row.violation, row.violation)}"
        return "left" if row.state == lib.CLAW_RING_DONE else ""

    def drop(self, core: Core) -> None:
        """Unmap the ring and take its names away."""
        core.drop_ring(self.index)
        self._close_fds()
        for made in (self.data, self.ctl):
            made.close()
            made.unlink()


def make_ring(core: Core, instance: Instance, epoch: int, ring_bytes: int, owner: Owner) -> Ring:
    """Allocate DATA and CTL and map them into the core. Raises HostError or CoreError with nothing left behind."""
    pair = f"/{memory.prefix(instance.id)}{os.urandom(8).hex()}"
    made: list[memory.Object] = []
    fds: list[int] = []
    try:
        made.append(memory.create(f"{pair}-data", lib.CLAW_PAGE + ring_bytes))
        made.append(memory.create(f"{pair}-ctl", ffi.sizeof("struct claw_ctl")))
        data, ctl = made
        # The producer gets a description of its own, locked: its mapping alone keeps the lock, and the kernel drops it
        # when the process ends. So a clawd that starts later knows who still lives.
        fds.append(data.reopen())
        fcntl.flock(fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        fds.append(ctl.reopen(read_only=True))
        fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        ring_id = memory.random_id()
        _sign(ctl.fd, instance.boot_id, owner)
        index = core.add_ring(data.fd, ctl.fd, fds[2], ring_bytes, ring_id, epoch)
    except OSError as error:
        _undo(made, fds)
        raise HostError(f"cannot make a ring: {error.strerror}") from error
    except ClawdError:
        _undo(made, fds)
        raise
    for each in made:
        each.close()
    return Ring(index, ring_bytes, ring_id, epoch, data, ctl, owner, tuple(fds))


def _undo(made: list[memory.Object], fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    for each in made:
        each.close()
        each.unlink()


def _sign(ctl_fd: int, boot_id: bytes, owner: Owner) -> None:
    """Whose ring it is, for a clawd that takes it over."""
    ctl = ffi.new("struct claw_ctl *")
    ctl.boot_id = boot_id.ljust(16, b"\0")
    ctl.producer_uid = owner.uid
    ctl.producer_pid = max(owner.pid, 0)
    ctl.producer_name = owner.label.encode()[: lib.CLAW_PRODUCER_NAME - 1]
    os.pwrite(ctl_fd, ffi.buffer(ctl, lib.CLAW_PAGE), 0)
