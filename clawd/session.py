# SPDX-License-Identifier: Apache-2.0
"""A client's control connection: its end of file is how clawd learns that the client is gone, and the client that clawd
is. It dials again by itself; it never waits.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import time
from typing import Protocol

from clawd import protocol
from clawd.errors import ControlError, ProtocolError, VersionMismatch, hint_unreachable

__all__ = ["AnySession", "Session", "Watcher", "other_version", "program"]

_RETRY_MIN_S, _RETRY_MAX_S = 0.01, 0.5
_RETRY_SHARE = 0.1  # of the time without clawd: how late its return may be noticed
_FINAL = ("bad_request", "denied")  # answers to hello that will not change by asking again


def other_version(error: VersionMismatch) -> ControlError:
    """What a client raises when clawd speaks another version."""
    return ControlError(f"clawd speaks version {error.theirs}, this client {error.ours}", "upgrade the older one")


def program() -> str:
    """What `clawctl consumers` calls us."""
    path = sys.argv[0] if getattr(sys, "argv", None) else ""
    name = os.path.basename(os.path.dirname(path) if path.endswith("__main__.py") else path)
    return name.encode(errors="replace")[:64].decode(errors="ignore")


class Watcher(Protocol):
    """What descriptors are registered with: an epoll, or what stands for one."""

    @property
    def closed(self) -> bool: ...

    def register(self, fd: socket.socket | int, events: int, /) -> None: ...

    def unregister(self, fd: socket.socket | int, /) -> None: ...


class AnySession(Protocol):
    """What a link needs of whoever knows whether clawd knows this client."""

    name: str | None
    refusal: str
    retry_at: float | None

    def retry(self) -> None: ...
    def watch(self, watcher: Watcher) -> None: ...
    def pump(self) -> bool: ...
    def renew(self) -> None: ...
    def close(self) -> None: ...
    def disown(self) -> None: ...


class Session:
    """Connect to the clawd of `runtime_dir`. Raises ControlError when none is there, unless `is_patient`; later losses
    are repaired.
    """

    def __init__(self, runtime_dir: str, role: str = "consumer", *, is_patient: bool = False) -> None:
        self._hello = protocol.Hello(version=protocol.VERSION, role=role, client=program())
        self._path = os.path.join(runtime_dir, protocol.CONTROL_SOCKET)
        self._socket: socket.socket | None = None
        self._watchers: list[Watcher] = []
        self._lost_at: float | None = None  # since when there is no welcome
        self.name: str | None = None
        """What attaches carry; None while there is no welcome."""
        self.refusal = ""
        """Why clawd has no room for this client just now, in its words."""
        self.retry_at: float | None = None
        try:
            self._dial()
        except OSError as error:
            if (
                error.errno not in (errno.EAGAIN, errno.EPIPE) and not is_patient
            ):  # clawd is there: its queue is full, or it has no room
                what = error.strerror or str(error)
                hint = hint_unreachable(error.errno, "is it running there?")
                raise ControlError(f'cannot reach clawd at "{self._path}": {what}', hint) from error
            self._retry_later()

    def _dial(self) -> None:
        self.retry_at = None
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            control.connect(self._path)
            control.send(protocol.encode(self._hello))
        except OSError:
            control.close()
            raise
        self._socket = control
        for watcher in self._watchers:
            watcher.register(control, select.EPOLLIN)

    def _retry_later(self) -> None:
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        self.retry_at = now + min(max(_RETRY_SHARE * (now - self._lost_at), _RETRY_MIN_S), _RETRY_MAX_S)

    def retry(self) -> None:
        """Dial again, when `retry_at` has come."""
        try:
            self._dial()
        except OSError:
            self._retry_later()

    def watch(self, watcher: Watcher) -> None:
        """Keep the connection of the day registered with `watcher`."""
        self._watchers.append(watcher)
        if self._socket is not None:
            watcher.register(self._socket, select.EPOLLIN)

    def pump(self) -> bool:
        """Read what is there; True when clawd just named the session. Raises ControlError when it never will."""
        named = False
        while self._socket is not None:
            try:
                packet = self._socket.recv(protocol.MESSAGE_MAX + 1)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self._lose()
                return False
            try:
                message = protocol.decode(packet, (protocol.Welcome, protocol.Failure))
            except VersionMismatch as error:
                raise other_version(error) from error
            except ProtocolError as error:
                raise ControlError(f"clawd answered nonsense: {error}") from error
            if isinstance(message, protocol.Welcome):
                self.name = message.session
                self.refusal = ""
                self._lost_at = None
                named = True
            elif isinstance(message, protocol.Failure):
                if message.code in _FINAL:
                    raise ControlError(f"clawd refused this client: {message.text} ({message.code})")
                self.refusal = f"{message.text} ({message.code})"
                self._lose()
                return False
        return named

    def renew(self) -> None:
        """Say hello again: clawd does not know this session."""
        if self.name is not None:
            self._lose()

    def _lose(self) -> None:
        self.close()
        self._retry_later()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.name = None
        self.retry_at = None
        if self._socket is not None:
            for watcher in self._watchers:
                if not watcher.closed:
                    watcher.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def disown(self) -> None:
        """Drop a forked child's copy, which would hide its parent's death from clawd. The parent's goes on."""
        if self._socket is not None:
            os.close(self._socket.detach())  # not unregistered: the epoll is the parent's too
            self._socket = None
