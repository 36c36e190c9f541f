# SPDX-License-Identifier: Apache-2.0
"""The SDK of an inference process: attach to clawd, open streams, write tokens. The ring's rules are all in
csrc/clawd_ring.h; here are types, errors and waiting. Never talks to clawd but to attach.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint64, create_string_buffer
from time import monotonic
from typing import Any, NamedTuple

from clawd.core import ffi, held, lib
from clawd.errors import (
    AttachRefused,
    ClawdError,
    ControlError,
    ForkedError,
    ProducerError,
    RingFull,
    RingLost,
    StreamClosed,
    StreamRefused,
)

__all__ = ["Hints", "Producer", "Stream"]

CLOSE_BLOCK = 5.0
"""Seconds that closing a stream waits for room unless told otherwise."""

Text = str | bytes | bytearray | memoryview

# Without argtypes ctypes passes bytes and int as they are, which saves 0.2 µs a call; the C side takes int to match.
_write = held.claw_py_write
_write_many = held.claw_py_write_many
_stopped = held.claw_py_stopped
_close_stream = held.claw_py_close_stream
_state = held.claw_py_state
_hints = held.claw_py_hints
_poll_fd = held.claw_py_poll_fd
_text_cut = held.claw_py_text_cut
_open = held.claw_py_open
_open.argtypes = [c_char_p, c_char_p, c_int, c_char_p, c_int, c_uint64, c_char_p]
_text_bytes = held.claw_py_text_bytes
_text_bytes.argtypes = [c_char_p, c_char_p, c_int]
_text_bytes.restype = c_int64

_CANCELLED = lib.CLAW_STOPPED_CANCELLED
_REFUSALS = {
    lib.CLAW_STOPPED_EXISTS: ("exists", "the name is live or still kept"),
    lib.CLAW_STOPPED_LIMIT: ("limit", "too many streams"),
    lib.CLAW_STOPPED_NO_SPACE: ("no_space", "the spool is full"),
}
_ATTACH_CODES = {
    lib.CLAW_ATTACH_LAYOUT: "layout",
    lib.CLAW_ATTACH_DENIED: "denied",
    lib.CLAW_ATTACH_LIMIT: "limit",
    lib.CLAW_ATTACH_NO_SPACE: "no_space",
    lib.CLAW_ATTACH_BAD_REQUEST: "bad_request",
    lib.CLAW_ATTACH_STOPPING: "stopping",
}
_STATES = {
    lib.CLAW_STATE_OPEN: "open",
    lib.CLAW_STATE_QUARANTINED: "quarantined",
    lib.CLAW_STATE_CLOSED: "let go by clawd",
    -errno.ECHILD: "forked",
    -errno.ENOTCONN: "closed",
}
_NOBODY = bytes(lib.CLAW_PY_STREAM_BYTES)
_TEXT_MAX = 2**31 - 1  # what an int holds
_SLICE = 0.05  # seconds of waiting without the interpreter: how late a signal handler may run


def _encoded(what: str, value: object, longest: int) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be str, not {type(value).__name__}")
    data = value.encode()
    if not 1 <= len(data) <= longest:
        raise ValueError(f"{what} must be 1 to {longest} bytes of UTF-8, not {len(data)}")
    return data


def _bytes(text: object) -> bytes:
    if type(text) is bytes:
        data = text
    elif isinstance(text, str):
        data = text.encode()
    elif isinstance(text, bytes | bytearray | memoryview):
        data = bytes(text)
    else:
        raise TypeError(f"text must be str or bytes, not {type(text).__name__}")
    if len(data) > _TEXT_MAX:
        raise ValueError(f"text of {len(data)} bytes is longer than {_TEXT_MAX}; write it in parts")
    return data


def _deadline(block: float | None) -> float | None:
    if block is None:
        return None
    if isinstance(block, bool) or not isinstance(block, int | float):
        raise TypeError(f"block must be seconds or None, not {type(block).__name__}")
    if not block >= 0:
        raise ValueError(f"block must be at least 0 seconds, not {block}")
    return monotonic() + min(block, threading.TIMEOUT_MAX)


class Hints(NamedTuple):
    """What clawd would like the engine to do."""

    target_rate: int  # tokens a stream should make in 1,000 s; 0 = no wish
    degrade: int  # 0 none … 3 most: make answers cheaper, as the engine can
    reason: int  # a number for the log; 0 = none given


class Stream:
    """The tokens of one answer, made by `Producer.open`. Any thread may use it."""

    __slots__ = ("_final", "_producer", "_raw", "_ref", "_told", "name")

    def __init__(self, producer: Producer, name: str, raw: bytes) -> None:
        self.name = name
        self._producer = producer
        self._ref = producer._ref
        self._raw = raw  # a struct claw_stream; zeros once closed, which the core refuses
        self._final = 0  # why it had been stopped when it was closed
        self._told = False  # a refusal was raised

    def __repr__(self) -> str:
        return f"<Stream {self.name!r} {'closed' if self._raw is _NOBODY else self.refused or 'open'}>"

    def write(self, text: Text, *, urgent: bool = False, count: int = 1, block: float | None = None) -> bool:
        """Write one token (`count`: how many it stands for). False: a reader cancelled, the text was dropped.

        With `block`, wait up to that many seconds for room; a text longer than the whole ring then goes in parts.
        Raises RingFull, StreamRefused, RingLost, StreamClosed, ForkedError.
        """
        data = text.encode() if type(text) is str else _bytes(text)
        deadline = None if block is None else _deadline(block)
        if count != 1 or len(data) > _TEXT_MAX:
            _bytes(data)
            if type(count) is not int or not 0 <= count < 2**31:
                raise ValueError(f"count must be an integer from 0 to {2**31 - 1}, not {count!r}")
        result = _write(self._ref, self._raw, data, len(data), 1 if urgent else 0, count)
        if result >= 0:
            return True
        return self._write_on(result, data, 1 if urgent else 0, count, deadline)

    def _write_on(self, result: int, data: bytes, flags: int, count: int, deadline: float | None) -> bool:
        producer = self._producer
        if result == -errno.EMSGSIZE:
            return self._write_parts(data, flags, count, deadline)
        while result == -errno.EAGAIN:
            producer._wait(_text_bytes(self._ref, data, len(data)), deadline)
            result = _write(self._ref, self._raw, data, len(data), flags, count)
        if result >= 0:
            return True
        if result == -errno.ECANCELED and self._is_cancelled():
            return False
        raise producer._failure(result, self)

    def _write_parts(self, data: bytes, flags: int, count: int, deadline: float | None) -> bool:
        size = self._producer.buffer_size
        if deadline is None:
            raise RingFull(
                f"text of {len(data)} bytes is longer than the ring of {size}",
                "write it in parts, with block=, or attach with a larger buffer_size",
            )
        part = size // 2  # with the headers of its records it always fits an empty ring
        start = 0
        while start < len(data):
            piece = data[start : start + part + 1]
            piece = piece[: _text_cut(piece, len(piece), part)]
            result = _write(self._ref, self._raw, piece, len(piece), flags, 0 if start else count)
            try:
                if result < 0 and not self._write_on(result, piece, flags, 0 if start else count, deadline):
                    return False
            except RingFull as error:
                raise RingFull(f"{error.message} after {start} of {len(data)} bytes", error.hint, start) from None
            start += len(piece)
        return True

    def close(self, reason: str = "stop", *, block: float | None = CLOSE_BLOCK) -> None:
        """End the stream for `reason` (1 to 255 bytes: `stop`, `length`, `error:…`).

        Raises RingFull when there is no room in `block` seconds: the stream is then still open. Raises StreamRefused if
        clawd had refused the stream and no call has said so yet.
        """
        data = _encoded("reason", reason, lib.CLAW_REASON_MAX)
        deadline = _deadline(block)
        raw = self._raw
        while True:
            stopped = _stopped(self._ref, raw)
            result = _close_stream(self._ref, raw, data, len(data))
            if result != -errno.EAGAIN:
                break
            self._producer._wait(lib.CLAW_RECORD_ALIGN * 2 + len(data), deadline)
        if result == -errno.ECHILD:
            raise self._producer._failure(result, self)
        failure = self._producer._failure(result, self) if result < 0 else None
        if self._raw is not _NOBODY:
            self._final = max(stopped, 0)
            self._raw = _NOBODY
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
        """Why clawd refused to open the stream: `exists`, `limit` or `no_space`; None = it did not, so far."""
        code = _REFUSALS.get(self._reason())
        return code[0] if code else None

    def _is_cancelled(self) -> bool:
        return bool(self._reason() == _CANCELLED)

    def _reason(self) -> int:
        result: int = _stopped(self._ref, self._raw)
        if result == -errno.ECHILD:
            raise self._producer._failure(result, self)
        return result if result >= 0 else self._final

    def _refusal(self, stopped: int) -> StreamRefused:
        self._told = True
        code, why = _REFUSALS.get(stopped, ("limit", f"reason {stopped}"))
        return StreamRefused(f'clawd refused stream "{self.name}": {why}', code)


class Producer:
    """A ring to the clawd on this host. Any thread may use it; a forked child must attach one of its own.

    `runtime_dir` defaults to $CLAWD_RUNTIME_DIR, then /run/clawd. `buffer_size` is the ring's bytes, a power of two;
    None = clawd's default. Raises ControlError when clawd cannot be reached, AttachRefused when it says no.
    """

    def __init__(
        self, name: str, runtime_dir: str | os.PathLike[str] | None = None, buffer_size: int | None = None
    ) -> None:
        label = _encoded("name", name, lib.CLAW_PRODUCER_NAME - 1)
        if runtime_dir is None:
            runtime_dir = os.environ.get("CLAWD_RUNTIME_DIR") or "/run/clawd"
        directory = os.fsencode(runtime_dir)
        if b"\0" in label or b"\0" in directory:
            raise ValueError("name and runtime_dir must not hold NUL")
        self.name = name
        pointer = lib.claw_py_create()
        if not pointer:
            raise MemoryError("no memory for a producer")
        # freed only with the last stream that refers to this object: a call after close() finds it and is refused
        self._core = ffi.gc(pointer, lib.claw_py_destroy)
        self._ref = struct.pack("P", int(ffi.cast("uintptr_t", pointer)))
        self._step: tuple[tuple[Stream, ...], bytes] = ((), b"")  # of the last write_many, always as a pair
        self._waits = threading.Lock()  # guards the mapping against close() while a thread waits without the GIL
        self.buffer_size = self._attach(label, directory, _checked_size(buffer_size))
        """Bytes of the ring."""

    def _attach(self, label: bytes, directory: bytes, ring_bytes: int) -> int:
        answer = ffi.new("struct claw_attached *")
        result = lib.claw_py_attach(self._core, directory, label, ring_bytes, answer)
        if result == 0:
            self._record_max = int(answer.record_max)
            return int(answer.ring_bytes)
        path = os.fsdecode(directory) + "/control.sock"
        if answer.status in _ATTACH_CODES:
            code = _ATTACH_CODES[answer.status]
            text = " ".join(ffi.string(answer.text).decode(errors="replace").split())
            raise AttachRefused(f'clawd refused producer "{self.name}": {text or code}', code)
        if result == -errno.EPROTO or answer.status:
            raise ControlError(f"no sense in what clawd at {path} answered", "do both sides have the same version?")
        raise ControlError(f"cannot reach clawd at {path}: {os.strerror(-result)}", "is it running?")

    def __repr__(self) -> str:
        state = _state(self._ref)
        return f"<Producer {self.name!r} {_STATES.get(state, state)}, ring of {self.buffer_size} bytes>"

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(
        self,
        name: str,
        *,
        requested_ns: int | None = None,
        meta: dict[str, Any] | None = None,
        block: float | None = None,
    ) -> Stream:
        """Open a stream. `requested_ns`: CLOCK_MONOTONIC when the answer was asked for; `meta`: a dict for its readers.

        Does not wait for clawd: a refusal is raised by a later `write` or `close`. Raises RingFull when there is no
        room within `block` seconds, StreamRefused (`limit`) when this producer has too many open.
        """
        label = _encoded("stream name", name, lib.CLAW_NAME_MAX)
        about = _meta(meta)
        room = self._record_max - ffi.sizeof("struct claw_open") - len(label)
        if len(about) > room:
            raise ValueError(f"meta must be at most {room} bytes of JSON here, not {len(about)}")
        if requested_ns is not None and (type(requested_ns) is not int or not 0 <= requested_ns < 2**64):
            raise ValueError(f"requested_ns must be nanoseconds or None, not {requested_ns!r}")
        deadline = _deadline(block)
        raw = create_string_buffer(lib.CLAW_PY_STREAM_BYTES)
        while True:
            result = _open(self._ref, label, len(label), about, len(about), requested_ns or 0, raw)
            if result == 0:
                return Stream(self, name, raw.raw)
            if result == -errno.EMFILE:
                raise StreamRefused(
                    f'cannot open stream "{name}": {lib.CLAW_HANDLE_COUNT} are open on this producer', "limit"
                )
            if result != -errno.EAGAIN:
                raise self._failure(result)
            self._wait(self._record_max + 2 * lib.CLAW_RECORD_ALIGN, deadline)

    def write_many(self, items: Sequence[tuple[Stream, Text]], *, block: float | None = None) -> int:
        """Write one token to each of many streams, in one commit with at most one wake-up: one call an engine step.

        All or nothing, but texts for cancelled streams are dropped; returns how many were not. If clawd has refused one
        of the streams, StreamRefused is raised after the others' texts were written.
        """
        deadline = None if block is None else _deadline(block)
        if not items:
            return 0
        try:
            streams, texts = zip(*items)  # noqa: B905  strict= costs, and pairs have no other length
            # an engine's next step mostly has the same streams; one closed since is refused by the core
            same, raws = self._step
            if streams != same:
                raws = b"".join([stream._raw for stream in streams])
        except (TypeError, ValueError, AttributeError):
            raise TypeError("items must be pairs of a stream and its text") from None
        parts: Sequence[Any] = texts
        try:
            text = "".join(texts)
            if text.isascii():
                data = text.encode()
            else:
                parts = list(map(str.encode, texts))
                data = b"".join(parts)
        except TypeError:  # some are bytes
            if set(map(type, texts)) != {bytes}:
                parts = [_bytes(part) for part in texts]
            data = b"".join(parts)
        lens = array("I", map(len, parts))
        if len(data) > _TEXT_MAX:
            raise ValueError(f"texts of {len(data)} bytes are longer than {_TEXT_MAX}; write them in parts")
        self._step = streams, raws
        count = len(streams)
        result: int = _write_many(self._ref, raws, lens.tobytes(), count, data, len(data))
        if result == count:
            return count
        return self._write_many_on(result, streams, raws, lens, data, deadline)

    def _write_many_on(
        self,
        result: int,
        streams: tuple[Stream, ...],
        raws: bytes,
        lens: array[int],
        data: bytes,
        deadline: float | None,
    ) -> int:
        if result == -errno.EMSGSIZE and deadline is not None:
            return self._write_each(streams, lens, data, deadline)
        while result == -errno.EAGAIN:
            self._wait(self._bytes_of(lens, data), deadline)
            result = _write_many(self._ref, raws, lens.tobytes(), len(streams), data, len(data))
        if result < 0:
            closed = next((stream for stream in streams if stream._raw is _NOBODY), None)
            raise self._failure(result, closed)
        for stream in streams:
            if stream.refused:
                raise stream._refusal(stream._reason())
        return result

    def _bytes_of(self, lens: array[int], data: bytes) -> int:
        total = start = 0
        for length in lens:
            total += _text_bytes(self._ref, data[start : start + length], length)
            start += length
        return total

    def _write_each(self, streams: tuple[Stream, ...], lens: array[int], data: bytes, deadline: float) -> int:
        """What does not fit an empty ring at once goes in one by one."""
        if not all(stream._producer is self for stream in streams):
            raise self._failure(-errno.EBADF)
        for stream in streams:
            if stream._raw is _NOBODY:
                raise self._failure(-errno.EBADF, stream)
        written = start = 0
        refusal = None
        for index, (stream, length) in enumerate(zip(streams, lens, strict=True)):
            try:
                written += stream.write(data[start : start + length], block=max(deadline - monotonic(), 0.0))
            except StreamRefused as error:
                refusal = error
            except RingFull as error:
                raise RingFull(f"{error.message}; item {index} of {len(lens)}", error.hint, index) from None
            start += length
        if refusal:
            raise refusal
        return written

    @property
    def hints(self) -> Hints | None:
        """What clawd would like the engine to do, for a look once a step; None = nothing.

        clawd does not set hints yet: always None for now. Raises StreamClosed, ForkedError.
        """
        raw = create_string_buffer(lib.CLAW_PY_HINT_BYTES)
        result = _hints(self._ref, raw)
        if result < 0 and result != -errno.EAGAIN:  # that one: it changed at every look, so there is none to tell
            raise self._failure(result)
        hints = Hints(*struct.unpack("=III", raw.raw))
        return hints if any(hints) else None

    def fileno(self) -> int:
        """A descriptor for select, poll or asyncio: readable once clawd is gone or has let go of the ring.

        Read nothing from it. Cancels do not show there: look at `Stream.cancelled`. Raises StreamClosed, ForkedError.
        """
        result: int = _poll_fd(self._ref)
        if result < 0:
            raise self._failure(result)
        return result

    def close(self) -> None:
        """Give the ring back. Streams still open end as `producer_lost`. Any number of times; harmless after a fork."""
        if _state(self._ref) == -errno.ECHILD:
            return
        self._step = ((), b"")
        held.claw_py_stop(self._ref)  # threads that wait for room leave, and no call touches the mapping from here on
        with self._waits:
            held.claw_py_detach(self._ref)

    def _wait(self, need: int, deadline: float | None) -> None:
        """Return when a full ring is worth another try. Raises RingFull when the deadline has passed."""
        left = -1.0 if deadline is None else deadline - monotonic()
        if left <= 0 or not self._waits.acquire(timeout=left):
            raise RingFull(
                f'the ring of producer "{self.name}" ({self.buffer_size} bytes) is full',
                "is clawd running, and reading? pass block= to wait, or attach with a larger buffer_size",
            )
        try:
            lib.claw_py_wait_room(self._core, max(0, min(need, self.buffer_size)), int(min(left, _SLICE) * 1e9))
        finally:
            self._waits.release()

    def _failure(self, result: int, stream: Stream | None = None) -> ClawdError:
        what = f'stream "{stream.name}"' if stream else f'producer "{self.name}"'
        if result == -errno.ECHILD:
            return ForkedError(f'producer "{self.name}" belongs to the parent of this process', "attach one here")
        if result == -errno.ENOTCONN:
            return StreamClosed(f'producer "{self.name}" is closed')
        if result == -errno.EBADF:
            if stream and stream._producer is self:
                return StreamClosed(f"{what} is closed")
            return StreamClosed(f'a stream is closed, or not of producer "{self.name}"')
        if result == -errno.ESHUTDOWN:
            state = _STATES.get(_state(self._ref), "lost")
            return RingLost(f'the ring of producer "{self.name}" is {state}', "attach a new producer")
        if result == -errno.EPROTO:
            return RingLost(f'the ring of producer "{self.name}" is broken: its acknowledgement makes no sense')
        if result == -errno.ECANCELED and stream:
            return stream._refusal(stream._reason())
        if result == -errno.EMSGSIZE:
            return RingFull(f"the texts do not fit the ring of {self.buffer_size} bytes", "pass block=, or write fewer")
        return ProducerError(f"{what}: {os.strerror(-result)}")


def _checked_size(size: int | None) -> int:
    low, high = lib.CLAW_RING_BYTES_MIN, lib.CLAW_RING_BYTES_MAX
    if size is None:
        return 0
    if type(size) is not int or not low <= size <= high or size & (size - 1):
        raise ValueError(f"buffer_size must be a power of two from {low} to {high} bytes, not {size!r}")
    return size


def _meta(meta: dict[str, Any] | None) -> bytes:
    if meta is None:
        return b""
    if not isinstance(meta, dict):
        raise TypeError(f"meta must be a dict, not {type(meta).__name__}")
    return json.dumps(meta, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
