# SPDX-License-Identifier: Apache-2.0
"""The ZeroMQ side: connections that announce themselves, attaches, flow, and frames out. Never blocks, and does nothing
per token: the core builds the frames.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import zmq

from clawd import log, protocol
from clawd.core import Core, Label, lib
from clawd.errors import HostError, ProtocolError
from clawd.server.access import Who, may_read
from clawd.server.door import Door
from clawd.server.lanes import STRANGER_NS, Connection, Lane, Route

RETRY_NS = 2_000_000
"""A frame that met EAGAIN is tried again after this long: a ROUTER's POLLOUT says nothing about one peer."""
FAULTS_MAX = 100
"""Rules a client may break before it is dropped."""
PENDING_MAX = 16_384
"""Answers kept for a client that does not read them, before it is dropped."""
BACKLOG = 128

_FRAMES = (lib.CLAW_FRAME_DATA, lib.CLAW_FRAME_PACKED)
_EXPRESS = int(lib.CLAW_LANE_EXPRESS)
_ATTACH_CODES = {
    -errno.ENOENT: ("unknown", "no such stream is open"),
    -errno.ESTALE: ("gone", "the stream ended and is not kept any more"),
    -errno.EREMCHG: ("lost", "the stream is not the one that was read before"),
    -errno.EDQUOT: ("limit", "max_attachments, user_attachments or max_streams is reached"),
}


ROLES = {
    "consumer": lib.CLAW_ROLE_CONSUMER,
    "observer": lib.CLAW_ROLE_OBSERVER,
    "admin": lib.CLAW_ROLE_ADMIN,
}


class Client(Protocol):
    """What the relay must know of the client behind a session."""

    @property
    def who(self) -> Who: ...
    @property
    def role(self) -> str: ...
    @property
    def label(self) -> str: ...


class Far(Protocol):
    """Clients that come by tcp: see far.py."""

    keepalive_ns: int

    def close(self) -> list[threading.Thread]: ...
    def tick(self) -> None: ...
    def timeout_ns(self, longest_ns: int) -> int: ...
    def look(self) -> bool: ...
    def shut(self, lane: Lane, fd: int) -> None: ...
    def meet(self, lane: Lane, routing_id: bytes, origin: zmq.Frame) -> None: ...
    def join(self, route: Route, request: protocol.Message) -> None: ...
    def forget(self, route: Route) -> None: ...
    def dropped(self, connection: Connection) -> None: ...


