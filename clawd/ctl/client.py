# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon over its control socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from clawd import protocol
from clawd.errors import ControlError

ANSWER_MAX = 1 << 20
TIMEOUT_S = 5.0


class Unreachable(ControlError):
    """Nothing answers on the control socket."""


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
            raise Unreachable(
                f'cannot reach clawd at "{path}": {reason}', "is it running, and is this its --runtime-dir?"
            ) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, request: protocol.Message) -> dict[str, Any]:
        """The answer to one request. Raises Unreachable when none comes, ControlError for a refusal or nonsense."""
        try:
            self._socket.send(protocol.encode(request))
            packet = self._socket.recv(ANSWER_MAX)
        except TimeoutError as error:
            raise Unreachable(f"clawd did not answer within {TIMEOUT_S:.0f} s", "see its log") from error
        except OSError as error:
            raise Unreachable(f"clawd did not answer: {error.strerror}") from error
        if not packet:
            raise Unreachable("clawd closed the connection", "see its log")
        try:
            answer = json.loads(packet)
        except ValueError as error:
            raise ControlError("clawd's answer is not JSON", "is it of another version?") from error
        if type(answer) is not dict or answer.get("op") not in (request.op, "error"):
            raise ControlError("clawd's answer makes no sense", "is it of another version?")
        if answer["op"] == "error":
            raise ControlError(f"clawd refused: {answer.get('text')}")
        return answer

    def streams(self) -> Iterator[dict[str, Any]]:
        """Every stream's row, page by page."""
        start: int | None = 0
        while start is not None:
            answer = self.ask(protocol.Streams(start))
            yield from answer["streams"]
            start = answer["next"]
