# SPDX-License-Identifier: Apache-2.0
"""A client's link to clawd: the control and the relay socket and all readings' inboxes. It never waits and starts no
thread: who owns it calls `pump` when a descriptor or a deadline says so, one call at a time.
"""

from __future__ import annotations

import math
import os
import select
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any

from clawd import protocol
from clawd.core import ffi, lib
from clawd.errors import AttachError, ClawdError, ControlError, ProtocolError, ReadingClosed, VersionMismatch
from clawd.inbox import PART, PLAIN, Inbox, Page
from clawd.session import AnySession, Session, Watcher, other_version

try:
    import zmq
except ImportError as missing:
    raise ClawdError("reading tokens needs pyzmq", "pip install 'clawd[consumer]'") from missing

__all__ = ["Link", "zmq"]

FLOW = struct.Struct("<BBHIQ")
_CREDIT = struct.Struct("<IIQ")
for _format, _name in ((FLOW, "claw_flow"), (_CREDIT, "claw_credit")):
    if _format.size != ffi.sizeof(f"struct {_name}"):
        raise ImportError(f"struct {_name} is not what link.py reads; build the core again")

_PARTS_MAX = int(lib.CLAW_FRAME_MAX) // ffi.sizeof("struct claw_segment")
_split = lib.claw_frame_split
_DATA = int(lib.CLAW_FRAME_DATA)
_PACKED = int(lib.CLAW_FRAME_PACKED)
_DEGRADE_AT = ffi.offsetof("struct claw_frame_header", "degrade")
CHARGE = int(lib.CLAW_FRAME_CHARGE)
ACK_AT = int(lib.CLAW_WINDOW) // 4
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
BURST = 32  # messages a pump takes, so that one busy reading does not keep the others from theirs
_CREDITS_MAX = 128  # in one flow message, so that it stays small
MESSAGE_MAX = 1 << 16
_ANSWER_S = 5.0  # on top of a reading's `wait`, for a daemon that is being restarted

DEFAULT_RUNTIME_DIR = "/run/clawd"

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _disown_all() -> None:
    for link in list(_links):
        link.disowned = True
        link._session.disown()


os.register_at_fork(after_in_child=_disown_all)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _relay_socket(context: zmq.Context[zmq.Socket[bytes]], path: str) -> zmq.Socket[bytes]:
    relay = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.IMMEDIATE, 1),
        (zmq.PROBE_ROUTER, 1),
        (zmq.LINGER, 0),
        (zmq.SNDHWM, 0),  # so that a refused send means one thing only: no connection
        (zmq.RCVHWM, 2 * int(lib.CLAW_WINDOW) // CHARGE),
        (zmq.MAXMSGSIZE, MESSAGE_MAX),
        # A try costs some 50 us; one every 40 ms finds a clawd that was restarted soon enough
        (zmq.RECONNECT_IVL, 10),
        (zmq.RECONNECT_IVL_MAX, 40),
    ):
        relay.setsockopt(option, value)
    try:
        relay.connect(f"ipc://{path}")
    except zmq.ZMQError as error:
        relay.close()
        raise ControlError(f'cannot use "{path}": {error}', "use a shorter runtime directory") from error
    return relay


