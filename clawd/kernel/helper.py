# SPDX-License-Identifier: Apache-2.0
"""clawd-kernel's socket: who may ask, what may be asked. A request is a name and bounded integers, never a path, a text
or a program, so what the helper can be made to do is what is listed here.
"""

from __future__ import annotations

import array
import fcntl
import os
import pwd
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from clawd import log, protocol, sd
from clawd.errors import AlreadyRunning, HostError, ProtocolError
from clawd.kernel.boost import Booster, Lease
from clawd.kernel.shaper import Policy, Shaper
from clawd.signals import caught

PEERS_MAX = 16
"""Connections of clawd's user and root at once."""
STRANGERS_MAX = 16
"""Connections of others that are kept until they have asked, to be told no: a close with something unread would take
the answer along. They have a count of their own, so that they keep nobody out.
"""
STRANGER_S = 2.0
"""How long a stranger may take to ask."""
BEAT_S = 5.0
"""The loop turns at least so often."""
ABILITIES = {
    # name: (bit, capability), as in linux/capability.h
    "network": (12, "CAP_NET_ADMIN"),
    "tracing": (38, "CAP_PERFMON"),
    "bpf": (39, "CAP_BPF"),
}


@dataclass(frozen=True)
class User:
    """Who may ask, besides root."""

    uid: int
    gid: int


@dataclass(eq=False)
class Peer:
    socket: socket.socket
    pid: int
    uid: int
    is_stranger: bool
    since: float
    ports: set[int] = field(default_factory=set)
    """Of the lanes that it named: they are shaped as long as it is there."""


