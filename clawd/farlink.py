# SPDX-License-Identifier: Apache-2.0
"""A client's link to a clawd on another host: two tcp lanes instead of a socket file. Bulk brings every frame in order;
express brings copies of some, which may be earlier. The first copy of a frame is taken, and what came too early for its
stream is held until the rest is there.
"""

from __future__ import annotations

import os
import secrets
import select
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clawd import protocol
from clawd.core import ffi, lib
from clawd.errors import AttachError, ClawdError, ControlError, HostError
from clawd.inbox import KIND_AT, Inbox, Page
from clawd.keys import read_pair, read_public
from clawd.link import ACK_AT, BURST, CHARGE, EVENTS, FLOW, MESSAGE_MAX, NOBLOCK, POLLIN, Link, zmq
from clawd.session import Watcher, program

__all__ = ["Door", "FarLink"]

SCHEME = "tcp://"
HELD_MAX = 256
"""Segments of express frames that wait for what comes before them; beyond, bulk brings them in its time."""
_HEARTBEAT_MS = 5_000  # a clawd or a way to it that is dead is noticed after two of them, and dialled again
_DIAL_MS = 5_000
_REDIAL_S = 1.0  # after a refusal: the key may be known by then
_HEAD = struct.Struct("<BBHIIBBH")  # struct claw_frame_header
_CONNECTION_AT = 4
_NUMBER_AT = 14
_EVENT = struct.Struct("=HI")
_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_FAILURES = _FAILED | _BROKEN_OFF | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

if (
    _HEAD.size != ffi.sizeof("struct claw_frame_header")
    or ffi.offsetof("struct claw_frame_header", "number") != _NUMBER_AT
):
    raise ImportError("struct claw_frame_header is not what farlink.py reads; build the core again")


@dataclass(frozen=True)
class Door:
    """One clawd to read from: `tcp://HOST:PORT`, and for CURVE this client's key file and that clawd's public key."""

    endpoint: str
    key: str | os.PathLike[str] | None = None
    server_key: str | os.PathLike[str] | None = None

    def ports(self) -> tuple[str, str]:
        """Endpoints of the bulk and of the express lane. Raises ControlError."""
        host, colon, port = self.endpoint.removeprefix(SCHEME).rpartition(":")
        if not (self.endpoint.startswith(SCHEME) and colon and host and port.isdigit() and 0 < int(port) < 65_535):
            raise ControlError(f'"{self.endpoint}" is no endpoint', "write tcp://HOST:PORT")
        return self.endpoint, f"{SCHEME}{host}:{int(port) + 1}"

    def lock(self, lane: zmq.Socket[bytes]) -> None:
        """Set the keys, if there are any. Raises ControlError."""
        if self.key is None and self.server_key is None:
            return
        if self.key is None or self.server_key is None:
            raise ControlError("a key and the server's key go together", "give both: key= and server_key=")
        try:
            pair, server = read_pair(Path(self.key)), read_public(self.server_key)
        except HostError as error:
            raise ControlError(error.message, error.hint) from error
        lane.curve_publickey, lane.curve_secretkey = pair.public.encode(), pair.secret.encode()
        lane.curve_serverkey = server.encode()


class _FarSession:
    """Stands for the control connection: a name of the client's own, and pings in its place."""

    def __init__(self, ping: Callable[[], None]) -> None:
        self.name: str | None = secrets.token_hex(16)
        self.refusal = ""
        self.retry_at: float | None = None
        self.every_s = 0.0
        self._ping = ping

    def retry(self) -> None:
        self._ping()
        self.retry_at = time.monotonic() + self.every_s if self.every_s else None

    def pump(self) -> bool:
        return False

    def renew(self) -> None:
        """It is the client's own, and stays."""

    def watch(self, watcher: Watcher) -> None:
        """There is no descriptor."""

    def close(self) -> None:
        self.retry_at = None

    def disown(self) -> None:
        """The descriptors are ZeroMQ's: clawd finds the parent's death by its silence."""


