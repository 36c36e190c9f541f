# SPDX-License-Identifier: Apache-2.0
"""Who may connect to the relay's socket, and how often. libzmq accepts everybody by itself and ends the process when it
meets EMFILE, so connections beyond a user's share are shut down as soon as its monitor tells of them.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path

import zmq

from clawd import log

LOOK_MAX = 1024
"""Events taken a pass: a flood of connections must not hold up the relay."""
TELL_NS = 10_000_000_000
"""A user that is refused again and again is logged once in so long."""

_EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_EVENT = struct.Struct("=HI")


class Monitor:
    """What libzmq tells of one ROUTER's connections."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], name: str):
        router.monitor(f"inproc://{name}", _EVENTS)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # Its queue is short on purpose: libzmq's own 1,000 and this one. When it is full libzmq's thread waits, so that
        # a flood of connections is at most RELAY_AHEAD before us, and does not outrun us to EMFILE
        self._monitor.setsockopt(zmq.RCVHWM, 1)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(f"inproc://{name}")
        self.fd = int(self._monitor.getsockopt(zmq.FD))
        """Readable when there may be something to see."""

    def next(self) -> tuple[int, int] | None:
        """The next event and its descriptor, if there is one."""
        try:
            event, fd = _EVENT.unpack(self._monitor.recv(zmq.DONTWAIT))
            self._monitor.recv(zmq.DONTWAIT)  # its endpoint
        except zmq.Again:
            return None
        return event, fd

    def close(self) -> threading.Thread:
        """Call it before the ROUTER is closed: until the context's end somebody else must read, or libzmq's thread may
        wait for us while we wait for it. Join the thread after.
        """
        thread = threading.Thread(target=self._drain, name="clawd-door", daemon=True)
        thread.start()
        return thread

    def _drain(self) -> None:
        try:
            while True:
                self._monitor.recv()
        except zmq.ContextTerminated:
            self._monitor.close()


class Door(Monitor):
    """Watches the connections of one ROUTER that listens at `path`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], per_user: int, total: int):
        """At most `per_user` connections of one user, `total` in all."""
        super().__init__(context, router, "door")
        self._path = ""
        self._per_user = per_user
        self._total = total
        self._users: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._told: dict[int, int] = {}
        self._refused: Counter[int] = Counter()

    def listen(self, path: Path) -> None:
        self._path = os.fspath(path)

    def look(self) -> bool:
        """See who came and went. True: there may be more, so look again before sleeping."""
        for _ in range(LOOK_MAX):
            found = self.next()
            if found is None:
                return False
            event, value = found
            self._leave(value)
            if event == zmq.EVENT_ACCEPTED:
                self._come(value)
        return True

    def shut(self, fd: int) -> None:
        """Hang up on a connection of libzmq's, which then closes it."""
        self._peer(fd, shut=True)

    def _come(self, fd: int) -> None:
        uid = self._peer(fd)
        if uid is None:
            return
        self._users[fd] = uid
        self._counts[uid] += 1
        if self._counts[uid] > self._per_user:
            self._refuse(fd, uid, "user_clients")
        elif len(self._users) > self._total:
            self._refuse(fd, uid, "max_clients")

    def _leave(self, fd: int) -> None:
        uid = self._users.pop(fd, None)
        if uid is None:
            return
        self._counts[uid] -= 1
        if not self._counts[uid]:
            del self._counts[uid]

    def _refuse(self, fd: int, uid: int, setting: str) -> None:
        self.shut(fd)
        self._refused[uid] += 1
        now_ns = time.monotonic_ns()
        if now_ns - self._told.get(uid, -TELL_NS) >= TELL_NS:
            log.warning("relay connections refused", uid=uid, count=self._refused.pop(uid), limit=setting)
            self._told[uid] = now_ns

    def _peer(self, fd: int, *, shut: bool = False) -> int | None:
        """Whose connection it is. None: libzmq has closed it meanwhile, and the number may be another file's by now:
        only what is connected at our own path is touched.
        """
        try:
            peer = socket.socket(fileno=fd)
        except OSError:
            return None
        try:
            if peer.family != socket.AF_UNIX or peer.type != socket.SOCK_STREAM or peer.getsockname() != self._path:
                return None
            if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # the listener itself has that path too
                return None
            uid = int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
            if shut:
                peer.shutdown(socket.SHUT_RDWR)
            return uid
        except OSError:
            return None
        finally:
            peer.detach()  # it is libzmq's
