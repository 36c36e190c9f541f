# SPDX-License-Identifier: Apache-2.0
"""A producer's ring: attaching, waiting, what its results mean, its end. The rules are all in csrc/clawd_ring.h."""

from __future__ import annotations

import errno
import os
import struct
import threading
from ctypes import c_char_p, c_int, c_int64, create_string_buffer
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
    hint_unreachable,
)
from clawd.flusher import Flusher
from clawd.watcher import Watcher

OVERFLOW_BYTES = int(lib.CLAW_PY_OVERFLOW_BYTES)
BEHIND = int(lib.CLAW_PY_BEHIND)
"""Added to a result while the overflow holds something."""

# Without argtypes ctypes passes bytes and int as they are, which saves 0.2 µs a call; the C side takes int to match.
_state = held.claw_py_state
_flush = held.claw_py_flush
_backlog = held.claw_py_backlog
_lose = held.claw_py_lose
_take_over = held.claw_py_take_over
_take_over.argtypes = [c_char_p, c_int, c_char_p, c_int, c_int]
text_bytes = held.claw_py_text_bytes
"""Bytes a text takes in the ring."""
text_bytes.argtypes = [c_char_p, c_char_p, c_int]
text_bytes.restype = c_int64

_ATTACH_CODES = {
    lib.CLAW_ATTACH_LAYOUT: "layout",
    lib.CLAW_ATTACH_DENIED: "denied",
    lib.CLAW_ATTACH_LIMIT: "limit",
    lib.CLAW_ATTACH_NO_SPACE: "no_space",
    lib.CLAW_ATTACH_BAD_REQUEST: "bad_request",
    lib.CLAW_ATTACH_STOPPING: "stopping",
    lib.CLAW_ATTACH_LOST: "lost",
}
_STATES = {
    lib.CLAW_STATE_OPEN: "open",
    lib.CLAW_STATE_QUARANTINED: "quarantined",
    lib.CLAW_STATE_CLOSED: "let go by clawd",
    -errno.ECHILD: "forked",
    -errno.ENOTCONN: "closed",
}
_SLICE = 0.05  # seconds of waiting without the interpreter: how late a signal handler may run
_SLEEP_NS = 10_000_000_000  # of the flusher, which sees to no signals; the ring's end cuts it short


class Backlog(NamedTuple):
    """What was written and is not committed yet."""

    accepted: int  # records that found no room in the ring: they die with this process
    in_ring: int  # bytes in the ring that clawd has not taken: they survive this process and clawd


def encoded(what: str, value: object, longest: int) -> bytes:
    """A text of 1 to `longest` bytes, without control characters: clawd quarantines a ring over those, because they
    would end up in logs and terminals. Raises TypeError, ValueError.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be str, not {type(value).__name__}")
    data = value.encode()
    if not 1 <= len(data) <= longest:
        raise ValueError(f"{what} must be 1 to {longest} bytes of UTF-8, not {len(data)}")
    if any(byte < 0x20 or byte == 0x7F for byte in data):
        raise ValueError(f"{what} must not hold control characters: {value!r}")
    return data


def deadline_of(what: str, seconds: object) -> float | None:
    """Until when; None stays None. Raises TypeError, ValueError."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{what} must be seconds or None, not {type(seconds).__name__}")
    if not seconds >= 0:
        raise ValueError(f"{what} must be at least 0 seconds, not {seconds}")
    return monotonic() + min(seconds, threading.TIMEOUT_MAX)


def _size(what: str, size: object, low: int, high: int) -> int:
    if type(size) is not int or not low <= size <= high or size & (size - 1):
        raise ValueError(f"{what} must be a power of two from {low} to {high} bytes, not {size!r}")
    return size


