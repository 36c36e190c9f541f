# SPDX-License-Identifier: Apache-2.0
"""The SDK of an inference process: attach to clawd, open streams, write tokens. The ring's rules are all in
csrc/clawd_ring.h; here are types, errors and waiting. Talks to clawd to attach, and again when one was started anew.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_uint64, create_string_buffer
from time import monotonic
from typing import Any, NamedTuple

from clawd.core import ffi, held, lib
from clawd.errors import RingFull, RingLost, StreamRefused
from clawd.ring import BEHIND, OVERFLOW_BYTES, Backlog, Ring, deadline_of, encoded, text_bytes
from clawd.stream import NOBODY, TEXT_MAX, Stream, Text, bytes_of

__all__ = ["Backlog", "Hints", "Producer", "Stream"]

CLOSE_TIMEOUT = 5.0
"""Seconds that closing a producer waits for what found no room in the ring, unless told otherwise."""

# Without argtypes ctypes passes bytes and int as they are, which saves 0.2 µs a call; the C side takes int to match.
_write_many = held.claw_py_write_many
_hints = held.claw_py_hints
_poll_fd = held.claw_py_poll_fd
_READER = re.compile(r"(?:@|key:)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
PACES = {
    None: lib.CLAW_PACE_DEFAULT,
    "off": lib.CLAW_PACE_OFF,
    "smooth": lib.CLAW_PACE_SMOOTH,
    "steady": lib.CLAW_PACE_STEADY,
}
_open = held.claw_py_open
_open.argtypes = [c_char_p, c_char_p, c_int, c_char_p, c_int, c_char_p, c_int, c_uint64, c_int, c_char_p]


class Hints(NamedTuple):
    """What clawd would like the engine to do."""

    target_rate: int  # tokens a stream should make in 1,000 s; 0 = no wish
    degrade: int  # 0 none … 3 most: make answers cheaper, as the engine can
    reason: int  # a number for the log; 0 = none given


class Producer:
    """A ring to the clawd on this host. Any thread may use it; a forked child must attach one of its own.

    `runtime_dir` defaults to $CLAWD_RUNTIME_DIR, then /run/clawd. `buffer_size` is the ring's bytes, a power of two;
    None = clawd's default. `overflow_bytes`, a power of two or 0, is what this process keeps while the ring is full,
    from memory that is taken when needed. When clawd ends, writes go on; a thread attaches to the next one by itself.
    Raises ControlError when clawd cannot be reached, AttachRefused when it says no.
    """

    def __init__(
        self,
        name: str,
        runtime_dir: str | os.PathLike[str] | None = None,
        buffer_size: int | None = None,
        *,
        overflow_bytes: int = OVERFLOW_BYTES,
    ) -> None:
        if runtime_dir is None:
            runtime_dir = os.environ.get("CLAWD_RUNTIME_DIR") or "/run/clawd"
        self._ring = Ring(name, os.fsencode(runtime_dir), buffer_size, overflow_bytes)
        self._ref = self._ring.ref
        self._step: tuple[tuple[Stream, ...], bytes] = ((), b"")  # of the last write_many, always as a pair
        self.name = name
        self.buffer_size = self._ring.buffer_size
        """Bytes of the ring."""

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} {self._ring.state}, ring of {self.buffer_size} bytes>"

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        try:
            self.close()
        except (RingFull, RingLost) as lost:
            if error is None:
                raise
            error.add_note(str(lost))  # what went wrong first is what the caller must see

    def open(
        self,
        name: str,
        *,
        requested_ns: int | None = None,
        meta: dict[str, Any] | None = None,
        pace: str | None = None,
        readers: Sequence[str] | None = None,
        block: float | None = None,
    ) -> Stream:
        """Open a stream. `requested_ns`: CLOCK_MONOTONIC when the answer was asked for; `meta`: a dict for its readers;
        `pace`: how its tokens are spread over time, `off`, `smooth` or `steady`, None = as clawd is configured;
        `readers`: whom it is for, users and `@groups` of this host by name or number, and `key:NAME` for clients by
        tcp; None = for everybody. Root and clawd's own user may always read it; who may not read may not cancel.

        Does not wait for clawd: a refusal is raised by a later `write` or `close`. Raises RingFull when there is no
        room, also for `write`'s overflow, within `block` seconds, StreamRefused (`limit`) when this producer has too
        many open.
        """
        label = encoded("stream name", name, lib.CLAW_NAME_MAX)
        about = _meta(meta)
        whom = _readers(readers)
        room = self._ring.record_max - ffi.sizeof("struct claw_open") - len(label) - len(whom)
        if len(about) > room:
            raise ValueError(f"meta must be at most {room} bytes of JSON here, not {len(about)}")
        if requested_ns is not None and (type(requested_ns) is not int or not 0 <= requested_ns < 2**64):
            raise ValueError(f"requested_ns must be nanoseconds or None, not {requested_ns!r}")
        if pace not in PACES:
            raise ValueError(f"pace must be off, smooth, steady or None, not {pace!r}")
        deadline = deadline_of("block", block)
        raw = create_string_buffer(lib.CLAW_PY_STREAM_BYTES)
        while True:
            result = _open(
                self._ref, label, len(label), whom, len(whom), about, len(about), requested_ns or 0, PACES[pace], raw
            )
            if self._ring.took(result):
                return Stream(self._ring, name, raw.raw)
            if result == -errno.EMFILE:
                raise StreamRefused(
                    f'cannot open stream "{name}": {lib.CLAW_HANDLE_COUNT} are open on this producer', "limit"
                )
            if result != -errno.EAGAIN:
                raise self._ring.failure(result)
            self._ring.wait(self._ring.record_max + 2 * lib.CLAW_RECORD_ALIGN, deadline)

    def write_many(self, items: Sequence[tuple[Stream, Text]], *, block: float | None = None) -> int:
        """Write one token to each of many streams, in one commit with at most one wake-up: one call an engine step.

        All or nothing, but texts for cancelled streams are dropped; returns how many were not. If clawd has refused one
        of the streams, StreamRefused is raised after the others' texts were written. `block` and RingFull as `write`.
        """
        deadline = None if block is None else deadline_of("block", block)
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
                parts = [bytes_of(part) for part in texts]
            data = b"".join(parts)
        lens = array("I", map(len, parts))
        if len(data) > TEXT_MAX:
            raise ValueError(f"texts of {len(data)} bytes are longer than {TEXT_MAX}; write them in parts")
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
        ring = self._ring
        if result == -errno.EMSGSIZE and deadline is not None:
            return self._write_each(streams, lens, data, deadline)
        try:
            while result == -errno.EAGAIN:
                ring.wait(self._bytes_of(lens, data), deadline)
                result = _write_many(self._ref, raws, lens.tobytes(), len(streams), data, len(data))
            if result == -errno.EMSGSIZE:
                raise RingFull(
                    f"the texts do not fit the {ring.room} of {ring.capacity} bytes", "pass block=, or write fewer"
                )
        except RingFull:
            ring.lose(raws, lens.tobytes(), data)
            raise
        if not ring.took(result):
            closed = next((stream for stream in streams if stream._raw is NOBODY and stream._ring is ring), None)
            raise closed._failure(result) if closed else ring.failure(result)
        for stream in streams:
            if stream.refused:
                raise stream._refusal(stream._reason())
        return result - BEHIND if result >= BEHIND else result

    def _bytes_of(self, lens: array[int], data: bytes) -> int:
        total = start = 0
        for length in lens:
            total += text_bytes(self._ref, data[start : start + length], length)
            start += length
        return total

    def _write_each(self, streams: tuple[Stream, ...], lens: array[int], data: bytes, deadline: float) -> int:
        """What does not fit an empty ring at once goes in one by one."""
        if not all(stream._ring is self._ring for stream in streams):
            raise self._ring.failure(-errno.EBADF)
        for stream in streams:
            if stream._raw is NOBODY:
                raise stream._failure(-errno.EBADF)
        written = start = 0
        refusal = None
        for index, (stream, length) in enumerate(zip(streams, lens, strict=True)):
            try:
                written += stream.write(data[start : start + length], block=max(deadline - monotonic(), 0.0))
            except StreamRefused as error:
                refusal = error
            except RingFull as error:
                rest = slice(index + 1, None)
                left = b"".join([each._raw for each in streams[rest]])
                self._ring.lose(left, lens[rest].tobytes(), data[start + length :])
                raise RingFull(f"{error.message}; item {index} of {len(lens)}", error.hint, index) from None
            start += length
        if refusal:
            raise refusal
        return written

    @property
    def backlog(self) -> Backlog:
        """What was written and is not committed yet. Raises StreamClosed, ForkedError."""
        backlog = self._ring.backlog()
        if not isinstance(backlog, Backlog):
            raise self._ring.failure(backlog)
        return backlog

    @property
    def hints(self) -> Hints | None:
        """What clawd would like the engine to do, for a look once a step; None = nothing.

        `reason`: 1 a stream is made faster than its pace allows, 2 a reader does not take what is sent, 3 the host is
        short of processor time (CLAW_HINT_ in clawd_ring.h). Raises StreamClosed, ForkedError.
        """
        raw = create_string_buffer(lib.CLAW_PY_HINT_BYTES)
        result = _hints(self._ref, raw)
        if result < 0 and result != -errno.EAGAIN:  # that one: it changed at every look, so there is none to tell
            raise self._ring.failure(result)
        hints = Hints(*struct.unpack("=III", raw.raw))
        return hints if any(hints) else None

    def fileno(self) -> int:
        """A descriptor for select, poll or asyncio: readable once clawd is gone or has let go of the ring.

        Read nothing from it. Cancels do not show there: look at `Stream.cancelled`. Once another clawd goes on with the
        ring the same number is a new connection: what keeps it in an epoll, as asyncio does, must add it again then.
        Raises StreamClosed, ForkedError.
        """
        result: int = _poll_fd(self._ref)
        if result < 0:
            raise self._ring.failure(result)
        return result

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Give the ring back. Streams still open end as `producer_lost`. Any number of times; harmless after a fork.

        What is not in the ring yet gets `timeout` seconds (None: 0); what then still finds no room is lost, and
        RingFull says how many records that were, RingLost when clawd had let go of the ring.
        """
        deadline = deadline_of("timeout", timeout)
        self._step = ((), b"")
        self._ring.close(deadline)


def _readers(readers: Sequence[str] | None) -> bytes:
    if readers is None:
        return b""
    names = [readers] if isinstance(readers, str) else list(readers)
    for name in names:
        if not (isinstance(name, str) and _READER.fullmatch(name)):
            raise ValueError(f"readers are users, @groups and key:NAMEs, not {name!r}")
    whom = " ".join(names or ["none"]).encode()
    if len(whom) > lib.CLAW_READERS_MAX:
        raise ValueError(f"readers must be at most {lib.CLAW_READERS_MAX} bytes in all, not {len(whom)}: use a group")
    return whom


def _meta(meta: dict[str, Any] | None) -> bytes:
    if meta is None:
        return b""
    if not isinstance(meta, dict):
        raise TypeError(f"meta must be a dict, not {type(meta).__name__}")
    return json.dumps(meta, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
