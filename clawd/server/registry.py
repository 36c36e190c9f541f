# SPDX-License-Identifier: Apache-2.0
"""The control socket: producers come and go with their rings, clients get their sessions, `clawctl` gets answers."""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawd import log, protocol
from clawd.config import Config
from clawd.core import Core, Label, lib
from clawd.errors import ClawdError, HostError, ProtocolError
from clawd.server.access import Who, allows, peer_of
from clawd.server.instance import Instance
from clawd.server.recovery import Adopted
from clawd.server.ring import Owner, ProducerHello, Ring, answer, is_hello, make_ring, read_hello, refuse
from clawd.units import format_bytes

PACKET_MAX = max(protocol.MESSAGE_MAX, 4096) + 1
BACKLOG = 128
ACCEPT_MAX = 64
"""Connections accepted a turn: a flood of them must not hold up the relay."""
REFUSED_MAX = 16
"""Connections beyond the limit that are kept until they have said who they are, to be told so; and as many more of root
and clawd's own user, whose orders are always taken.
"""
ADMINS_ONLY: dict[type[protocol.Message], str] = {
    protocol.Reload: "reload the configuration",
    protocol.Stop: "stop clawd",
    protocol.SetPace: "set a pace",
}
PACKETS_MAX = 16
"""Packets read of one connection a turn."""

# SO_PEERPIDFD, Linux 6.5 (commit 7b26952a91cf, "net: core: add getsockopt SO_PEERPIDFD"); Python does not name it
SO_PEERPIDFD = 77


@dataclass(eq=False)
class Peer:
    """One connection on the control socket. Who it is comes from the kernel; what it says of itself is a label."""

    socket: socket.socket
    who: Who
    role: str = ""
    label: str = ""
    session: str = ""
    ring: Ring | None = None
    pidfd: int = -1
    is_refused: bool = False
    tags: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.who.pid

    @property
    def uid(self) -> int:
        return self.who.uid


