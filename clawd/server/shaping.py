# SPDX-License-Identifier: Apache-2.0
"""clawd's end of the shaper: names its lanes to clawd-kernel, reads the rows of its sockets from the map that it is
handed, and writes what pacing it wants for each. Waits for nobody: without clawd-kernel there are no rows.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawd import log, protocol
from clawd.core import Core, lib
from clawd.errors import CoreError, ProtocolError

TRANSMIT_PER_S = 45
"""Tokens a second that a stream is sent at, at least."""
MARGIN = 4
"""A stream that catches up, and frames' own bytes, need more than the mean."""
PACING_LEAST = 256 * 1024
"""Bytes a second: what a resume of a long answer needs, whatever its stream's pace."""
LOWAT_BYTES = 16_384
"""Unsent bytes the kernel takes of a connection: one frame. What is still ours can be overtaken."""
PRIORITY = 6
"""Of express lanes: the first band of fq and of pfifo_fast."""
_NEEDED = {  # of a row, its bytes, and what the core calls it
    "cookie": (8, "cookie"),
    "updated_ns": (8, "updated_ns"),
    "srtt_us": (4, "rtt_us"),
    "jitter_us": (4, "jitter_us"),
    "segments": (4, "segments"),
    "retrans": (4, "again"),
}


def wanted_pacing(streams: int, token_bytes: int) -> int:
    """Bytes a second for a connection that reads so many streams, a token of each of which takes these bytes all
    together; 0, no limit, for none.
    """
    return max(PACING_LEAST, TRANSMIT_PER_S * token_bytes * MARGIN) if streams else 0


def lanes(ports: Iterable[tuple[int, str]], dscp: int = 0, congestion: str = "") -> list[protocol.SetLane]:
    """What clawd asks for its tcp lanes, each a port and its name. `dscp` is the express lanes'."""
    return [
        protocol.SetLane(
            port,
            name,
            lowat=LOWAT_BYTES,
            priority=PRIORITY if name == "express" else 0,
            dscp=dscp if name == "express" else 0,
            thin=name == "express",
            congestion=congestion,
        )
        for port, name in ports
    ]


class Rows:
    """The two arrays. Raises ProtocolError when they are not laid out as this clawd needs them."""

    def __init__(self, told: protocol.SocketRows, fds: Sequence[int]) -> None:
        row, want = ({name: (at, size) for name, at, size in layout} for layout in (told.row, told.want))
        missing = [name for name, (size, _) in _NEEDED.items() if row.get(name, (0, 0))[1] != size]
        missing += [name for name in ("cookie", "pacing") if name not in want]
        if missing or told.entries & (told.entries - 1) or len(fds) != 2:
            raise ProtocolError(f"clawd-kernel's rows are of another layout: no {', '.join(missing) or 'arrays'}")
        if any(at < 0 or at + size > told.row_bytes for at, size in row.values()):
            raise ProtocolError("clawd-kernel's rows are of another layout: a number lies outside of its row")
        if any(at < 0 or at + size > told.want_bytes for at, size in want.values()):
            raise ProtocolError("clawd-kernel's rows are of another layout: a number lies outside of its row")
        self._entries, self._row_bytes, self._want_bytes = told.entries, told.row_bytes, told.want_bytes
        self._row, self._want = row, want
        self.layout = {"entries": told.entries, "row_bytes": told.row_bytes}
        """As the core takes it."""
        self.layout |= {theirs: row[ours][0] for ours, (_, theirs) in _NEEDED.items()}
        self._rows = mmap.mmap(fds[0], _pages(told.entries * told.row_bytes), prot=mmap.PROT_READ)
        self._wants = mmap.mmap(fds[1], _pages(told.entries * told.want_bytes))

    def close(self) -> None:
        self._rows.close()
        self._wants.close()

    def _number(self, slot: int, name: str) -> int:
        at, size = self._row[name]
        start = slot * self._row_bytes + at
        return int.from_bytes(self._rows[start : start + size], "little")

    def find(self, cookie: int) -> dict[str, int] | None:
        """The row of a socket, with its `slot`; None: it has none."""
        if not cookie:
            return None  # that of free slots
        for probe in range(lib.CLAW_WAY_PROBES):
            slot = (cookie + probe) & (self._entries - 1)
            if self._number(slot, "cookie") == cookie:
                found = {name: self._number(slot, name) for name in self._row}
                # It may have ended, and the slot be another's, while we read
                return {**found, "slot": slot} if self._number(slot, "cookie") == cookie else None
        return None

    def want(self, slot: int, cookie: int, pacing: int) -> None:
        """Have the kernel pace that socket from its next round trip on."""
        for name, value in (("cookie", 0), ("pacing", pacing), ("cookie", cookie)):  # never one's rate, another's name
            at, size = self._want[name]
            start = slot * self._want_bytes + at
            self._wants[start : start + size] = value.to_bytes(size, "little")


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass
class Paced:
    """A socket, where it has a row."""

    shaping: Shaping
    cookie: int
    free: Callable[[], None]
    """Lifts its limit, as far as clawd itself may."""
    is_limited: bool = False
    """By what was wanted here."""

    def pace(self, streams: int, token_bytes: int) -> None:
        """What its connection needs for so many streams, whose tokens take so many bytes, one of each together."""
        rows = self.shaping.rows
        row = rows.find(self.cookie) if rows else None
        pacing = wanted_pacing(streams, token_bytes)
        if rows and row:
            if row.get("pacing") != pacing:
                rows.want(row["slot"], self.cookie, pacing)
            self.is_limited = pacing > 0
        elif self.is_limited:
            # Nobody adapts what the kernel has of it any more, and more streams may come
            self.free()
            self.is_limited = False


