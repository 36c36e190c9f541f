# SPDX-License-Identifier: Apache-2.0
"""Connections to the gateway: how many, how long without a request, who is told when one can be written to again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from clawd import log
from clawd.gateway.figures import Figures
from clawd.gateway.problem import Problem
from clawd.gateway.reader import Reader

TCP_NOTSENT_LOWAT = 25
"""Of Linux's tcp.h; the module socket has no name for it."""
HIGH_WATER_BYTES = 32_768
"""A connection with so much unsent is full."""
_REFUSED_S = 1.0
"""How long a client that was refused gets to read why."""


class Connection(web.RequestHandler):
    """One connection. `reader` is who reads a stream on it now."""

    def __init__(self, server: Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._loop_time = asyncio.get_running_loop().time
        self._stream: asyncio.Transport | None = None
        self.reader: Reader | None = None
        self.busy = 0
        """Requests that are being served."""
        self.since = self._loop_time()
        """Since when it is idle, or full."""
        self.is_full = False
        self.refused = False
        self.address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else None
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        problem = self._server.admit(self)
        if problem is None:
            super().connection_made(transport)
            return
        self.refused = True
        transport.write(problem.raw())
        with contextlib.suppress(OSError, NotImplementedError):
            transport.write_eof()

    def data_received(self, data: bytes) -> None:
        if not self.refused:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.forget(self)
        if not self.refused:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_full = True
        self.since = self._loop_time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.is_full = False
        if self.reader is not None:
            self.reader.wake()

    def write(self, data: bytes) -> None:
        if self._stream is not None and not self._stream.is_closing():
            self._stream.write(data)

    def abort(self) -> None:
        if self._stream is not None:
            connected = self._stream.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                # With a reset: else the kernel keeps what was not taken, and tries for seconds
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._stream.abort()

    def is_late(self, now: float, header_timeout: float, stall_timeout: float) -> bool:
        """It takes, or says, nothing for too long."""
        if self.refused:
            return now - self.since > _REFUSED_S
        if self.is_full:
            return now - self.since > stall_timeout
        return not self.busy and now - self.since > header_timeout

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What aiohttp answers to what is no HTTP, and to faults of ours."""
        if isinstance(exc, ConnectionError):
            raise exc  # it has gone while it was answered
        if status >= 500:
            log.failure("a request failed", exc or RuntimeError(message))
            problem = Problem(500, "error", "the gateway failed on this request")
        elif isinstance(exc, LineTooLong):
            problem = Problem(431, "bad_request", "a line of the request is too long")
        else:
            problem = Problem(400, "bad_request", "this is no HTTP request that can be understood")
        self._server.figures.requests["none", problem.status] += 1
        if request.writer.output_size > 0:
            raise ConnectionError("an answer had begun, so there cannot be another")
        answer = problem.response()
        answer.force_close()
        return answer


Handler = Callable[[web.BaseRequest, Connection], Awaitable[web.StreamResponse]]


class Server(web.Server):
    """Makes a Connection of each socket that was accepted, and looks after them."""

    def __init__(
        self, handler: Handler, figures: Figures, *, max_connections: int, max_per_address: int, header_bytes: int
    ) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, Connection)
            connection.busy += 1
            try:
                return await handler(request, connection)
            finally:
                connection.busy -= 1
                connection.since = connection._loop_time()

        super().__init__(handle, handler_cancellation=True)
        self.figures = figures
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._options: dict[str, Any] = {
            "access_log": None,
            "logger": log.QUIET,
            "max_line_size": header_bytes,
            "max_field_size": header_bytes,
            "lingering_time": 0.0,
            "keepalive_timeout": 3600.0,  # `sweep` sees to that
        }
        self.open: set[Connection] = set()
        self._admitted = 0  # those of `open` that were not refused
        self._addresses: Counter[str] = Counter()

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def admit(self, connection: Connection) -> Problem | None:
        """Count it, or say why it is one too many."""
        problem = None
        address = connection.address
        if self._admitted >= self._max_connections:
            problem = Problem(503, "limit", "the gateway has no room for another connection")
        elif address is not None and self._addresses[address] >= self._max_per_address:
            problem = Problem(429, "limit", "this address has too many connections")
        self.open.add(connection)
        if problem is not None:
            self.figures.refused["connections" if problem.status == 503 else "address"] += 1
            return problem
        self._admitted += 1
        if address is not None:
            self._addresses[address] += 1
        return None

    def forget(self, connection: Connection) -> None:
        if connection in self.open:
            self.open.discard(connection)
            if connection.refused:
                return
            self._admitted -= 1
            address = connection.address
            if address is not None:
                self._addresses[address] -= 1
                if not self._addresses[address]:
                    del self._addresses[address]

    def sweep(self, header_timeout: float, stall_timeout: float, keepalive: float) -> None:
        """Cut off who is late, let others know that we live."""
        now = asyncio.get_running_loop().time()
        for connection in tuple(self.open):
            reader = connection.reader
            if connection.is_late(now, header_timeout, stall_timeout):
                self.figures.stalled += reader is not None
                connection.abort()
            elif reader is not None:
                reader.beat(now, keepalive)


class Outlet:
    """Writes a response's body to its connection: as chunks, as it is, or as messages that bring their own frames."""

    def __init__(self, connection: Connection, *, is_chunked: bool) -> None:
        self._connection = connection
        self._is_chunked = is_chunked

    @property
    def is_full(self) -> bool:
        return self._connection.is_full

    def send(self, data: bytes) -> None:
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)


def set_options(listener: socket.socket, stall_timeout: float, *, fast_open: bool) -> list[str]:
    """What accepted sockets inherit. Returns what this host does not do."""
    missing = []
    for name, option, value in (
        ("TCP_NODELAY", socket.TCP_NODELAY, 1),
        # So much may wait in the kernel beyond what is on its way: else it lets a slow reader have megabytes
        ("TCP_NOTSENT_LOWAT", TCP_NOTSENT_LOWAT, HIGH_WATER_BYTES),
        # A peer that vanished acknowledges nothing; heartbeats see to it that there is something to acknowledge. One
        # that is there and takes nothing is cut off before, by `sweep`, which counts it.
        ("TCP_USER_TIMEOUT", socket.TCP_USER_TIMEOUT, round(1000 * (stall_timeout + 5))),
        ("TCP_FASTOPEN", socket.TCP_FASTOPEN, 256 if fast_open else 0),
    ):
        try:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError as error:
            missing.append(f"{name}: {error.strerror}")
    return missing
