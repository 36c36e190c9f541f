# SPDX-License-Identifier: Apache-2.0
"""Where verbs get what they show: figures from the daemon's page, answers from its control socket."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from clawd import protocol, stats
from clawd.errors import ControlError, ProtocolError, hint_unreachable
from clawd.page import Life, Page, Unreachable

TIMEOUT_S = 5.0
A = TypeVar("A", bound=protocol.Message)


@contextmanager
def figures(runtime_dir: Path) -> Iterator[tuple[Page, Life]]:
    """The page of a daemon that runs, answering or not. Raises Unreachable when none does."""
    with Page(runtime_dir) as page:
        life = page.life()
        if life is Life.GONE:
            raise Unreachable(f'no clawd runs at "{runtime_dir}": the last one ended without notice', "see its log")
        yield page, life


def wrap(page: Page, life: Life, **rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A list as one object. `unread` counts rows whose writer stopped in the middle of them."""
    return {"version": stats.VERSION, "answering": life is Life.ANSWERING, "unread": page.unread, **rows}


class Client:
    """One connection to the control socket in `runtime_dir`. Every call waits at most 5 s."""

    def __init__(self, runtime_dir: Path) -> None:
        path = runtime_dir / protocol.CONTROL_SOCKET
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(TIMEOUT_S)
        try:
            self._socket.connect(os.fspath(path))
        except OSError as error:
            self._socket.close()
            reason = error.strerror or str(error)
            hint = hint_unreachable(error.errno, "is it running, and is this its --runtime-dir?")
            raise Unreachable(f'cannot reach clawd at "{path}": {reason}', hint) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def daemon_pid(self) -> int:
        """The process at the other end, by its number in our PID namespace; 0 when it is in none that we see."""
        pid, _uid, _gid = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def daemon_fd(self) -> int:
        """A pidfd of the clawd at the other end, for the caller to close; -1 when it cannot be seen from here."""
        pid = self.daemon_pid()
        try:
            return os.pidfd_open(pid) if pid > 0 else -1
        except OSError:
            return -1

    def ask(self, request: protocol.Message, answer: type[A]) -> A:
        """The answer to one request. Raises Unreachable when none comes, ControlError for a refusal or nonsense."""
        try:
            self._socket.send(protocol.encode(request))
            packet = self._socket.recv(protocol.ANSWER_MAX + 1)
        except TimeoutError as error:
            raise Unreachable(f"clawd did not answer within {TIMEOUT_S:.0f} s", "see its log") from error
        except OSError as error:
            raise Unreachable(f"clawd did not answer: {error.strerror}") from error
        if not packet:
            raise Unreachable("clawd closed the connection", "see its log")
        try:
            message: protocol.Message = protocol.decode(packet, (answer, protocol.Failure), protocol.ANSWER_MAX)
        except ProtocolError as error:
            raise ControlError("clawd's answer makes no sense", "is it of another version?") from error
        if isinstance(message, answer):
            return message
        assert isinstance(message, protocol.Failure)
        raise ControlError(f"{message.text} ({message.code})")