class Ring:
    """One attached ring. Its calls are made with the interpreter held, which is the lock clawd_ring.h asks for."""

    def __init__(self, name: str, directory: bytes, buffer_size: int | None, overflow_bytes: int) -> None:
        label = encoded("name", name, lib.CLAW_PRODUCER_NAME - 1)
        if b"\0" in directory:
            raise ValueError("runtime_dir must not hold NUL")
        low = lib.CLAW_RING_BYTES_MIN
        asked = 0 if buffer_size is None else _size("buffer_size", buffer_size, low, lib.CLAW_RING_BYTES_MAX)
        if overflow_bytes != 0 or type(overflow_bytes) is not int:
            _size("overflow_bytes must be 0, or it", overflow_bytes, low, lib.CLAW_PY_OVERFLOW_BYTES_MAX)
        self.name = name
        pointer = lib.claw_py_create()
        if not pointer:
            raise MemoryError("no memory for a producer")
        # freed only with the last stream that refers to this object: a call after close() finds it and is refused
        self._core = ffi.gc(pointer, lib.claw_py_destroy)
        self.ref = struct.pack("P", int(ffi.cast("uintptr_t", pointer)))
        self._flusher = Flusher()
        self._inside = 0  # threads that are in the mapping without the interpreter
        self._idle = threading.Condition()  # guards it: close() waits for them
        self._lost = ""  # clawd's words, when the one that was started meanwhile does not have this ring
        answer = self._attach(label, directory, asked)
        self.record_max = int(answer.record_max)
        self.buffer_size = int(answer.ring_bytes)
        self.overflow_bytes = overflow_bytes
        self.capacity = max(self.buffer_size, overflow_bytes)
        held.claw_py_set_overflow(self.ref, overflow_bytes)
        self._watcher = Watcher(self, directory, held.claw_py_poll_fd(self.ref), name)

    def _attach(self, label: bytes, directory: bytes, ring_bytes: int) -> Any:
        answer = ffi.new("struct claw_attached *")
        result = lib.claw_py_attach(self._core, directory, label, ring_bytes, answer)
        if result == 0:
            return answer
        path = os.fsdecode(directory) + "/control.sock"
        if answer.status in _ATTACH_CODES:
            code = _ATTACH_CODES[answer.status]
            raise AttachRefused(f'clawd refused producer "{self.name}": {_words(answer) or code}', code)
        if result == -errno.EPROTO or answer.status:
            raise ControlError(f"no sense in what clawd at {path} answered", "do both sides have the same version?")
        hint = hint_unreachable(-result, "is it running?")
        raise ControlError(f"cannot reach clawd at {path}: {os.strerror(-result)}", hint)

    @property
    def room(self) -> str:
        """What takes the most at once, in a word."""
        return "overflow" if self.overflow_bytes > self.buffer_size else "ring"

    @property
    def state(self) -> str:
        """In one word."""
        state = _state(self.ref)
        return _STATES.get(state, str(state))

    # --- a full ring

    def took(self, result: int) -> bool:
        """The call was carried out. What it put into the overflow is seen to."""
        if result >= BEHIND:
            self._flusher.start(self, self.name)
        return result >= 0

    def wait(self, need: int, deadline: float | None) -> None:
        """Return when a call that found no room is worth another try. Raises RingFull when the deadline has passed."""
        left = -1.0 if deadline is None else deadline - monotonic()
        if left <= 0:
            also = f" and {self.overflow_bytes} of overflow" if self.overflow_bytes else ""
            raise RingFull(
                f'the ring of producer "{self.name}" ({self.buffer_size} bytes{also}) is full',
                "is clawd running, and reading? pass block= to wait, or attach with a larger buffer_size",
            )
        self._sleep(max(0, min(need, self.capacity)), int(min(left, _SLICE) * 1e9))

    def _sleep(self, need: int, timeout_ns: int) -> None:
        with self._idle:
            self._inside += 1
        try:
            lib.claw_py_wait_room(self._core, need, timeout_ns)
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()

    def sleep(self) -> None:
        """Until the flusher can move something on."""
        self._sleep(self.buffer_size // 2, _SLEEP_NS)

    def flush(self) -> int:
        """How many records are left in the overflow once those that fit are in the ring; or a result below 0."""
        return int(_flush(self.ref))

    def backlog(self) -> Backlog | int:
        """A result below 0 when there is no ring."""
        raw = create_string_buffer(lib.CLAW_PY_BACKLOG_BYTES)
        result: int = _backlog(self.ref, raw)
        return Backlog(*struct.unpack("=QQ", raw.raw)) if result == 0 else result

    def left(self) -> int:
        """Records in the overflow."""
        backlog = self.backlog()
        return backlog.accepted if isinstance(backlog, Backlog) else 0

    def lose(self, streams: bytes, lens: bytes, data: bytes) -> None:
        """These texts are given up: the readers of their streams will be told."""
        _lose(self.ref, streams, lens, len(lens) // 4, data, len(data))

    # --- the next clawd

    def hello(self) -> bytes | None:
        """What to say to a clawd that started meanwhile; None: nothing goes on with this ring."""
        raw = create_string_buffer(ffi.sizeof("struct claw_hello"))
        return raw.raw if held.claw_py_hello_again(self.ref, raw) == 0 else None

    def take_over(self, fd: int, answer: Any, event_fd: int, count: int) -> int:
        """Go on with what it answered, as claw_take_over()."""
        result: int = _take_over(self.ref, fd, bytes(ffi.buffer(answer)), event_fd, count)
        if result == -errno.ESHUTDOWN and answer.status:
            self._lost = _words(answer) or _ATTACH_CODES.get(answer.status, "refused")
        return result

    # --- its end

    def close(self, deadline: float | None) -> None:
        """Give the ring back, once the overflow is in it or the deadline has passed. Raises RingFull, RingLost."""
        if _state(self.ref) in (-errno.ECHILD, -errno.ENOTCONN):
            return
        while (left := self.flush()) > 0 and deadline is not None and (wait := deadline - monotonic()) > 0:
            self._sleep(self.buffer_size // 2, int(min(wait, _SLICE) * 1e9))
        lost = self.left()
        failure = self.failure(left) if left < 0 else None
        self._watcher.stop()
        held.claw_py_stop(self.ref)  # threads that wait for room leave, and no call touches the mapping from here on
        with self._idle:
            self._idle.wait_for(lambda: not self._inside)
            held.claw_py_detach(self.ref)
        self._watcher.join()
        self._flusher.join()
        if not lost:
            return
        what = f"{lost} record{'s' if lost > 1 else ''} never got into the ring"
        if isinstance(failure, RingLost):
            raise RingLost(f"{failure.message}; {what}")
        raise RingFull(f'producer "{self.name}" is closed and {what}', "is clawd running, and reading?")

    def failure(self, result: int) -> ClawdError:
        """What to raise for a result below 0."""
        if result == -errno.ECHILD:
            return ForkedError(f'producer "{self.name}" belongs to the parent of this process', "attach one here")
        if result == -errno.ENOTCONN:
            return StreamClosed(f'producer "{self.name}" is closed')
        if result == -errno.EBADF:
            return StreamClosed(f'a stream is closed, or not of producer "{self.name}"')
        if result == -errno.ESHUTDOWN:
            state = f"lost: {self._lost}" if self._lost else _STATES.get(_state(self.ref), "lost")
            return RingLost(f'the ring of producer "{self.name}" is {state}', "attach a new producer")
        if result == -errno.EPROTO:
            return RingLost(f'the ring of producer "{self.name}" is broken: its acknowledgement makes no sense')
        return ProducerError(f'producer "{self.name}": {os.strerror(-result)}')


def _words(answer: Any) -> str:
    return " ".join(ffi.string(answer.text).decode(errors="replace").split())
