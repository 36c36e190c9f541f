# SPDX-License-Identifier: Apache-2.0
"""One line per event: for the journal with a field for each value, for people on stderr with the time of day. A name
from a peer can neither break a line nor reach the terminal as an escape.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from clawd.errors import ClawdError

JOURNAL = "/run/systemd/journal/socket"
"""Where journald takes entries with fields, see https://systemd.io/JOURNAL_NATIVE_PROTOCOL."""

_LOGGER = logging.getLogger("clawd")
QUIET = logging.getLogger("clawd.quiet")
"""For libraries that would log what peers do: nobody hears it."""
QUIET.disabled = True
# sd-daemon(3): what the journal takes for a line's priority
_PRIORITY = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


def field(name: str, value: Any) -> str:
    """`name=value`, the value quoted when it would not stay one printable word."""
    text = "-" if value is None else str(value)
    if not text or not text.isprintable() or any(char in text for char in " \"'=\\"):
        text = json.dumps(text, ensure_ascii=not text.isprintable())
    return f"{name}={text}"


def event(what: str, /, level: int = logging.INFO, **values: Any) -> None:
    """Log that `what` happened, with `values` in the order given: in the journal `stream` is the field STREAM=."""
    if _LOGGER.isEnabledFor(level):
        line = " ".join([what, *(field(name, value) for name, value in values.items())])
        _LOGGER.log(level, "%s", line, extra={"values": values})


def warning(what: str, /, **values: Any) -> None:
    event(what, logging.WARNING, **values)


def failure(what: str, error: BaseException, /, **values: Any) -> None:
    """Log an error. One of ours is one line; for any other the traceback follows: it is a fault of clawd."""
    ours = isinstance(error, ClawdError)
    line = " ".join([what, *(field(name, value) for name, value in values.items()), field("error", error)])
    _LOGGER.error("%s", line, exc_info=None if ours else error, extra={"values": values})


class _Formatter(logging.Formatter):
    def __init__(self, *, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%H:%M:%S")
        self.journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self.journal:
            return text
        # the journal ends an entry at each line's end, so a traceback's lines need the prefix too
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in text.splitlines())


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A log that cannot be written must not stop the relay, and there is nowhere to say so."""


class _Journal(_Handler):
    """Writes entries to journald, and lines to `stream` as long as journald does not take them."""

    def __init__(self, stream: TextIO, name: str) -> None:
        super().__init__(stream)
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        values: Mapping[str, Any] = getattr(record, "values", {})
        text = _PLAIN.format(record)
        if self._lost:
            values = {**values, "lost": self._lost}
            text += f" (and {self._lost} lines before it that the journal had no room for)"
        fields = {
            "MESSAGE": text,
            "PRIORITY": _PRIORITY.get(record.levelno, 6),
            "SYSLOG_IDENTIFIER": self._name,
            **{name.upper(): "-" if value is None else value for name, value in values.items()},
        }
        try:
            self._socket.sendto(b"".join(_encode(name, value) for name, value in fields.items()), JOURNAL)
            self._lost = 0
        except BlockingIOError:
            self._lost += 1  # the relay waits for nobody
        except OSError:
            super().emit(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        super().close()


_PLAIN = logging.Formatter("%(message)s")


def _encode(name: str, value: Any) -> bytes:
    data = str(value).encode(errors="replace")
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    # what has lines is told by its length, so a peer's name cannot forge a field
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(data)), data)


def is_journal(stream: TextIO) -> bool:
    """Whether `stream` leads to the journal: systemd names the file in $JOURNAL_STREAM, as device:inode."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def start(stream: TextIO | None = None, level: int = logging.INFO, name: str = "clawd") -> None:
    """Send events to `stream`, by default stderr; `name` is the program's. Replaces an earlier start."""
    target = sys.stderr if stream is None else stream
    journal = is_journal(target)
    handler = _Journal(target, name) if journal and os.path.exists(JOURNAL) else _Handler(target)
    handler.setFormatter(_Formatter(journal=journal))
    for earlier in _LOGGER.handlers:
        earlier.close()
    _LOGGER.handlers[:] = [handler]
    _LOGGER.setLevel(level)
    _LOGGER.propagate = False
