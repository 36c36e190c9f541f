# SPDX-License-Identifier: Apache-2.0
"""Tells clawd-kernel what is asked for, and never waits for it: what cannot be told now is not told. Without a
clawd-kernel it costs one try a second while something is asked for.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from clawd import log, protocol
from clawd.errors import ProtocolError

AGAIN_NS = 1_000_000_000
SILENT_NS = 2_000_000_000
"""One that has not answered for so long does not."""

ENDED = "clawd-kernel ended"


class BoostLink:
    """`reason`: why what is asked for comes to nothing, empty when it does not."""

    def __init__(self, directory: Path | None = None) -> None:
        place = directory or Path(os.environ.get("CLAWD_KERNEL_DIR", protocol.KERNEL_DIR))
        self._path = place / protocol.KERNEL_SOCKET
        self._socket: socket.socket | None = None
        self._again_ns = 0
        self._unanswered_ns = 0
        self.reason = ""

    def ask(self, request: protocol.SetBoost, now_ns: int) -> None:
        try:
            if self._socket is None:
                if now_ns < self._again_ns:
                    return
                self._dial()
            self._take()
            assert self._socket
            self._socket.send(protocol.encode(request))
            self._unanswered_ns = self._unanswered_ns or now_ns
        except BlockingIOError:
            self.reason = "clawd-kernel is too busy to be asked"
        except (FileNotFoundError, ConnectionRefusedError):
            self._lose("clawd-kernel is not running", now_ns)
        except (OSError, ProtocolError) as error:
            self._lose(_told(error), now_ns)

    def poll(self, now_ns: int) -> None:
        """Hear what it answered."""
        if self._socket is None:
            return
        try:
            self._take()
        except (OSError, ProtocolError) as error:
            self._lose(_told(error), now_ns)
        if self._unanswered_ns and now_ns - self._unanswered_ns > SILENT_NS:
            self.reason = "clawd-kernel does not answer"

    def close(self) -> None:
        """What was asked for ends with it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _dial(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket = made
        made.connect(os.fspath(self._path))
        self._unanswered_ns = 0

    def _take(self) -> None:
        assert self._socket
        while True:
            try:
                packet = self._socket.recv(protocol.ANSWER_MAX)
            except BlockingIOError:
                return
            if not packet:
                raise ProtocolError(ENDED)
            kinds = (protocol.Boosting, protocol.Failure)
            answer: protocol.Message = protocol.decode(packet, kinds, protocol.ANSWER_MAX)
            if isinstance(answer, protocol.Failure):
                raise ProtocolError(answer.text)
            assert isinstance(answer, protocol.Boosting)
            self._unanswered_ns = 0
            self._tell(answer.reason or "")

    def _tell(self, reason: str) -> None:
        if reason and reason != self.reason:
            log.warning("weights are not flipped", reason=reason)
        self.reason = reason

    def _lose(self, reason: str, now_ns: int) -> None:
        self.close()
        self._again_ns = now_ns + AGAIN_NS
        self._tell(reason)


def _told(error: OSError | ProtocolError) -> str:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return ENDED
    return getattr(error, "strerror", None) or str(error)