def find_user(name: str) -> User:
    """Raises HostError when there is no such user."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise HostError(f'there is no user "{name}"', "make it with systemd-sysusers, or give --user") from error
    return User(entry.pw_uid, entry.pw_gid)


def abilities(status: str) -> dict[str, str]:
    """What this process, whose /proc/self/status that is, may do: empty when it may, else why not."""
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    effective = int(line.split()[1], 16)
    return {name: "" if effective >> bit & 1 else f"no {capability}" for name, (bit, capability) in ABILITIES.items()}


class Helper:
    """Holds the lock of its directory and listens there, from entry to exit."""

    def __init__(self, directory: Path, user: User, shaper: Shaper, booster: Booster) -> None:
        self._directory = directory
        self._path = directory / protocol.KERNEL_SOCKET
        self._user = user
        self._shaper = shaper
        self._booster = booster
        self._lock = -1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._peers: set[Peer] = set()
        self._is_stopping = False
        self._answers: dict[type[protocol.Message], Callable[[Peer, Any], protocol.Message]] = {
            protocol.Ping: lambda _peer, _request: protocol.Pong(),
            protocol.Capabilities: self._capabilities,
            protocol.SetLane: self._set_lane,
            protocol.Shape: lambda _peer, _request: self._shaper.state(),
            protocol.Rows: self._rows,
            protocol.SetBoost: self._set_boost,
            protocol.Boosts: lambda _peer, _request: self._booster.state(),
        }

    def __enter__(self) -> Helper:
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)  # the lock is ours: what is there was left behind
            self._listener.bind(os.fspath(self._path))
            for path, mode in ((self._directory, 0o750), (self._path, 0o660)):
                # clawd's group must reach it. systemd has seen to that, and leaves us no right to change owners.
                if path.stat().st_gid != self._user.gid:
                    os.chown(path, -1, self._user.gid)
                path.chmod(mode)
            self._listener.listen(PEERS_MAX)
        except BlockingIOError as error:
            self._close()
            raise AlreadyRunning(f'another clawd-kernel serves "{self._directory}"', "stop it, or use --dir") from error
        except OSError as error:
            self._close()
            raise HostError(f'cannot listen on "{self._path}": {error.strerror}', "run it as root") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        self._booster.close()
        self._shaper.close()
        self._selector.close()
        self._listener.close()
        if self._lock >= 0:
            os.close(self._lock)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        with self._signals():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            log.event("ready", directory=self._directory, uid=self._user.uid, pid=os.getpid())
            sd.ready()
            beat = sd.Heart()
            while not self._is_stopping:
                ready = self._selector.select(self._patience_s())
                # who left makes room for who comes
                for key, _ in sorted(ready, key=lambda event: event[0].fileobj is self._listener):
                    key.data()
                self._expire()
                self._booster.settle()
                self._shaper.look()
                beat.turned()
            sd.stopping()

    def _patience_s(self) -> float:
        longest = STRANGER_S if self._strangers() else BEAT_S
        due_ns = self._booster.due_ns()
        return longest if due_ns is None else min(longest, max(0.0, (due_ns - time.monotonic_ns()) / 1e9))

    def _strangers(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.is_stranger]

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in self._strangers():
            if now - peer.since >= STRANGER_S:
                self._drop(peer)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("connection not accepted", error=error.strerror)
            return
        connection.setblocking(False)
        pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        peer = Peer(connection, pid, uid, uid not in (0, self._user.uid), time.monotonic())
        limit = STRANGERS_MAX if peer.is_stranger else PEERS_MAX
        if sum(other.is_stranger == peer.is_stranger for other in self._peers) >= limit:
            log.warning("connection refused: too many", pid=pid, uid=uid)
            connection.close()
            return
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        try:
            packet = peer.socket.recv(protocol.KERNEL_MESSAGE_MAX + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._drop(peer)
            return
        answer = self._answer(peer, packet)
        try:
            peer.socket.sendmsg([protocol.encode(answer)], self._rights(answer), socket.MSG_NOSIGNAL)
        except OSError:
            self._drop(peer)  # it does not read its answers, or is gone
            return
        if isinstance(answer, protocol.Failure):
            self._drop(peer)

    def _answer(self, peer: Peer, packet: bytes) -> protocol.Message:
        if peer.is_stranger:
            log.event("request denied", pid=peer.pid, uid=peer.uid)  # clawctl of a user of the group, as a rule
            return protocol.Failure(code="denied", text="only root and clawd's own user may ask clawd-kernel")
        try:
            request = protocol.decode(packet, protocol.KERNEL_REQUESTS, protocol.KERNEL_MESSAGE_MAX)
        except ProtocolError as error:
            log.warning("request refused", pid=peer.pid, uid=peer.uid, error=error)
            return protocol.Failure(code="bad_request", text=str(error))
        return self._answers[type(request)](peer, request)

    def _capabilities(self, _peer: Peer, _request: protocol.Capabilities) -> protocol.Message:
        return protocol.Abilities(protocol.VERSION, abilities(Path("/proc/self/status").read_text()))

    def _set_lane(self, peer: Peer, request: protocol.SetLane) -> protocol.Message:
        policy = Policy(
            1 + protocol.LANES.index(request.lane),
            request.pacing,
            request.lowat,
            request.priority,
            request.dscp,
            int(request.thin),
            request.congestion.encode(),
        )
        try:
            self._shaper.set_lane(request.port, policy)
        except HostError as error:
            return protocol.Failure(code="limit", text=str(error))
        peer.ports.add(request.port)
        return self._shaper.state()

    def _set_boost(self, peer: Peer, request: protocol.SetBoost) -> protocol.Message:
        until_ns = time.monotonic_ns() + request.lease_ms * 1_000_000
        lease = Lease(peer.pid, peer.uid, request.level, request.waiting, request.pressure, until_ns)
        self._booster.ask(peer, lease)
        return self._booster.state()

    def _rows(self, _peer: Peer, _request: protocol.Rows) -> protocol.Message:
        maps = self._shaper.maps()
        if not maps:
            return protocol.SocketRows(0)
        layouts = [[[field.name, field.offset, field.size] for field in each.layout] for each in maps]
        return protocol.SocketRows(maps[0].entries, maps[0].value_size, maps[1].value_size, *layouts)

    def _rights(self, answer: protocol.Message) -> list[tuple[int, int, array.array[int]]]:
        """The descriptors that go with it. clawd may map them and nothing else: bpf(2) is not for it."""
        maps = self._shaper.maps() if isinstance(answer, protocol.SocketRows) and answer.entries else None
        fds = array.array("i", [each.fd for each in maps or ()])
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []

    def _drop(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._shaper.drop_lanes(peer.ports)
        self._booster.drop(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop it, also when they come just before it sleeps."""

        def stop() -> None:
            self._is_stopping = True

        with caught({signal.SIGTERM: stop, signal.SIGINT: stop}) as woken:
            self._selector.register(woken, selectors.EVENT_READ, woken.numbers)
            yield
