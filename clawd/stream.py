# SPDX-License-Identifier: Apache-2.0
"""The tokens of one answer, as an engine writes them."""

from __future__ import annotations

import errno
import struct

from clawd.core import held, lib
from clawd.errors import ClawdError, RingFull, StreamClosed, StreamRefused
from clawd.ring import Ring, deadline_of, encoded, text_bytes

CLOSE_BLOCK = 5.0
"""Seconds that closing a stream waits for room unless told otherwise."""
TEXT_MAX = 2**31 - 1
"""Bytes: what an int holds."""
NOBODY = bytes(lib.CLAW_PY_STREAM_BYTES)
"""Nobody's struct claw_stream."""

Text = str | bytes | bytearray | memoryview

# Without argtypes ctypes passes bytes and int as they are, which saves 0.2 µs a call; the C side takes int to match.
_write = held.claw_py_write
_stopped = held.claw_py_stopped
_close_stream = held.claw_py_close_stream
_text_cut = held.claw_py_text_cut

_CANCELLED = lib.CLAW_STOPPED_CANCELLED
_REFUSALS = {
    lib.CLAW_STOPPED_EXISTS: ("exists", "the name is live or still kept"),
    lib.CLAW_STOPPED_LIMIT: ("limit", "too many streams"),
    lib.CLAW_STOPPED_NO_SPACE: ("no_space", "the spool is full"),
    lib.CLAW_STOPPED_DRAINING: ("stopping", "clawd is about to stop"),
}


def bytes_of(text: object) -> bytes:
    """Raises TypeError, ValueError."""
    if type(text) is bytes:
        data = text
    elif isinstance(text, str):
        data = text.encode()
    elif isinstance(text, bytes | bytearray | memoryview):
        data = bytes(text)
    else:
        raise TypeError(f"text must be str or bytes, not {type(text).__name__}")
    if len(data) > TEXT_MAX:
        raise ValueError(f"text of {len(data)} bytes is longer than {TEXT_MAX}; write it in parts")
    return data