class Relay:
    """The lanes and who is on them. `sessions` are those of live control connections."""

    def __init__(self, core: Core, sessions: Mapping[str, Client], per_user: int, total: int) -> None:
        """At most `per_user` connections of one user, `total` in all, of local clients."""
        self._core = core
        self._sessions = sessions
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._lane = Lane(self.context, lib.CLAW_LANE_BULK)
        self._lanes = [self._lane]
        self._door = Door(self.context, self._lane.socket, per_user, total)
        self._by_number: dict[int, Connection] = {}
        self._by_session: dict[str, Connection] = {}
        self._strangers: deque[Route] = deque()
        self._waiting: set[Route] = set()
        self._retry_ns = 0
        self.door_fd = self._door.fd
        """Likewise; tell `wake`."""
        self._is_unseen = self._door.look()
        self.far: Far | None = None
        """Clients of other hosts."""
        self.fd = self._lane.fd
        """Readable when there may be something to receive: ask `receive`, which alone knows."""

    def listen(self, path: Path) -> None:
        """Hand over a listener of our own: libzmq would steal the path of another daemon, and set no mode."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            path.unlink(missing_ok=True)  # the lock is ours: what is there was left behind
            listener.bind(os.fspath(path))
            path.chmod(0o660)
            listener.listen(BACKLOG)
            self._lane.socket.setsockopt(zmq.USE_FD, listener.fileno())
            self._door.listen(path)
            self._lane.socket.bind(f"ipc://{path}")
        except (OSError, zmq.ZMQError) as error:
            listener.close()
            raise HostError(f'cannot listen on "{path}": {error.strerror}') from error
        listener.detach()  # libzmq closes it

    def add_far(self, far: Far, lanes: list[Lane]) -> None:
        self.far = far
        self._lanes += lanes

    @property
    def connection_count(self) -> int:
        return len(self._by_number)

    def close(self) -> None:
        """Let what was sent go out, at most half a second."""
        threads = [self._door.close(), *(self.far.close() if self.far else ())]
        for lane in self._lanes:
            lane.socket.close()
        self.context.term()
        for thread in threads:
            thread.join()

    # --- out ---

    def send_frames(self) -> None:
        """Send what the last turn built, then account it."""
        out = self._core.out
        sent: list[tuple[int, int]] = []
        for index, (number, offset, length) in enumerate(self._core.frames()):
            connection = self._by_number.get(number)
            if connection is None:
                continue
            frame = out[offset : offset + length]
            route = connection.bulk
            went = False
            if connection.express is not None and self._core.lanes(index) & _EXPRESS:
                went = self._send_frame(connection.express, frame)
            if self._send_frame(route, frame) or went:
                sent.append((index, time.monotonic_ns()))
        # After all are out: the last client must not wait for the first one's figures
        for index, sent_ns in sent:
            self._core.sent_frame(index, sent_ns)

    def _send_frame(self, route: Route, frame: memoryview) -> bool:
        if route.pending or not self._send(route, frame):
            self._keep(route, bytes(frame))
            return False
        return True

    def _send(self, route: Route, message: bytes | memoryview) -> bool:
        """False: its queue is full. A client that is gone is dropped, and counts as sent to."""
        try:
            return route.send(message)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.lose(route)
        return True

    def _keep(self, route: Route, message: bytes) -> None:
        connection = route.connection
        if connection is None or connection.number not in self._by_number:
            return
        if not route.pending:
            self._core.block(connection.number, True)
        route.pending.append(message)
        self._waiting.add(route)
        self._retry_ns = self._retry_ns or time.monotonic_ns() + RETRY_NS

    def reply(self, route: Route, message: protocol.Message) -> None:
        packet = protocol.encode(message)
        if not route.pending and self._send(route, packet):
            return
        if len(route.pending) < PENDING_MAX:
            self._keep(route, packet)
        elif route.connection:
            log.warning("client does not read its answers, dropped", connection=route.connection.number)
            self.drop(route.connection)

    def _flush(self, route: Route) -> None:
        while route.pending:
            message = route.pending[0]
            if not self._send(route, message) or not route.pending:  # full, or gone and dropped
                return
            route.pending.popleft()
            if message[0] in _FRAMES and route.lane.kind != _EXPRESS:
                self._core.sent(message, time.monotonic_ns())
        self._waiting.discard(route)
        connection = route.connection
        if connection and connection.number in self._by_number:
            self._core.block(connection.number, any(each.pending for each in connection.routes()))

    def tick(self, ended_sessions: list[str]) -> None:
        """What time or other sockets made due: lost sessions, retries, attaches that waited in vain, strangers."""
        while ended_sessions:
            connection = self._by_session.get(ended_sessions.pop())
            if connection:
                self.drop(connection)
        for number, id in self._core.unmet():
            connection = self._by_number.get(number)
            if connection:
                text = "the stream did not open in time"
                self.reply(connection.bulk, protocol.Failure(code="unknown", text=text, id=id))
        if self._core.outcome.unproven:
            self._prove()
        if self.far:
            self.far.tick()
        if not self._waiting and not self._strangers:
            self._retry_ns = 0
            return
        now_ns = time.monotonic_ns()
        if self._retry_ns and now_ns >= self._retry_ns:
            for route in list(self._waiting):
                self._flush(route)
            self._retry_ns = now_ns + RETRY_NS if self._waiting else 0
        while self._strangers and now_ns - self._strangers[0].since_ns >= STRANGER_NS:
            route = self._strangers.popleft()
            if route.connection and not route.connection.session:
                self.drop(route.connection)

    def timeout_ns(self, longest_ns: int) -> int:
        """How long the loop may sleep as far as the relay is concerned."""
        if self.far:
            longest_ns = self.far.timeout_ns(longest_ns)
        if not self._retry_ns and not self._strangers:
            return longest_ns
        due = [ns for ns in (self._retry_ns, self._strangers and self._strangers[0].since_ns + STRANGER_NS) if ns]
        if not due:
            return longest_ns
        return min(longest_ns, max(0, min(due) - time.monotonic_ns()))

    # --- in ---

    def receive(self) -> bool:
        """Take what clients sent. True: there was some, so ask again before sleeping."""
        more = self._is_unseen and self._look()
        if self.far:
            more |= self.far.look()
        for lane in self._lanes:
            more |= lane.receive(self._take, self._take_bomb)
        return more

    def wake(self) -> None:
        """`door_fd` is readable."""
        self._is_unseen = True

    def _look(self) -> bool:
        """See who connected and who left. True: there may be more."""
        self._is_unseen = self._door.look()
        return self._is_unseen

    def _take_bomb(self, lane: Lane, routing_id: bytes, fd: int) -> None:
        route = lane.routes.get(routing_id)
        if self.far and lane.is_far:
            self.far.shut(lane, fd)
        else:
            self._door.shut(fd)
        if route:
            number = route.connection.number if route.connection else 0
            log.warning("client sent a message of too many frames, dropped", connection=number)
            self.lose(route)

    def _take(self, lane: Lane, routing_id: bytes, body: list[bytes], origin: zmq.Frame | None) -> None:
        route = lane.routes.get(routing_id)
        if route is None:
            # New, or one that was dropped and does not know: either way it is told to attach (again)
            if self.far and origin is not None:
                self.far.meet(lane, routing_id, origin)
            elif not lane.is_far:
                self._connect(routing_id)
            return
        if lane.is_far:
            route.heard_ns = time.monotonic_ns()
        if len(body) == 1 and body[0]:
            try:
                self._take_message(route, body[0])
            except ProtocolError as error:
                self.reply(route, protocol.Failure(code="bad_request", text=str(error)))
                self._blame(route, error)
        elif len(body) != 1:
            self._blame(route, ProtocolError(f"{len(body)} frames in a message"))

    def _blame(self, route: Route, error: ProtocolError) -> None:
        connection = route.connection
        if connection is None:  # a stranger by tcp: it has shown nothing that would speak for it
            log.warning("client broke a rule, dropped", error=error)
            self.lose(route)
            return
        connection.faults += 1
        if connection.faults == 1:
            log.warning("client broke a rule", connection=connection.number, error=error)
        elif connection.faults == FAULTS_MAX:
            log.warning("client broke rules again and again, dropped", connection=connection.number, error=error)
            self.drop(connection)

    def _take_message(self, route: Route, message: bytes) -> None:
        connection = route.connection
        if connection is None:
            if self.far and message[0] != lib.CLAW_FRAME_FLOW:  # flow: of a connection that was dropped
                self.far.join(route, protocol.decode(message, protocol.JOIN_REQUESTS))
            return
        if message[0] == lib.CLAW_FRAME_FLOW:
            flow = self._core.flow if route is connection.bulk else self._core.express_flow
            if not flow(connection.number, message):
                raise ProtocolError("flow message breaks a rule")
            if route.pending:
                self._flush(route)
            return
        request: Any = protocol.decode(message, protocol.RELAY_REQUESTS)
        if isinstance(request, protocol.Attach):
            self._attach(connection, request)
        elif isinstance(request, protocol.Cancel):
            if connection.observes:
                self._deny_cancel(connection, request.id)
            else:
                self._core.cancel(connection.number, request.id)
        elif isinstance(request, protocol.Detach):
            self._core.detach(connection.number, request.id)
        elif isinstance(request, protocol.Ping):
            self.reply(route, protocol.Pong())

    def _deny_cancel(self, connection: Connection, id: int) -> None:
        self.reply(connection.bulk, protocol.Failure(code="denied", text="an observer may not cancel", id=id))

    def _connect(self, routing_id: bytes) -> None:
        route = Route(self._lane, routing_id, time.monotonic_ns())
        connection = self.open(route)
        if connection:
            self._strangers.append(route)

    def open(self, route: Route, express: Route | None = None) -> Connection | None:
        """Give a client a connection, and tell it to attach. None: there is no room, which it is told."""
        number = self._core.connect()
        if not number:
            log.warning("client refused", limit="max_clients")
            refusal = protocol.Failure(code="limit", text="max_clients are connected; try again later")
            self._send(route, protocol.encode(refusal))
            return None
        connection = Connection(number, route.since_ns, route, express)
        keepalive_ms = 0
        if express is not None and self.far:
            self._core.open_lanes(number)
            keepalive_ms = self.far.keepalive_ns // 1_000_000
        for each in connection.routes():
            each.connection = connection
            each.lane.routes[each.routing_id] = each
        self._by_number[number] = connection
        self.reply(route, protocol.Connected(protocol.VERSION, number, keepalive_ms))
        return connection

    def name(self, connection: Connection, session: str, label: Label) -> None:
        """Whose it is. One that has this session already goes: its client came again."""
        earlier = self._by_session.get(session)
        if earlier:
            self.drop(earlier)
        connection.session = session
        connection.observes = label.role == lib.CLAW_ROLE_OBSERVER
        self._core.label_connection(connection.number, label)
        self._by_session[session] = connection

    def _attach(self, connection: Connection, request: protocol.Attach) -> None:
        is_known = connection.express is not None or request.session in self._sessions
        if not is_known or connection.session not in ("", request.session):
            # Around a restart an honest client's may be an earlier clawd's: it says hello again
            text = "this session is not known here; say hello on the control socket"
            self.reply(connection.bulk, protocol.Failure(code="session", text=text, id=request.id))
            return
        if not connection.session:
            client = self._sessions[request.session]
            connection.who = who = client.who
            self.name(connection, request.session, Label(client.label, who.pid, who.uid, ROLES[client.role]))
        cancels_later = request.on_gone == "cancel"
        if connection.observes and (request.cancel or cancels_later):
            self._deny_cancel(connection, request.id)
            return
        if request.after is not None and request.incarnation is None:
            raise ProtocolError('"attach" with "after" needs "incarnation"')
        readers = self._core.readers(request.stream.encode())
        if readers is not None and not self._is_reader(connection, readers):
            self._deny_reading(connection, request.id)
            return
        result = self._core.attach(
            connection.number,
            request.id,
            request.stream.encode(),
            after=-1 if request.after is None else request.after,
            incarnation=request.incarnation,
            credit=request.credit,
            deadline_ns=time.monotonic_ns() + request.wait_ms * 1_000_000 if request.wait_ms else 0,
            cancel=request.cancel,
            observes=connection.observes,
            grace_ms=max(1, request.grace_ms) if cancels_later else 0,
            admitted=readers is not None,
        )
        if result < 0:
            code, text = _ATTACH_CODES.get(result, ("bad_request", os.strerror(-result)))
            self.reply(connection.bulk, protocol.Failure(code=code, text=text, id=request.id))

    @staticmethod
    def _is_reader(connection: Connection, readers: str) -> bool:
        return may_read(readers, connection.who, connection.key_name)

    def _deny_reading(self, connection: Connection, id: int) -> None:
        text = "the stream is not for this client: its producer named its readers"
        self.reply(connection.bulk, protocol.Failure(code="denied", text=text, id=id))

    def _prove(self) -> None:
        """Who attached before a stream opened that is not for everybody."""
        for number, id, readers in self._core.unproven():
            connection = self._by_number[number]
            allowed = self._is_reader(connection, readers)
            self._core.admit(number, id, allowed)
            if not allowed:
                self._deny_reading(connection, id)

    def lose(self, route: Route) -> None:
        """This way to a client is gone."""
        if route.connection:
            self.drop(route.connection)
        route.lane.routes.pop(route.routing_id, None)
        if self.far and route.lane.is_far:
            self.far.forget(route)

    def drop(self, connection: Connection) -> None:
        """Forget a connection. If it lives after all, its next message is answered as a newcomer's."""
        if self._by_number.pop(connection.number, None) is None:
            return
        if self._by_session.get(connection.session) is connection:
            del self._by_session[connection.session]
        for route in connection.routes():
            self._waiting.discard(route)
            route.pending.clear()
            route.connection = None
            if not route.lane.is_far:
                route.lane.routes.pop(route.routing_id, None)
        self._core.disconnect(connection.number)
        if self.far and connection.express is not None:
            self.far.dropped(connection)
