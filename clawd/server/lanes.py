# SPDX-License-Identifier: Apache-2.0
"""One ROUTER and the clients' routes on it. Never blocks, and bounds what a message may be before it is looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from clawd.core import lib
from clawd.server.access import Who

SEND_HWM = int(lib.CLAW_WINDOW) // int(lib.CLAW_FRAME_CHARGE) * int(lib.CLAW_LANE_BEHIND)
"""Messages ZeroMQ queues a connection: above what its windows let through, so that EAGAIN stays the exception."""
MESSAGE_MAX = 16 + 65_535 * 16
"""Bytes of a message from a client: the longest flow message."""
STRANGER_NS = 10_000_000_000
"""How long a connection may stay without an attach that names its session, and without ZeroMQ's greeting."""
RECEIVE_MAX = 256
"""Messages taken a turn, and a message's frames dropped a turn."""
PARTS_MAX = 8
"""Frames of a message that are looked at: what has more is dropped as it comes, and its sender with it."""

# Plain ints: an enum's | and & cost more than a send
_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_LAST = int(zmq.DONTWAIT)
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)


class Guard(Protocol):
    """Who may connect: see door.py."""

    fd: int

    def look(self) -> bool: ...
    def shut(self, fd: int) -> None: ...


@dataclass(eq=False)
class Connection:
    """One client, by the routes to it: `bulk` alone, or with an `express` beside it."""

    number: int
    since_ns: int
    bulk: Route
    express: Route | None = None
    session: str = ""
    who: Who | None = None
    """Of this host."""
    key_name: str = ""
    """By tcp: of the key it came with."""
    observes: bool = False
    """Reads and leaves no trace: it may not cancel."""
    faults: int = 0
    """Rules it broke: the first is logged, FAULTS_MAX end it."""

    def routes(self) -> tuple[Route, ...]:
        return (self.bulk,) if self.express is None else (self.bulk, self.express)


@dataclass(eq=False)
class Route:
    """The way to a client on one lane, by the routing id ZeroMQ gave it."""

    lane: Lane
    routing_id: bytes
    since_ns: int
    connection: Connection | None = None
    pending: deque[bytes] = field(default_factory=deque)
    """What met EAGAIN, in order. Frames are bounded by the window, replies by PENDING_MAX."""
    fd: int = -1
    """Of its tcp connection, which is libzmq's."""
    key: str = ""
    """By which it was let in, empty where none is needed."""
    session: str = ""
    """Which it joined, before it has a connection."""
    heard_ns: int = 0

    def send(self, message: bytes | memoryview) -> bool:
        """False: its queue is full. Raises ZMQError with EHOSTUNREACH when it is gone."""
        send = self.lane.send_part
        try:
            send(self.routing_id, _MORE)
            send(message, _LAST)
        except zmq.Again:
            return False
        return True


class Lane:
    """A ROUTER, `kind` CLAW_LANE_BULK or CLAW_LANE_EXPRESS; local clients have one lane only, which is bulk."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, *, is_far: bool = False) -> None:
        self.kind = kind
        self.is_far = is_far
        """Its clients come by tcp."""
        self.routes: dict[bytes, Route] = {}
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, SEND_HWM),
            (zmq.MAXMSGSIZE, MESSAGE_MAX),
            (zmq.LINGER, 500),
            (zmq.HANDSHAKE_IVL, STRANGER_NS // 1_000_000),
        ):
            self.socket.setsockopt(option, value)
        self._get_option = self.socket.getsockopt
        # pyzmq's own, below its wrapper for options that are not used here
        self.send_part = super(zmq.Socket, self.socket).send
        self._dropping = False  # within a message of too many frames
        self.fd = int(self.socket.getsockopt(zmq.FD))
        """Readable when there may be something to receive: ask `receive`, which alone knows."""

    def receive(
        self,
        take: Callable[[Lane, bytes, list[bytes], zmq.Frame | None], None],
        take_bomb: Callable[[Lane, bytes, int], None],
    ) -> bool:
        """Hand over what clients sent, at most RECEIVE_MAX messages. True: there was some, so ask again.

        `take` gets a message's first part as ZeroMQ has it when a stranger sent it by tcp. `take_bomb` gets the
        descriptor of who sent more frames than any message of ours has: libzmq has them all in memory.
        """
        if self._dropping and not self._drop_parts():
            return True
        recv, get_option = self.socket.recv, self._get_option
        for count in range(RECEIVE_MAX):
            if not int(get_option(_EVENTS)) & _POLLIN:
                return count > 0
            try:
                routing_id = recv(_LAST)
            except zmq.Again:
                return count > 0
            body: list[bytes] = []
            origin: zmq.Frame | None = None
            while get_option(zmq.RCVMORE):
                if len(body) == PARTS_MAX:
                    self._dropping = True
                    take_bomb(self, routing_id, int(recv(_LAST, copy=False).get(zmq.SRCFD)))
                    return True
                if self.is_far and not body and routing_id not in self.routes:
                    origin = recv(_LAST, copy=False)
                    body.append(origin.bytes)
                else:
                    body.append(recv(_LAST))
            take(self, routing_id, body, origin)
        return True

    def _drop_parts(self) -> bool:
        """True: the rest of that message is gone."""
        for _ in range(RECEIVE_MAX):
            if not self._get_option(zmq.RCVMORE):
                self._dropping = False
                return True
            self.socket.recv(_LAST)
        return False