class FarLink(Link):
    """Connect to the clawd behind `door`. Returns at once: who cannot be reached shows when a reading waits in vain."""

    def __init__(self, door: Door, role: str = "consumer") -> None:
        self.place = door.endpoint
        self._role = role
        self._far = _FarSession(self._ping)
        self._prepare(self._far)
        self.duplicates = 0
        """Frames that came twice."""
        self._ahead: set[int] = set()
        """Numbers of frames that express brought before bulk."""
        self._held: dict[int, list[tuple[Page, int, int]]] = {}
        """By reading, in order: pages that came before what precedes them, their incarnation and end."""
        self._held_count = 0
        self._bulk_number = 0
        self._express_acked = self._express_acked_sent = 0
        self._on_express = False
        self._monitors: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes], str]] = []
        """What tells of a lane's handshakes, the lane, and its endpoint."""
        self._refused_lanes: dict[zmq.Socket[bytes], str] = {}
        bulk, express = door.ports()
        self._open(lambda: self._dial(door, bulk))
        try:
            self._express = self._dial(door, express)
        except BaseException:
            self.close()
            raise

    def _dial(self, door: Door, endpoint: str) -> zmq.Socket[bytes]:
        lane = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.PROBE_ROUTER, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # as for a local link
            (zmq.RCVHWM, 2 * int(lib.CLAW_LANE_BEHIND) * int(lib.CLAW_WINDOW) // CHARGE),
            (zmq.MAXMSGSIZE, MESSAGE_MAX),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1_000),
            (zmq.CONNECT_TIMEOUT, _DIAL_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_MS),
            (zmq.IPV6, 1),
        ):
            lane.setsockopt(option, value)
        try:
            door.lock(lane)
            lane.monitor(f"inproc://{endpoint}", _FAILURES)  # before the first handshake
            monitor = self._context.socket(zmq.PAIR)
            self._monitors.append((monitor, lane, endpoint))
            monitor.connect(f"inproc://{endpoint}")
            lane.connect(endpoint)
        except zmq.ZMQError as error:
            lane.close()
            raise ControlError(f'cannot use "{endpoint}": {error}', "write tcp://HOST:PORT") from error
        except ClawdError:
            lane.close()
            raise
        return lane

    # ---- descriptors

    def _others(self) -> list[int]:
        return [int(each.getsockopt(zmq.FD)) for each in (self._express, *(row[0] for row in self._monitors))]

    def watch(self, watcher: Watcher) -> None:
        super().watch(watcher)
        for fd in self._others():
            watcher.register(fd, select.EPOLLIN)

    def unwatch(self, watcher: Watcher) -> None:
        super().unwatch(watcher)
        for fd in self._others():
            watcher.unregister(fd)

    # ---- in

    def _events(self) -> int:
        return int(self._express.getsockopt(EVENTS))

    def pump(
        self, *, control: bool = True, relay: bool = False, until: Inbox | None = None, burst: int = BURST
    ) -> bool:
        arrived = self._pump_express(burst)
        arrived |= super().pump(control=control, relay=relay, until=until, burst=burst)
        if not self._is_closed() and self._events() & POLLIN:
            self.is_idle = False
        return arrived

    def _is_closed(self) -> bool:
        return self._context.closed

    def _pump_express(self, burst: int) -> bool:
        self._on_express = True
        try:
            for count in range(burst):
                if not self._events() & POLLIN:
                    return count > 0
                try:
                    frame = self._express.recv(NOBLOCK)
                except zmq.Again:
                    return count > 0
                if frame and frame[0] in (lib.CLAW_FRAME_DATA, lib.CLAW_FRAME_PACKED):
                    self._take(frame)
                elif frame:
                    self._answer(frame)
            return True
        finally:
            self._on_express = False

    def _pump_control(self, *, connected: bool = False) -> None:
        super()._pump_control(connected=connected)
        for monitor, lane, endpoint in self._monitors:
            while not self._is_closed():
                try:
                    event, _ = _EVENT.unpack(monitor.recv(NOBLOCK))
                    monitor.recv(NOBLOCK)
                except zmq.Again:
                    break
                self._fail_handshake(event, lane, endpoint)

    def _fail_handshake(self, event: int, lane: zmq.Socket[bytes], endpoint: str) -> None:
        if event != _BROKEN_OFF:  # libzmq does not dial again after the others
            self._refused_lanes[lane] = endpoint
            self._far.retry_at = time.monotonic() + _REDIAL_S
        if event != _FAILED:
            self._far.refusal = "the handshake failed: is server_key the key of that clawd, and needs it one?"
            return
        self._far.refusal = "it does not know this key"
        self._fail_all(AttachError(f"clawd at {self.place} does not know this key (denied)", "denied"))

    def _take(self, frame: bytes) -> None:
        if len(frame) >= _HEAD.size:
            head = _HEAD.unpack_from(frame)
            if head[3] != self._connection:
                if self._on_express:
                    return  # of an earlier connection: bulk brought it, or clawd sends it again
            elif not self._is_first(head[7], len(frame) + CHARGE):
                return
        super()._take(frame)
        if self._held:
            self._release()

    def _is_first(self, number: int, charge: int) -> bool:
        """Whether this frame of the current connection is to be taken. One that is not is acked here."""
        if self._on_express:
            # 16 bits that wrap: the lanes are never so far apart that half of them would not tell which is first
            came = (self._bulk_number - number) & 0xFFFF < 0x8000
            if not came and self._held_count < HELD_MAX:
                self._ahead.add(number)
                return True
            self.duplicates += came
            self._ack(charge)
            return False
        self._bulk_number = number
        if number in self._ahead:
            self._ahead.discard(number)
            self.duplicates += 1
            self._ack(charge)
            return False
        return True

    def _ack(self, charge: int) -> None:
        if not self._on_express:
            super()._ack(charge)
            return
        self._express_acked += charge
        if self._express_acked - self._express_acked_sent >= ACK_AT:
            self._send_flow()

    def _accept(self, inbox: Inbox, page: Page, incarnation: int, end_seq: int, current: bool) -> None:
        if self._on_express and self._is_early(inbox, page):
            self._held.setdefault(inbox.id, []).append((page, incarnation, end_seq))
            self._held_count += 1
        else:
            super()._accept(inbox, page, incarnation, end_seq, current)

    @staticmethod
    def _is_early(inbox: Inbox, page: Page) -> bool:
        """Whether something is missing before it: tokens, or what the producer gave at open."""
        return page[1] > inbox.expected or (inbox.incarnation is None and page[0][KIND_AT] != lib.CLAW_OPEN)

    def _release(self) -> None:
        """Hand over what was held for tokens that are here now."""
        for id, pages in list(self._held.items()):
            while pages:
                inbox = self._inboxes.get(id)
                page, incarnation, end_seq = pages[0]
                if inbox is not None and self._is_early(inbox, page):
                    break
                pages.pop(0)
                self._held_count -= 1
                if inbox is not None:
                    super()._accept(inbox, page, incarnation, end_seq, True)
            if not pages:
                del self._held[id]

    def _connected(self, message: protocol.Connected) -> None:
        self._ahead.clear()
        self._held.clear()
        self._held_count = self._bulk_number = 0
        self._express_acked = self._express_acked_sent = 0
        if message.connection == 0:  # one lane is there, perhaps again: no connection until both have joined
            self._connection = None
            join = protocol.Join(protocol.VERSION, self._role, str(self._far.name), program())
            self._send_on(self._express if self._on_express else self._relay, protocol.encode(join))
            return
        self._far.refusal = ""
        self._far.every_s = message.keepalive_ms / 2000
        self._far.retry()
        super()._connected(message)

    # ---- out

    def _send_on(self, lane: zmq.Socket[bytes], message: bytes) -> None:
        self.is_idle = False
        try:
            lane.send(message, NOBLOCK)
        except zmq.Again:
            return

    def _ping(self) -> None:
        while self._refused_lanes:
            lane, endpoint = self._refused_lanes.popitem()
            lane.disconnect(endpoint)
            lane.connect(endpoint)
        ping = protocol.encode(protocol.Ping())
        self._send_on(self._relay, ping)
        self._send_on(self._express, ping)

    def _send_flow(self) -> None:
        super()._send_flow()
        if self._connection is not None and self._express_acked > self._express_acked_sent:
            self._express_acked_sent = self._express_acked
            head = (lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, 0, self._connection, self._express_acked)
            self._send_on(self._express, FLOW.pack(*head))