class Shaping:
    """Call `poll` once a second. The core reads the rows itself, too."""

    def __init__(self, core: Core, lanes: Sequence[protocol.SetLane], directory: Path | None = None) -> None:
        self._core = core
        place = directory or Path(os.environ.get("CLAWD_KERNEL_DIR", protocol.KERNEL_DIR))
        self._path = place / protocol.KERNEL_SOCKET
        self._lanes = lanes
        self._socket: socket.socket | None = None
        self._is_waiting = False
        self.rows: Rows | None = None
        self.reason = "clawd-kernel was not asked yet"
        """Why there are no rows."""

    def ask(self, lanes: Sequence[protocol.SetLane]) -> None:
        """Other policies for the same lanes, for those who connect from now on."""
        if lanes == self._lanes:
            return
        self._lanes = lanes
        if self._socket is not None:
            try:
                self._name_lanes(self._socket)
            except OSError as error:
                self._lose(str(error.strerror))  # and the next poll begins anew

    def poll(self) -> None:
        """Go on with what clawd-kernel was asked, as far as that takes no waiting."""
        if not self._lanes:
            self.reason = "there is no tcp lane"
            return
        try:
            if self._socket is None:
                self._dial()
            self._take()
            if self.rows is None and not self._is_waiting:
                self._ask(protocol.Rows())
        except FileNotFoundError:
            self._lose("clawd-kernel is not running")
        except (OSError, ProtocolError) as error:
            self._lose(getattr(error, "strerror", None) or str(error))

    def close(self) -> None:
        self._lose("clawd stops")

    def _dial(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket = made
        made.connect(os.fspath(self._path))
        self._name_lanes(made)
        self._is_waiting = False

    def _name_lanes(self, helper: socket.socket) -> None:
        for lane in self._lanes:
            helper.send(protocol.encode(lane))

    def _ask(self, request: protocol.Message) -> None:
        assert self._socket
        self._socket.send(protocol.encode(request))
        self._is_waiting = True

    def _take(self) -> None:
        assert self._socket
        while True:
            try:
                packet, ancillary, _flags, _address = self._socket.recvmsg(protocol.ANSWER_MAX, socket.CMSG_SPACE(8))
            except BlockingIOError:
                return  # the next poll is soon enough
            if not packet:
                raise ProtocolError("clawd-kernel ended")
            fds = array.array("i")
            for _level, _kind, data in ancillary:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            try:
                self._hear(packet, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _hear(self, packet: bytes, fds: Sequence[int]) -> None:
        kinds = (protocol.Shaping, protocol.SocketRows, protocol.Failure)
        answer: protocol.Message = protocol.decode(packet, kinds, protocol.ANSWER_MAX)
        if isinstance(answer, protocol.Failure):
            raise ProtocolError(answer.text)
        if isinstance(answer, protocol.Shaping):
            self.reason = answer.reason or ("" if self.rows else "clawd-kernel has not told its rows yet")
            return
        assert isinstance(answer, protocol.SocketRows)
        self._is_waiting = False
        if answer.entries:
            rows = Rows(answer, fds)
            try:
                self._core.map_rows(fds[0], rows.layout)
            except CoreError as error:
                rows.close()
                raise ProtocolError(f"clawd-kernel's rows are of another layout: {error}") from error
            self.rows = rows
            self.reason = ""
            log.event("sockets shaped", lanes=len(self._lanes), rows=answer.entries)
        else:
            self._ask(protocol.Shape())  # to know why
            self._is_waiting = False

    def _lose(self, reason: str) -> None:
        if self.rows is not None:
            self._core.unmap_rows()
            self.rows.close()
            self.rows = None
            log.event("sockets not shaped any more", reason=reason)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.reason = reason
