# SPDX-License-Identifier: Apache-2.0
"""Who is connected to a lane by tcp. Until a connection has said something it is a stranger: of those only the latest
are kept, so that a crowd that says nothing keeps nobody out and uses up no descriptors.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import zmq

from clawd import log
from clawd.descriptors import STRANGERS_MAX
from clawd.server.door import LOOK_MAX, TELL_NS, Monitor
from clawd.server.lanes import STRANGER_NS
from clawd.server.tcp import PRIORITY, cookie

SO_MAX_PACING_RATE = 47
UNPACED = b"\xff" * 4


class TcpDoor(Monitor):
    """Watches the connections of one ROUTER that listens at `address`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], name: str, total: int, priority: bool
    ) -> None:
        """At most `total` connections. `priority`: their packets go first."""
        super().__init__(context, router, name)
        self._total = total
        self._priority = priority
        self._address: tuple[str, int] = ("", 0)
        self._strangers: dict[int, int] = {}
        """When they came, oldest first."""
        self._cookies: dict[int, int] = {}
        self._refused = 0
        self._told_ns = -TELL_NS
        self.left: list[int] = []
        """Descriptors of connections that ended; who looks takes them from here."""

    def listen(self, listener: socket.socket) -> None:
        self._address = listener.getsockname()[:2]

    def look(self) -> bool:
        for _ in range(LOOK_MAX):
            found = self.next()
            if found is None:
                return False
            event, fd = found
            if self._cookies.pop(fd, None) is not None:
                self._strangers.pop(fd, None)
                self.left.append(fd)
            if event == zmq.EVENT_ACCEPTED:
                self._come(fd)
        return True

    def know(self, fd: int) -> None:
        """It has said something, so it has shown what it must."""
        self._strangers.pop(fd, None)

    def cookie(self, fd: int) -> int:
        """Of the connection that came with this number; 0, which none has, when it is gone."""
        return self._cookies.get(fd, 0)

    def lives(self, fd: int) -> bool:
        """Whether the number is still the connection that it was when it came."""
        connection = self._borrow(fd)
        if connection is None:
            return False
        try:
            return cookie(connection) == self._cookies.get(fd)
        except OSError:
            return False
        finally:
            connection.detach()

    def expire(self, now_ns: int) -> None:
        """Hang up on strangers that have been silent for too long."""
        for fd, since_ns in list(self._strangers.items()):
            if now_ns - since_ns < STRANGER_NS:
                return
            self.shut(fd)

    def shut(self, fd: int) -> None:
        """Hang up on a connection of libzmq's, which then closes it."""
        self._strangers.pop(fd, None)
        with self._known(fd) as connection:
            if connection:
                connection.shutdown(socket.SHUT_RDWR)

    def unpace(self, fd: int) -> None:
        """Have the kernel send as fast as it can on a connection."""
        with self._known(fd) as connection:
            if connection:
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, UNPACED)

    def peer(self, fd: int) -> str:
        """The address at the other end, empty when it is gone."""
        connection = self._borrow(fd)
        if connection is None:
            return ""
        try:
            return str(connection.getpeername()[0])
        except OSError:
            return ""
        finally:
            connection.detach()

    def _come(self, fd: int) -> None:
        connection = self._borrow(fd)
        if connection is None:
            return
        try:
            self._cookies[fd] = cookie(connection)
            if self._priority:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, PRIORITY)
        except OSError:
            return
        finally:
            connection.detach()
        self._strangers[fd] = time.monotonic_ns()
        if len(self._cookies) > self._total:
            self._refuse(fd)
        elif len(self._strangers) > STRANGERS_MAX:
            self._refuse(next(iter(self._strangers)))

    def _refuse(self, fd: int) -> None:
        self.shut(fd)
        self._refused += 1
        now_ns = time.monotonic_ns()
        if now_ns - self._told_ns >= TELL_NS:
            log.warning("tcp connections refused", count=self._refused, port=self._address[1])
            self._refused, self._told_ns = 0, now_ns

    @contextlib.contextmanager
    def _known(self, fd: int) -> Iterator[socket.socket | None]:
        """The connection of this descriptor, if it is still the one that came by it. It may end meanwhile."""
        connection = self._borrow(fd)
        if connection is None:
            yield None
            return
        try:
            yield connection if self._is_known(fd, connection) else None
        except OSError:
            pass
        finally:
            connection.detach()

    def _is_known(self, fd: int, connection: socket.socket) -> bool:
        try:
            return cookie(connection) == self._cookies.get(fd)
        except OSError:
            return False

    def _borrow(self, fd: int) -> socket.socket | None:
        """libzmq's socket behind a number, unless it closed it and the number is another file's by now. Detach it."""
        try:
            found = socket.socket(fileno=fd)
        except OSError:
            return None
        try:
            is_ours = (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.getsockname()[1] == self._address[1]
                and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            )
        except OSError:
            is_ours = False
        if not is_ours:
            found.detach()
            return None
        return found