class Registry:
    """Owns the control socket and every ring. `sessions` is what the relay believes."""

    def __init__(
        self,
        core: Core,
        config: Config,
        instance: Instance,
        epoch: int,
        adopted: Adopted,
        reply: Callable[[protocol.Message], protocol.Message],
    ) -> None:
        """`reply` answers questions about settings, and takes orders."""
        self._core = core
        self._reply = reply
        self.config = config
        """A reload puts another in its place."""
        self.is_draining = False
        """No new producers."""
        self._instance = instance
        self._epoch = epoch
        self._adopted = adopted
        self._next_tag = 1
        self._ready: dict[int, Callable[[], None]] = {}
        self._peers: set[Peer] = set()
        self._peers_of: Counter[int] = Counter()
        """How many, by uid."""
        self._settled = 0
        self._listener: socket.socket | None = None
        self.sessions: dict[str, Peer] = {}
        self.ended_sessions: list[str] = []
        """Sessions whose client is gone; the relay takes them from here."""
        self.rings: dict[int, Ring] = {ring.index: ring for ring in adopted.rings}
        """By their index, those whose producer left included until they are drained."""
        self._producers: dict[int, Peer] = {}
        """By the index of their ring; none for a ring that was taken over and not attached again."""

    # --- descriptors ---

    def watch(self, fd: int, ready: Callable[[], None]) -> int:
        """Have `ready` called when `fd` is readable. Returns the tag to unwatch it by."""
        tag, self._next_tag = self._next_tag, self._next_tag % 0xFFFF_FFFF + 1
        self._core.watch(fd, tag)
        self._ready[tag] = ready
        return tag

    def dispatch(self, tag: int) -> None:
        """A descriptor is readable. One that went earlier in the same turn is passed over."""
        ready = self._ready.get(tag)
        if ready:
            ready()

    def listen(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            path.unlink(missing_ok=True)  # the lock is ours: what is there was left behind
            listener.bind(os.fspath(path))
            path.chmod(0o660)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise HostError(f'cannot listen on "{path}": {error.strerror}') from error
        self._listener = listener
        self.watch(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept nothing new and let go of every peer; rings stay as they are."""
        if self._listener:
            self._core.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for peer in list(self._peers):
            self._forget(peer)

    # --- connections ---

    def _accept(self) -> None:
        assert self._listener
        for _ in range(ACCEPT_MAX):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("connection not accepted", error=error.strerror)
                return
            connection.setblocking(False)
            peer = Peer(connection, peer_of(connection))
            uid = peer.uid
            spare = self._spare(uid)
            if spare <= -REFUSED_MAX * (2 if self._is_admin(peer) else 1):
                connection.close()
                continue
            peer.is_refused = spare <= 0
            peer.tags.append(self.watch(connection.fileno(), lambda peer=peer: self._read(peer)))  # type: ignore[misc]
            self._peers.add(peer)
            self._peers_of[uid] += 1

    def _spare(self, uid: int) -> int:
        """How many more connections this user may have."""
        config = self.config
        spare = config.max_clients + config.max_producers - len(self._peers)
        return min(spare, config.user_clients + config.user_producers - self._peers_of[uid])

    def _read(self, peer: Peer) -> None:
        for _ in range(PACKETS_MAX):
            try:
                packet = peer.socket.recv(PACKET_MAX)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._gone(peer)
                return
            try:
                self._take(peer, packet)
            except ProtocolError as error:
                log.warning("peer broke a rule", pid=peer.pid, uid=peer.uid, error=error)
                self._send(peer, protocol.Failure(code="bad_request", text=str(error)))
                self._gone(peer)
                return

    def _refuse(self, peer: Peer, packet: bytes) -> None:
        """In the words of who asks, and after that was read: a close with something unread takes the answer along."""
        text = "too many connections for max_clients or user_clients; try again later"
        if is_hello(packet):
            self._send_packet(peer, answer(refuse("limit", text)))
        else:
            self._send(peer, protocol.Failure(code="limit", text=text))
        self._gone(peer)

    def _take(self, peer: Peer, packet: bytes) -> None:
        if peer.is_refused and (is_hello(packet) or not self._is_admin(peer)):
            self._refuse(peer, packet)
            return
        if is_hello(packet):
            if peer.role:
                raise ProtocolError("said hello twice")
            peer.role = "producer"
            self._attach_producer(peer, packet)
            return
        if peer.role == "producer":
            raise ProtocolError("a producer sends nothing after hello")
        message: Any = protocol.decode(packet, protocol.CONTROL_REQUESTS)
        if isinstance(
            message, protocol.Settings | protocol.Boosts | protocol.Reload | protocol.Stop | protocol.SetPace
        ):
            self._answer(peer, message)
            return
        if isinstance(message, protocol.CancelStream):
            self._cancel_stream(peer, message)
            return
        if peer.role:
            raise ProtocolError("said hello twice")
        if peer.is_refused:
            self._refuse(peer, packet)
            return
        if not self._may(peer, message.role):
            log.warning("client denied", role=message.role, pid=peer.pid, uid=peer.uid)
            text = f"this user may not be a client as {message.role}: see [access] in clawd.conf"
            self._send(peer, protocol.Failure(code="denied", text=text))
            self._gone(peer)
            return
        reached = self._clients_reached(peer.uid)
        if reached:
            self._send(peer, protocol.Failure(code="limit", text=f"{reached}; try again later"))
            self._gone(peer)
            return
        peer.role, peer.label = message.role, message.client
        peer.session = os.urandom(16).hex()
        self.sessions[peer.session] = peer
        self._core.count_clients(len(self.sessions))
        log.event("client connected", role=peer.role, client=peer.label, pid=peer.pid, uid=peer.uid)
        self._send(peer, protocol.Welcome(protocol.VERSION, peer.session, self._instance.id))

    def _is_admin(self, peer: Peer) -> bool:
        return allows(self.config.admins, peer.who)

    def _may(self, peer: Peer, role: str) -> bool:
        """Whether it may be a client as this."""
        if role == "admin":
            return self._is_admin(peer)
        lists = (self.config.consumers,) if role == "consumer" else (self.config.consumers, self.config.observers)
        return any(allows(names, peer.who) for names in lists)

    def _clients_reached(self, uid: int) -> str:
        """Which limit one more client would break, in words; empty = none."""
        config = self.config
        if len(self.sessions) >= config.max_clients:
            return f"max_clients: {config.max_clients} clients are connected already"
        if sum(peer.uid == uid for peer in self.sessions.values()) >= config.user_clients:
            return f"user_clients: {config.user_clients} clients of user {uid} are connected already"
        return ""

    def _send(self, peer: Peer, message: protocol.Message) -> None:
        self._send_packet(peer, protocol.encode(message))

    def _answer(self, peer: Peer, request: protocol.Message) -> None:
        what = ADMINS_ONLY.get(type(request))
        if what and not self._is_admin(peer):
            log.warning(f"{request.op} denied", pid=peer.pid, uid=peer.uid)
            self._send(peer, protocol.Failure(code="denied", text=f"only root, clawd's own user and admins may {what}"))
            return
        if isinstance(request, protocol.Stop):
            log.event("told to stop", pid=peer.pid, uid=peer.uid, drain_ms=request.drain_ms)
        self._send(peer, self._reply(request))

    def _cancel_stream(self, peer: Peer, request: protocol.CancelStream) -> None:
        """The admins' door, whoever reads the stream."""
        if not self._is_admin(peer):
            text = "only root, clawd's own user and admins may cancel a stream"
            refusal = protocol.Failure(code="denied", text=text)
            self._send(peer, refusal)
            return
        result = self._core.cancel_stream(request.stream.encode())
        if result == 0:
            log.event("stream cancelled", stream=request.stream, pid=peer.pid, uid=peer.uid)
            self._send(peer, protocol.StreamCancelled(request.stream))
        elif result == -errno.ESTALE:
            self._send(peer, protocol.Failure(code="gone", text=f'stream "{request.stream}" has ended already'))
        else:
            self._send(peer, protocol.Failure(code="unknown", text=f'no stream "{request.stream}" is open'))

    def _send_packet(self, peer: Peer, packet: bytes) -> None:
        try:
            peer.socket.send(packet, socket.MSG_NOSIGNAL)
        except OSError as error:
            # It does not read its answers, or it is gone: its end of file comes next
            log.warning("answer not sent", pid=peer.pid, error=error.strerror)
            peer.socket.close() if peer not in self._peers else peer.socket.shutdown(socket.SHUT_RDWR)

    # --- producers ---

    def _attach_producer(self, peer: Peer, packet: bytes) -> None:
        try:
            hello = read_hello(packet)
            peer.label = hello.name
            if not allows(self.config.producers, peer.who):
                raise refuse("denied", "this user may not be a producer: see [access] in clawd.conf")
            peer.pidfd = peer_pidfd(peer.socket, peer.pid)
            ring = self._find_ring(peer, hello) if hello.ring_id else self._make_ring(peer, hello)
        except ClawdError as error:
            log.warning("producer refused", producer=peer.label, pid=peer.pid, uid=peer.uid, error=error)
            self._send_packet(peer, answer(error))
            self._gone(peer)
            return
        peer.ring = ring
        self.rings[ring.index] = ring
        self._producers[ring.index] = peer
        self._core.label_ring(ring.index, Label(peer.label, peer.pid, peer.uid, lib.CLAW_ROLE_PRODUCER))
        peer.tags.append(self.watch(peer.pidfd, lambda: self._gone(peer)))
        try:
            ring.hand_over(peer.socket)
        except OSError:
            self._gone(peer)
            return
        what = "producer attached again" if hello.ring_id else "producer attached"
        log.event(what, producer=peer.label, pid=peer.pid, uid=peer.uid, ring_bytes=ring.ring_bytes)

    def _find_ring(self, peer: Peer, hello: ProducerHello) -> Ring:
        return self._adopted.take(hello.ring_id, hello.ring_bytes, peer.uid)

    def _make_ring(self, peer: Peer, hello: ProducerHello) -> Ring:
        if self.is_draining:
            raise refuse("stopping", "clawd is about to stop; try again later")
        size = hello.ring_bytes or self.config.buffer_size
        reached = self._rings_reached(peer.uid, size)
        if reached:
            raise refuse("limit", reached)
        owner = Owner(peer.label, peer.pid, peer.uid)
        return make_ring(self._core, self._instance, self._epoch, size, owner)

    def _rings_reached(self, uid: int, ring_bytes: int) -> str:
        """Which limit one more ring of so many bytes would break, in words; empty = none."""
        config = self.config
        everybody = [ring.ring_bytes for ring in self.rings.values()]
        own = [ring.ring_bytes for ring in self.rings.values() if ring.owner.uid == uid]
        if len(everybody) >= config.max_producers:
            return f"max_producers: {config.max_producers} producers are attached already"
        if len(own) >= config.user_producers:
            return f"user_producers: {config.user_producers} producers of user {uid} are attached already"
        for key, most, held in (
            ("max_ring_bytes", config.max_ring_bytes, sum(everybody)),
            ("user_ring_bytes", config.user_ring_bytes, sum(own)),
        ):
            if held + ring_bytes > most:
                left = format_bytes(max(0, most - held))
                return f"{key}: a ring of {format_bytes(ring_bytes)} is more than the {left} that are left"
        return ""

    def settle_rings(self) -> None:
        """After a turn: let go of rings that are drained or quarantined, and look who of those before lives."""
        self._adopted.look()
        settled = self._core.outcome.rings_settled
        if settled == self._settled:
            return
        self._settled = settled
        for index, ring in list(self.rings.items()):
            state = ring.settled(self._core)
            if not state:
                continue
            log.event("producer detached", producer=ring.owner.label, pid=ring.owner.pid, reason=state)
            del self.rings[index]
            self._adopted.forget(ring)
            ring.drop(self._core)
            peer = self._producers.pop(index, None)
            if peer:
                peer.ring = None
                self._gone(peer)

    # --- ends ---

    def _gone(self, peer: Peer) -> None:
        """The peer's end of file, or its process's end: whichever comes first."""
        if peer not in self._peers:
            return
        self._forget(peer)
        if peer.ring:
            self._core.leave_ring(peer.ring.index)
        if peer.session:
            log.event("client gone", role=peer.role, client=peer.label, pid=peer.pid)
            del self.sessions[peer.session]
            self._core.count_clients(len(self.sessions))
            self.ended_sessions.append(peer.session)

    def _forget(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._peers_of[peer.uid] -= 1
        if not self._peers_of[peer.uid]:
            del self._peers_of[peer.uid]
        for tag, fd in zip(peer.tags, (peer.socket.fileno(), peer.pidfd), strict=False):
            del self._ready[tag]
            self._core.unwatch(fd)
        peer.socket.close()
        if peer.pidfd >= 0:
            os.close(peer.pidfd)
            peer.pidfd = -1


def peer_pidfd(connection: socket.socket, pid: int) -> int:
    """A descriptor of the peer's process. A number alone may be another process by now."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass  # before Linux 6.5
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise refuse("denied", f"process {pid} cannot be seen from here: {error.strerror}") from error
