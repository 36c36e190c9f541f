# SPDX-License-Identifier: Apache-2.0
"""The ZeroMQ side: connections that announce themselves, attaches, flow, and frames out. Never blocks, and does nothing
per token: the core builds the frames.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import zmq

from clawd import log, protocol
from clawd.core import Core, Label, lib
from clawd.errors import HostError, ProtocolError
from clawd.server.door import Door

SEND_HWM = lib.CLAW_WINDOW // lib.CLAW_FRAME_CHARGE * 4
"""Messages ZeroMQ queues a connection: above what its window lets through, so that EAGAIN stays the exception."""
MESSAGE_MAX = 16 + 65_535 * 16
"""Bytes of a message from a client: the longest flow message."""
RETRY_NS = 2_000_000
"""A frame that met EAGAIN is tried again after this long: a ROUTER's POLLOUT says nothing about one peer."""
FAULTS_MAX = 100
"""Rules a client may break before it is dropped."""
PENDING_MAX = 16_384
"""Answers kept for a client that does not read them, before it is dropped."""
STRANGER_NS = 10_000_000_000
"""How long a connection may stay without an attach that names its session, and without ZeroMQ's greeting."""
RECEIVE_MAX = 256
"""Messages taken a turn, and a message's frames dropped a turn."""
PARTS_MAX = 8
"""Frames of a message that are looked at: what has more is dropped as it comes, and its sender with it."""
BACKLOG = 128

# Plain ints: an enum's | and & cost more than a send
_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_LAST = int(zmq.DONTWAIT)
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)

_FRAMES = (lib.CLAW_FRAME_DATA, lib.CLAW_FRAME_PACKED)
_ATTACH_CODES = {
    -errno.ENOENT: ("unknown", "no such stream is open"),
    -errno.ESTALE: ("gone", "the stream ended and is not kept any more"),
    -errno.EREMCHG: ("lost", "the stream is not the one that was read before"),
    -errno.EDQUOT: ("limit", "max_attachments, user_attachments or max_streams is reached"),
}


_ROLES = {
    "consumer": lib.CLAW_ROLE_CONSUMER,
    "observer": lib.CLAW_ROLE_OBSERVER,
    "admin": lib.CLAW_ROLE_ADMIN,
}


class Client(Protocol):
    """What the relay must know of the client behind a session."""

    pid: int
    uid: int
    role: str
    label: str


@dataclass(eq=False)
class Connection:
    """One client's connection, by the routing id ZeroMQ gave it."""

    routing_id: bytes
    number: int
    since_ns: int
    session: str = ""
    observes: bool = False
    """Reads and leaves no trace: it may not cancel."""
    faults: int = 0
    """Rules it broke: the first is logged, FAULTS_MAX end it."""
    pending: deque[bytes] = field(default_factory=deque)
    """What met EAGAIN, in order. Frames are bounded by the window, replies by PENDING_MAX."""