class Stream:
    """The tokens of one answer, made by `Producer.open`. Any thread may use it."""

    __slots__ = ("_final", "_raw", "_ref", "_ring", "_told", "name")

    def __init__(self, ring: Ring, name: str, raw: bytes) -> None:
        self.name = name
        self._ring = ring
        self._ref = ring.ref
        self._raw = raw  # a struct claw_stream; zeros once closed, which the core refuses
        self._final = 0  # why it had been stopped when it was closed
        self._told = False  # a refusal was raised

    def __repr__(self) -> str:
        return f"<Stream {self.name!r} {'closed' if self._raw is NOBODY else self.refused or 'open'}>"

    def write(self, text: Text, *, urgent: bool = False, count: int = 1, block: float | None = None) -> bool:
        """Write one token (`count`: how many it stands for). False: a reader cancelled, the text was dropped.

        What finds no room in the ring waits in this process (`Producer.backlog`). Only when that is full too there is
        something to wait for: with `block` for up to that many seconds, then, or without it at once, RingFull is
        raised, the text is dropped, and its readers are told that so much is missing.
        Raises RingFull, StreamRefused, RingLost, StreamClosed, ForkedError.
        """
        data = text.encode() if type(text) is str else bytes_of(text)
        deadline = None if block is None else deadline_of("block", block)
        if count != 1 or len(data) > TEXT_MAX:
            bytes_of(data)
            if type(count) is not int or not 0 <= count < 2**31:
                raise ValueError(f"count must be an integer from 0 to {2**31 - 1}, not {count!r}")
        result = _write(self._ref, self._raw, data, len(data), 1 if urgent else 0, count)
        if result == 1:
            return True
        return self._write_on(result, data, 1 if urgent else 0, count, deadline)

    def _write_on(self, result: int, data: bytes, flags: int, count: int, deadline: float | None) -> bool:
        ring = self._ring
        if result == -errno.EMSGSIZE:
            return self._write_parts(data, flags, count, deadline)
        try:
            while result == -errno.EAGAIN:
                ring.wait(text_bytes(self._ref, data, len(data)) + lib.CLAW_PY_LOST_BYTES, deadline)
                result = _write(self._ref, self._raw, data, len(data), flags, count)
        except RingFull:
            self._lose(data)
            raise
        if ring.took(result):
            return True
        if result == -errno.ECANCELED and self._is_cancelled():
            return False
        raise self._failure(result)

    def _lose(self, data: bytes) -> None:
        self._ring.lose(self._raw, struct.pack("=I", len(data)), data)

    def _write_parts(self, data: bytes, flags: int, count: int, deadline: float | None) -> bool:
        size = self._ring.capacity
        if deadline is None:
            self._lose(data)
            raise RingFull(
                f"text of {len(data)} bytes is longer than the {self._ring.room} of {size}",
                "write it in parts, with block=, or attach with a larger buffer_size",
            )
        part = size // 2  # with the headers of its records it always fits when there is nothing else
        start = 0
        while start < len(data):
            piece = data[start : start + part + 1]
            piece = piece[: _text_cut(piece, len(piece), part)]
            result = _write(self._ref, self._raw, piece, len(piece), flags, 0 if start else count)
            try:
                if not self._write_on(result, piece, flags, 0 if start else count, deadline):
                    return False
            except RingFull as error:
                self._lose(data[start + len(piece) :])
                raise RingFull(f"{error.message} after {start} of {len(data)} bytes", error.hint, start) from None
            start += len(piece)
        return True

    def close(self, reason: str = "stop", *, block: float | None = CLOSE_BLOCK) -> None:
        """End the stream for `reason` (1 to 255 bytes: `stop`, `length`, `error:…`).

        Waits up to `block` seconds when there is no room at all, then raises RingFull: the stream is then still open.
        Raises StreamRefused if clawd had refused the stream and no call has said so yet.
        """
        data = encoded("reason", reason, lib.CLAW_REASON_MAX)
        deadline = deadline_of("block", block)
        raw = self._raw
        while True:
            stopped = _stopped(self._ref, raw)
            result = _close_stream(self._ref, raw, data, len(data))
            if result != -errno.EAGAIN:
                break
            self._ring.wait(lib.CLAW_RECORD_ALIGN * 2 + len(data) + lib.CLAW_PY_LOST_BYTES, deadline)
        if result == -errno.ECHILD:
            raise self._failure(result)
        failure = None if self._ring.took(result) else self._failure(result)
        if self._raw is not NOBODY:
            self._final = max(stopped, 0)
            self._raw = NOBODY
        if failure:
            raise failure
        if stopped in _REFUSALS and not self._told:
            raise self._refusal(stopped)

    @property
    def cancelled(self) -> bool:
        """A reader has cancelled this stream: stop generating. One memory load."""
        result = _stopped(self._ref, self._raw)
        return bool(result == _CANCELLED) if result >= 0 else self._is_cancelled()

    @property
    def refused(self) -> str | None:
        """Why clawd refused to open it: `exists`, `limit`, `no_space` or `stopping`; None = it did not, so far."""
        code = _REFUSALS.get(self._reason())
        return code[0] if code else None

    def _is_cancelled(self) -> bool:
        return bool(self._reason() == _CANCELLED)

    def _reason(self) -> int:
        result: int = _stopped(self._ref, self._raw)
        if result == -errno.ECHILD:
            raise self._failure(result)
        return result if result >= 0 else self._final

    def _refusal(self, stopped: int) -> StreamRefused:
        self._told = True
        code, why = _REFUSALS.get(stopped, ("limit", f"reason {stopped}"))
        return StreamRefused(f'clawd refused stream "{self.name}": {why}', code)

    def _failure(self, result: int) -> ClawdError:
        if result == -errno.EBADF:
            return StreamClosed(f'stream "{self.name}" is closed')
        if result == -errno.ECANCELED:
            return self._refusal(self._reason())
        return self._ring.failure(result)