class Link:
    """Connect to the clawd of `runtime_dir` (else $CLAWD_RUNTIME_DIR, else /run/clawd).

    Raises ControlError when none is there, unless `is_patient`; later losses are repaired.
    """

    def __init__(
        self, runtime_dir: str | os.PathLike[str] | None = None, role: str = "consumer", *, is_patient: bool = False
    ) -> None:
        given = runtime_dir if runtime_dir is not None else os.environ.get("CLAWD_RUNTIME_DIR") or DEFAULT_RUNTIME_DIR
        self.place = os.path.abspath(given)
        """Where clawd is, for messages."""
        self._prepare(Session(self.place, role, is_patient=is_patient))
        self._open(lambda: _relay_socket(self._context, os.path.join(self.place, protocol.RELAY_SOCKET)))

    def _prepare(self, session: AnySession) -> None:
        self._session = session
        self.disowned = False
        """This process is a fork of the one that made it, and must not use it."""
        self.ready: list[Inbox] = []
        """Inboxes that something arrived for; who pumps empties it."""
        self._inboxes: dict[int, Inbox] = {}
        self._due: dict[int, Inbox] = {}
        self.is_idle = False
        """The relay had no message when looked at last, and was not used since: its descriptor tells of the next."""
        self._next_id = 1
        self._connection: int | None = None
        self._acked = self._acked_sent = 0
        self._refused = False
        self._fatal: ClawdError | None = None
        self._give_up_at: float | None = None
        self.degrade = 0
        """What clawd wishes a client to leave out, of what is not needed: 0 nothing … 3 all."""
        self._parts = ffi.new("struct claw_part[]", _PARTS_MAX)
        self._parts_view = memoryview(ffi.buffer(self._parts))
        self._ret_connection = ffi.new("uint32_t *")

    def _open(self, connect: Callable[[], zmq.Socket[bytes]]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._relay = connect()
        except BaseException:
            self.close()
            raise
        self._get: Callable[[int], Any] = self._relay.get
        self._recv: Callable[[int], bytes] = self._relay.recv
        self.relay_fd = int(self._get(zmq.FD))
        _links.add(self)

    def watch(self, watcher: Watcher) -> None:
        """Keep this link's descriptors registered with `watcher`, also when one is replaced. Sleep on it only while
        `is_idle`: the relay's descriptor tells of changes only.
        """
        watcher.register(self.relay_fd, select.EPOLLIN)
        self._session.watch(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Before `close`, for a watcher that does not see a descriptor's end."""
        watcher.unregister(self.relay_fd)

    def next_deadline(self) -> float | None:
        """When to pump although nothing arrived, by time.monotonic()."""
        retry_at, give_up_at = self._session.retry_at, self._give_up_at
        if retry_at is None or give_up_at is None:
            return give_up_at if retry_at is None else retry_at
        return min(retry_at, give_up_at)

    def attach(
        self, stream: str, after: tuple[int, int] | None, wait: float, credit: int, on_gone: str, grace: float
    ) -> Inbox:
        """Start a reading of `stream`, after (incarnation, sequence) or from its start."""
        if not (_is_seconds(wait) and _is_seconds(grace) and isinstance(credit, int)):
            raise ClawdError("cannot attach: wait and grace are seconds, credit is bytes")
        if self._fatal is not None:
            raise self._fatal
        inbox = Inbox(stream, after, credit, time.monotonic() + wait)
        inbox.on_gone, inbox.grace_ms = on_gone, round(1000 * grace)
        while self._next_id in self._inboxes:
            self._next_id = self._next_id % (2**32 - 1) + 1
        inbox.id = self._next_id
        request = self._request(inbox, "-", credit)
        try:  # here, because a refusal by the daemon could not raise out of this call
            protocol.decode(protocol.encode(request), (protocol.Attach,))
        except ProtocolError as error:
            raise ClawdError(f"cannot attach: {error}") from error
        self._next_id = self._next_id % (2**32 - 1) + 1
        self._inboxes[inbox.id] = inbox
        if self._refused:  # for want of room: any message asks again
            self._refused = False
            self._send(protocol.encode(protocol.Ping()))
        self._attach(inbox)
        return inbox

    def cancel(self, inbox: Inbox) -> None:
        """End the stream for everybody; said again after each reconnect until it ended."""
        if not inbox.done and not inbox.cancel:
            inbox.cancel = True
            if inbox.limit > 0:
                self._send(protocol.encode(protocol.Cancel(id=inbox.id)))

    def detach(self, inbox: Inbox, error: ClawdError) -> None:
        """Stop reading. A reader that still waits gets `error`."""
        if not inbox.done:
            if inbox.limit > 0:
                self._send(protocol.encode(protocol.Detach(id=inbox.id)))
            self._finish(inbox, error)

    def replace(self, old: Inbox, new: Inbox) -> None:
        """Have `new`, which nobody has read from, go on in the place of `old`, which nobody reads."""
        new.take_over(old)
        if old.id in self._inboxes:
            self._inboxes[old.id] = new
        if self._due.pop(old.id, None) is not None:
            self._due[new.id] = new

    def grant(self, inbox: Inbox) -> None:
        """Tell clawd what `inbox` has consumed, if that is due."""
        if inbox.owes_credit():
            self._due[inbox.id] = inbox
            self._send_flow()

    def pump(
        self, *, control: bool = True, relay: bool = False, until: Inbox | None = None, burst: int = BURST
    ) -> bool:
        """Receive what is there, send what is due. True: something arrived. Sleep only when `is_idle` says so.

        `control` is False when the caller knows that its descriptor is silent, `relay` True when the relay's is known
        not to be. Stops early once `until` has something, and after `burst` messages.
        """
        if control:
            self._pump_control()
        if self._give_up_at is not None or self._session.retry_at is not None:
            self._tick()
        get, recv = self._get, self._recv
        arrived = False
        if relay:
            self.is_idle = False
        for _ in range(burst):
            if not relay and (self.is_idle or not get(EVENTS) & POLLIN):
                self.is_idle = True
                break
            relay = False
            try:
                frame = recv(NOBLOCK)
            except zmq.Again:  # woken by something that was no message
                self.is_idle = True
                break
            arrived = True
            if not frame:
                continue
            if frame[0] in (_DATA, _PACKED):
                self._take(frame)
            else:
                self._answer(frame)
            if until is not None and until.pending:
                break
        if self._due:
            self._send_flow()
        return arrived

    def close(self) -> None:
        """Let go of both sockets; every reading that has not ended fails. Idempotent."""
        self._end(ReadingClosed("the consumer is closed"))
        _links.discard(self)
        if not self._context.closed:
            self._context.destroy(linger=0)

    def _pump_control(self, *, connected: bool = False) -> None:
        try:
            if self._session.pump() or connected:
                self._attach_all()
        except ControlError as error:
            self._end(error)

    def _end(self, error: ClawdError) -> None:
        """Nothing will work any more."""
        self._fatal = error
        self._session.close()
        self._fail_all(error)

    def _request(self, inbox: Inbox, session: str, credit: int) -> protocol.Attach:
        return protocol.Attach(
            session=session,
            id=inbox.id,
            stream=inbox.stream,
            after=None if inbox.incarnation is None else inbox.expected - 1,
            incarnation=inbox.incarnation,
            credit=credit,
            wait_ms=max(0, round(1000 * (inbox.give_up - time.monotonic()))),
            cancel=inbox.cancel,
            on_gone=inbox.on_gone,
            grace_ms=inbox.grace_ms,
        )

    def _attach(self, inbox: Inbox) -> None:
        session = self._session.name
        if session is not None and self._connection is not None:
            self._send(protocol.encode(self._request(inbox, session, inbox.begin())))
        else:
            self._expect_answer(inbox)

    def _attach_all(self) -> None:
        self._give_up_at = None
        self._due.clear()
        for inbox in self._inboxes.values():
            self._attach(inbox)

    def _expect_answer(self, inbox: Inbox) -> None:
        if inbox.limit == 0:
            at = inbox.give_up + _ANSWER_S
            self._give_up_at = at if self._give_up_at is None else min(at, self._give_up_at)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._session.retry_at is not None and now >= self._session.retry_at:
            self._session.retry()
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            for inbox in list(self._inboxes.values()):
                if inbox.limit == 0 and now >= inbox.give_up + _ANSWER_S:
                    self._finish(inbox, self._no_answer())
                else:
                    self._expect_answer(inbox)

    def _no_answer(self) -> ControlError:
        if self._session.refusal:
            return ControlError(f"clawd has no room for this client: {self._session.refusal}")
        return ControlError(f'no answer from clawd at "{self.place}"', "is it running?")

    def _finish(self, inbox: Inbox, error: ClawdError | None) -> None:
        self._inboxes.pop(inbox.id, None)
        self._due.pop(inbox.id, None)
        inbox.error = error
        inbox.done = True
        self.ready.append(inbox)

    def _fail_all(self, error: ClawdError) -> None:
        for inbox in list(self._inboxes.values()):
            self._finish(inbox, error)

    def _send(self, message: bytes) -> None:
        # What is refused or lost needs no queue: it had no connection, and the next one begins with all that counts
        self.is_idle = False  # sending takes in what the descriptor had to tell
        try:
            self._relay.send(message, NOBLOCK)
        except zmq.Again:
            return

    def _send_flow(self) -> None:
        due = list(self._due.values())
        self._due.clear()
        if self._connection is None:
            return
        self._acked_sent = self._acked
        for start in range(0, max(1, len(due)), _CREDITS_MAX):
            rows = due[start : start + _CREDITS_MAX]
            head = FLOW.pack(lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, len(rows), self._connection, self._acked)
            self._send(head + b"".join(_CREDIT.pack(inbox.id, 0, inbox.new_limit()) for inbox in rows))

    def _answer(self, packet: bytes) -> None:
        try:
            message = protocol.decode(packet, (protocol.Connected, protocol.Failure, protocol.Pong))
        except VersionMismatch as error:
            self._end(other_version(error))
            return
        except ProtocolError as error:
            self._fail_all(error)
            return
        if isinstance(message, protocol.Connected):
            self._connected(message)
        elif isinstance(message, protocol.Failure):
            text = f"{message.text or 'refused by clawd'} ({message.code})"
            if message.id == 0:
                self._refused = self._connection is None
                self._fail_all(AttachError(f"cannot read: {text}", message.code))
            elif message.code == "session":
                self._session.renew()
            elif (inbox := self._inboxes.get(message.id)) is not None:
                self._finish(inbox, AttachError(f'cannot read "{inbox.stream}": {text}', message.code))

    def _connected(self, message: protocol.Connected) -> None:
        self._connection = message.connection
        self._acked = self._acked_sent = 0
        # A restarted daemon answers only after the old one's control connection broke: do not show it that session
        self._pump_control(connected=True)

    def _unpack(self, packed: bytes) -> bytes:
        """The data frame in one that came in compact encoding; empty for nonsense."""
        plain = ffi.new("uint8_t[]", lib.CLAW_FRAME_MAX)
        length = lib.claw_frame_unpack(packed, len(packed), plain, lib.CLAW_FRAME_MAX)
        return bytes(ffi.buffer(plain, max(0, length)))

    def _take(self, frame: bytes) -> None:
        size = len(frame)
        if frame[0] == _PACKED:
            frame = self._unpack(frame)
        found = _split(frame, len(frame), self._parts, _PARTS_MAX, self._ret_connection)
        if found < 0:
            self._fail_all(ProtocolError(f"clawd sent a malformed frame of {size} bytes"))
            return
        current = self._ret_connection[0] == self._connection
        if current:
            self.degrade = frame[_DEGRADE_AT]
            self._ack(size + CHARGE)
        inboxes, ready = self._inboxes, self.ready
        rows = PART.iter_unpack(self._parts_view[: found * PART.size])
        for attachment, incarnation, first_seq, end_seq, at, length, tokens, flags in rows:
            inbox = inboxes.get(attachment)
            if inbox is None or not length:
                continue
            # a copy: a reader that is slow must not keep the other readers' bytes alive
            page = (frame[at : at + length], first_seq, tokens, flags)
            if flags & PLAIN and first_seq == inbox.expected and incarnation == inbox.incarnation and current:
                inbox.expected = end_seq  # `accept` of what comes most
                inbox.received += length
                inbox.pending.append(page)
                ready.append(inbox)
                continue
            self._accept(inbox, page, incarnation, end_seq, current)

    def _ack(self, charge: int) -> None:
        self._acked += charge
        if self._acked - self._acked_sent >= ACK_AT:
            self._send_flow()

    def _accept(self, inbox: Inbox, page: Page, incarnation: int, end_seq: int, current: bool) -> None:
        wrong = inbox.accept(page, incarnation, end_seq, current)
        if wrong is not None:
            self.detach(inbox, ProtocolError(f'clawd broke the protocol on "{inbox.stream}": {wrong}'))
        elif inbox.done:
            self._finish(inbox, None)
        else:
            self.ready.append(inbox)
            if inbox.owes_credit():  # by what was dropped
                self._due[inbox.id] = inbox