class Relay:
    """One ROUTER. `sessions` are those of live control connections."""

    def __init__(self, core: Core, sessions: Mapping[str, Client], per_user: int, total: int) -> None:
        """At most `per_user` connections of one user, `total` in all."""
        self._core = core
        self._sessions = sessions
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_MAX)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, STRANGER_NS // 1_000_000)
        self._door = Door(self._context, self._socket, per_user, total)
        self._get_option = self._socket.getsockopt
        # pyzmq's own, below its wrapper for options that are not used here
        self._send_part = super(zmq.Socket, self._socket).send
        self._by_routing_id: dict[bytes, Connection] = {}
        self._by_number: dict[int, Connection] = {}
        self._by_session: dict[str, Connection] = {}
        self._strangers: deque[Connection] = deque()
        self._waiting: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._retry_ns = 0
        self.door_fd = self._door.fd
        """Likewise; tell `wake`."""
        self._is_unseen = self._door.look()
        self._dropping = False  # within a message of too many frames
        self.fd = int(self._socket.getsockopt(zmq.FD))
        """Readable when there may be something to receive: ask `receive`, which alone knows."""

    def listen(self, path: Path) -> None:
        """Hand over a listener of our own: libzmq would steal the path of another daemon, and set no mode."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            path.unlink(missing_ok=True)  # the lock is ours: what is there was left behind
            listener.bind(os.fspath(path))
            path.chmod(0o660)
            listener.listen(BACKLOG)
            self._socket.setsockopt(zmq.USE_FD, listener.fileno())
            self._door.listen(path)
            self._socket.bind(f"ipc://{path}")
        except (OSError, zmq.ZMQError) as error:
            listener.close()
            raise HostError(f'cannot listen on "{path}": {error.strerror}') from error
        listener.detach()  # libzmq closes it

    @property
    def connection_count(self) -> int:
        return len(self._by_number)

    def close(self) -> None:
        """Let what was sent go out, at most half a second."""
        door = self._door.close()
        self._socket.close()
        self._context.term()
        door.join()

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
            if connection.pending or not self._send(connection, frame):
                self._keep(connection, bytes(frame))
            else:
                sent.append((index, time.monotonic_ns()))
        # After all are out: the last client must not wait for the first one's figures
        for index, sent_ns in sent:
            self._core.sent_frame(index, sent_ns)

    def _send(self, connection: Connection, message: bytes | memoryview) -> bool:
        """False: its queue is full. A connection that is gone is dropped, and counts as sent to."""
        try:
            self._send_part(connection.routing_id, _MORE)
            self._send_part(message, _LAST)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(connection)
        return True

    def _keep(self, connection: Connection, message: bytes) -> None:
        if connection.number not in self._by_number:
            return
        if not connection.pending:
            self._core.block(connection.number, True)
        connection.pending.append(message)
        self._waiting.add(connection)
        self._retry_ns = self._retry_ns or time.monotonic_ns() + RETRY_NS

    def _reply(self, connection: Connection, message: protocol.Message) -> None:
        packet = protocol.encode(message)
        if not connection.pending and self._send(connection, packet):
            return
        if len(connection.pending) < PENDING_MAX:
            self._keep(connection, packet)
        else:
            log.warning("client does not read its answers, dropped", connection=connection.number)
            self._drop(connection)

    def _flush(self, connection: Connection) -> None:
        while connection.pending:
            message = connection.pending[0]
            if not self._send(connection, message) or not connection.pending:  # full, or gone and dropped
                return
            connection.pending.popleft()
            if message[0] in _FRAMES:
                self._core.sent(message, time.monotonic_ns())
        self._waiting.discard(connection)
        if connection.number in self._by_number:
            self._core.block(connection.number, False)

    def tick(self, ended_sessions: list[str]) -> None:
        """What time or other sockets made due: lost sessions, retries, attaches that waited in vain, strangers."""
        while ended_sessions:
            connection = self._by_session.get(ended_sessions.pop())
            if connection:
                self._drop(connection)
        for number, id in self._core.unmet():
            connection = self._by_number.get(number)
            if connection:
                text = "the stream did not open in time"
                self._reply(connection, protocol.Failure(code="unknown", text=text, id=id))
        if not self._waiting and not self._strangers:
            self._retry_ns = 0
            return
        now_ns = time.monotonic_ns()
        if self._retry_ns and now_ns >= self._retry_ns:
            for connection in list(self._waiting):
                self._flush(connection)
            self._retry_ns = now_ns + RETRY_NS if self._waiting else 0
        while self._strangers and now_ns - self._strangers[0].since_ns >= STRANGER_NS:
            connection = self._strangers.popleft()
            if not connection.session:
                self._drop(connection)

    def timeout_ns(self, longest_ns: int) -> int:
        """How long the loop may sleep as far as the relay is concerned."""
        if not self._retry_ns and not self._strangers:
            return longest_ns
        due = [ns for ns in (self._retry_ns, self._strangers and self._strangers[0].since_ns + STRANGER_NS) if ns]
        if not due:
            return longest_ns
        return min(longest_ns, max(0, min(due) - time.monotonic_ns()))

    # --- in ---

    def receive(self) -> bool:
        """Take what clients sent, at most RECEIVE_MAX messages. True: there was some, so ask again before sleeping."""
        more = self._is_unseen and self._look()
        if self._dropping and not self._drop_parts():
            return True
        for count in range(RECEIVE_MAX):
            if not int(self._get_option(_EVENTS)) & _POLLIN:
                return more or count > 0
            try:
                routing_id = self._socket.recv(_LAST)
            except zmq.Again:
                return more or count > 0
            body: list[bytes] = []
            while self._get_option(zmq.RCVMORE):
                if len(body) == PARTS_MAX:
                    self._take_bomb(routing_id)
                    return True
                body.append(self._socket.recv(_LAST))
            self._take(routing_id, body)
        return True

    def wake(self) -> None:
        """`door_fd` is readable."""
        self._is_unseen = True

    def _look(self) -> bool:
        """See who connected and who left. True: there may be more."""
        self._is_unseen = self._door.look()
        return self._is_unseen

    def _take_bomb(self, routing_id: bytes) -> None:
        """More frames than any message of ours has. libzmq has them all in memory: the sender goes."""
        connection = self._by_routing_id.get(routing_id)
        frame = self._socket.recv(_LAST, copy=False)
        fd = frame.get(zmq.SRCFD)
        self._door.shut(int(fd))
        self._dropping = True
        if connection:
            log.warning("client sent a message of too many frames, dropped", connection=connection.number)
            self._drop(connection)

    def _drop_parts(self) -> bool:
        """True: the rest of that message is gone."""
        for _ in range(RECEIVE_MAX):
            if not self._get_option(zmq.RCVMORE):
                self._dropping = False
                return True
            self._socket.recv(_LAST)
        return False

    def _take(self, routing_id: bytes, body: list[bytes]) -> None:
        connection = self._by_routing_id.get(routing_id)
        if connection is None:
            # New, or one that was dropped and does not know: either way it is told to attach (again)
            connection = self._connect(routing_id)
            if connection is None:
                return
        elif len(body) == 1 and body[0]:
            try:
                self._take_message(connection, body[0])
            except ProtocolError as error:
                self._reply(connection, protocol.Failure(code="bad_request", text=str(error)))
                self._blame(connection, error)
        elif len(body) != 1:
            self._blame(connection, ProtocolError(f"{len(body)} frames in a message"))

    def _blame(self, connection: Connection, error: ProtocolError) -> None:
        connection.faults += 1
        if connection.faults == 1:
            log.warning("client broke a rule", connection=connection.number, error=error)
        elif connection.faults == FAULTS_MAX:
            log.warning("client broke rules again and again, dropped", connection=connection.number, error=error)
            self._drop(connection)

    def _take_message(self, connection: Connection, message: bytes) -> None:
        if message[0] == lib.CLAW_FRAME_FLOW:
            if not self._core.flow(connection.number, message):
                raise ProtocolError("flow message breaks a rule")
            if connection.pending:
                self._flush(connection)
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
        else:
            self._reply(connection, protocol.Pong())

    def _deny_cancel(self, connection: Connection, id: int) -> None:
        self._reply(connection, protocol.Failure(code="denied", text="an observer may not cancel", id=id))

    def _connect(self, routing_id: bytes) -> Connection | None:
        number = self._core.connect()
        if not number:
            log.warning("client refused", limit="max_clients")
            refusal = protocol.Failure(code="limit", text="max_clients are connected; try again later")
            self._send(Connection(routing_id, 0, 0), protocol.encode(refusal))
            return None
        connection = Connection(routing_id, number, time.monotonic_ns())
        self._by_routing_id[routing_id] = connection
        self._by_number[number] = connection
        self._strangers.append(connection)
        self._reply(connection, protocol.Connected(protocol.VERSION, number))
        return connection

    def _attach(self, connection: Connection, request: protocol.Attach) -> None:
        if request.session not in self._sessions or connection.session not in ("", request.session):
            # Around a restart an honest client's may be an earlier clawd's: it says hello again
            text = "this session is not known here; say hello on the control socket"
            self._reply(connection, protocol.Failure(code="session", text=text, id=request.id))
            return
        if not connection.session:
            earlier = self._by_session.get(request.session)
            if earlier:
                self._drop(earlier)
            connection.session = request.session
            client = self._sessions[request.session]
            connection.observes = client.role == "observer"
            label = Label(client.label, client.pid, client.uid, _ROLES[client.role])
            self._core.label_connection(connection.number, label)
            self._by_session[request.session] = connection
        cancels_later = request.on_gone == "cancel"
        if connection.observes and (request.cancel or cancels_later):
            self._deny_cancel(connection, request.id)
            return
        if request.after is not None and request.incarnation is None:
            raise ProtocolError('"attach" with "after" needs "incarnation"')
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
        )
        if result < 0:
            code, text = _ATTACH_CODES.get(result, ("bad_request", os.strerror(-result)))
            self._reply(connection, protocol.Failure(code=code, text=text, id=request.id))

    def _drop(self, connection: Connection) -> None:
        """Forget a connection. If it lives after all, its next message is answered as a newcomer's."""
        if self._by_number.pop(connection.number, None) is None:
            return
        del self._by_routing_id[connection.routing_id]
        if self._by_session.get(connection.session) is connection:
            del self._by_session[connection.session]
        self._waiting.discard(connection)
        connection.pending.clear()
        self._core.disconnect(connection.number)
