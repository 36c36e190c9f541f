# SPDX-License-Identifier: Apache-2.0
"""From records to tokens, batches, text and position: what every kind of client shares. Waiting is not here."""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Iterator
from operator import length_hint
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from clawd.core import check, ffi, lib
from clawd.errors import ClawdError
from clawd.inbox import ITEM, Inbox, Page

__all__ = ["BaseReading", "Batch", "Gap", "Token", "parse_position"]

_TOKEN, _GAP, _OPEN = int(lib.CLAW_TOKEN), int(lib.CLAW_GAP), int(lib.CLAW_OPEN)
_KIND_AT, _TIME_AT = 34, 16  # in struct claw_item
_NO_ROWS = ITEM.iter_unpack(b"")
_NOTHING: Page = (b"", 0, b"", 0)
_allocate = ffi.new_allocator(should_clear_after_alloc=False)


class Gap(NamedTuple):
    """Tokens `first` to `last` will not come."""

    first: int
    last: int
    reason: str


class Token:
    """`data` is exactly what was written; `text` what of it (and of a character begun before) can be shown now.

    `written_ns` is CLOCK_MONOTONIC of the write, `klass` 0 critical, 1 high, 2 normal, `count` the engine's own number.
    """

    __slots__ = ("count", "data", "klass", "seq", "text", "written_ns")

    def __init__(self, seq: int, text: str, data: bytes, written_ns: int, klass: int, count: int) -> None:
        self.seq = seq
        self.text = text
        self.data = data
        self.written_ns = written_ns
        self.klass = klass
        self.count = count

    def __repr__(self) -> str:
        return f"Token(seq={self.seq}, text={self.text!r}, data={self.data!r})"


def _decode(tail: bytes, data: bytes) -> tuple[str, bytes]:
    """Text of `data` after the begun character `tail`, and what is a begun character now (at most 3 bytes)."""
    if not tail and data.isascii():
        return data.decode("ascii"), b""
    joined = tail + data
    text, used = utf_8_decode(joined, "replace", False)
    return text, joined[used:]


def _flush(tail: bytes) -> str:
    return utf_8_decode(tail, "replace", True)[0] if tail else ""


class Batch:
    """Tokens `first_seq` to `last_seq` without a gap. `written_ns` has one number for each, as does `tokens()`.

    The last batch of a stream cut inside a character has `count` 0 and no data: its text is the U+FFFD.
    """

    __slots__ = ("_pages", "_prefix", "_tail", "_times", "count", "data", "first_seq", "last_seq")

    def __init__(self, data: bytes, first_seq: int, last_seq: int, written_ns: bytes, pages: list[Page], prefix: str,
                 tail: bytes) -> None:  # fmt: skip
        self.data = data
        self.first_seq = first_seq
        self.last_seq = last_seq
        self.count = len(written_ns) // 8
        self._times = written_ns
        self._pages = pages
        self._prefix = prefix
        self._tail = tail

    @property
    def written_ns(self) -> memoryview:
        """CLOCK_MONOTONIC of each token's write."""
        return memoryview(self._times).cast("Q")

    @property
    def text(self) -> str:
        """The join of what `tokens()` shows."""
        return self._prefix + _decode(self._tail, self.data)[0]

    def tokens(self) -> Iterator[Token]:
        """Each token by itself."""
        prefix, tail = self._prefix, self._tail
        if not self.count:
            yield Token(self.last_seq, prefix, b"", 0, 2, 0)
        for frame, base, items, _ in self._pages:
            for _, _, seq, written_ns, offset, count, length, _, klass, _ in ITEM.iter_unpack(items):
                data = frame[offset - base : offset - base + length]
                text, tail = _decode(tail, data)
                yield Token(seq, prefix + text, data, written_ns, klass, count)
                prefix = ""


class Owner(Protocol):
    """Who has the link."""

    def _grant(self, inbox: Inbox) -> None: ...

    def _cancel(self, inbox: Inbox) -> None: ...

    def _detach(self, inbox: Inbox) -> None: ...

    def _ended(self, inbox: Inbox) -> None: ...


def parse_position(position: str) -> tuple[int, int]:
    """(incarnation, sequence) of what `position` gave. Raises ClawdError for anything else."""
    match = re.fullmatch(r"(\d{1,10})-(\d{1,19})", position, re.ASCII) if isinstance(position, str) else None
    if match is None or int(match[1]) >= 2**32 or int(match[2]) >= 2**63:
        raise ClawdError(f"{str(position)[:60]!r} is not a position", 'pass what a reading\'s "position" gave')
    return int(match[1]), int(match[2])


class BaseReading:
    """One reading of one stream, for one thread at a time."""

    def __init__(self, owner: Owner, inbox: Inbox) -> None:
        self.stream = inbox.stream
        self.end_reason: str | None = None
        """Why the stream ended, once all of it was read."""
        self.gaps: list[Gap] = []
        """What was missing so far."""
        self.meta: Any = None
        """What the producer gave at open, known from the first token on; bytes if it is no JSON."""
        self._owner = owner
        self._inbox = inbox
        self._page = _NOTHING
        self._rows = ITEM.iter_unpack(b"")  # the records of `_page` that were not looked at
        self._prefix = ""  # shown with the next token: the end of a text cut by a gap
        self._tail = b""  # a begun character
        self._held = False  # either of the two
        self._last: int | None = None  # sequence of the last token handed out
        self._shown = inbox.expected - 1 if inbox.incarnation is not None else None
        self._over = False

    @property
    def incarnation(self) -> int | None:
        """Which stream of this name it is; None until clawd said so."""
        return self._inbox.incarnation

    @property
    def position(self) -> str | None:
        """Where to go on so that no text is lost or cut: after the last token that ended with a whole character, all of
        whose text was handed out. None before the first.
        """
        return None if self._shown is None else f"{self._inbox.incarnation}-{self._shown}"

    def cancel(self) -> None:
        """End the stream for everybody, also before it opened; the end comes with reason `cancelled`. Idempotent."""
        self._owner._cancel(self._inbox)

    def close(self) -> None:
        """Stop reading; the stream goes on. Idempotent."""
        self._owner._detach(self._inbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _take(self) -> Token | None:
        """The next token that is here. None: nothing is, or (`_over`) nothing will be."""
        while True:
            for _, _, seq, written_ns, offset, count, length, kind, klass, _ in self._rows:
                frame, base, _, _ = self._page
                data = frame[offset - base : offset - base + length]
                if kind != _TOKEN:
                    self._mark(kind, seq, count, data)
                    continue
                if not self._held and data.isascii():
                    text = data.decode("ascii")
                    self._shown = seq
                else:
                    text = self._show(seq, data)
                self._last = seq
                return Token(seq, text, data, written_ns, klass, count)
            if not self._turn_page():
                return self._take_rest() if self._over and self._held else None

    def _take_batch(self) -> Batch | None:
        """As `_take`, for all tokens that are here up to the next gap."""
        pending = self._inbox.pending
        if len(pending) == 1 and len(pending[0][2]) == ITEM.size and not length_hint(self._rows) and not self._held:
            batch = self._take_lone_token(pending[0])
            if batch is not None:
                return batch
        parts: list[bytes] = []
        times: list[bytes] = []
        pages: list[Page] = []
        room = int(lib.CLAW_FRAME_MAX)
        data, used = _allocate("uint8_t[]", room), ffi.new("size_t *")
        for _ in range(2 + len(self._inbox.pending)):
            frame, base, items, _ = self._page
            at = len(items) - length_hint(self._rows) * ITEM.size
            while at < len(items):
                kind = items[at + _KIND_AT]
                if kind != _TOKEN:
                    if kind == _GAP and pages:
                        break
                    _, _, seq, _, offset, count, length, _, _, _ = ITEM.unpack_from(items, at)
                    self._mark(kind, seq, count, frame[offset - base : offset - base + length])
                    at += ITEM.size
                    continue
                rest = items[at:] if at else items
                most = len(rest) // ITEM.size
                written = _allocate("uint64_t[]", most)
                taken = lib.claw_frame_gather(
                    ffi.from_buffer(frame), len(frame), base, ffi.from_buffer("struct claw_item[]", rest), most,
                    data, room, written, used)  # fmt: skip
                check(taken, "join a batch")
                parts.append(ffi.buffer(data, used[0])[:])
                times.append(ffi.buffer(written, 8 * taken)[:])
                pages.append((frame, base, rest[: taken * ITEM.size], 0))
                at += taken * ITEM.size
            self._rows = ITEM.iter_unpack(items[at:])
            if at < len(items) or not self._turn_page():
                break
        if pages:
            return self._batch(b"".join(parts), b"".join(times), pages)
        if self._over and self._held:
            token = self._take_rest()
            return Batch(b"", token.seq, token.seq, b"", [], token.text, b"")
        return None

    def _take_lone_token(self, page: Page) -> Batch | None:
        """What an engine's step mostly is for one stream; the general way costs five times as much."""
        frame, base, items, _ = page
        _, _, seq, _, offset, _, length, kind, _, _ = ITEM.unpack(items)
        if kind != _TOKEN:
            return None
        self._turn_page()
        self._rows = _NO_ROWS
        data = frame[offset - base : offset - base + length]
        if data.isascii():
            self._shown = seq
        else:
            self._settle(_decode(b"", data)[1], seq)
        self._last = seq
        return Batch(data, seq, seq, items[_TIME_AT : _TIME_AT + 8], [page], "", b"")

    def _batch(self, data: bytes, written_ns: bytes, pages: list[Page]) -> Batch:
        first_seq = int(ITEM.unpack_from(pages[0][2])[2])
        last_seq = first_seq + len(written_ns) // 8 - 1
        batch = Batch(data, first_seq, last_seq, written_ns, pages, self._prefix, self._tail)
        end = len(data)
        begun = tail = self._begun_at(data, end)
        for _, _, items, _ in reversed(pages):
            for at in range(len(items) - ITEM.size, -1, -ITEM.size):
                if not begun:
                    break
                row = ITEM.unpack_from(items, at)
                end -= row[6]
                begun = self._begun_at(data, end)
                if not begun and row[2] > first_seq:
                    self._shown = int(row[2]) - 1
        self._settle(tail, last_seq)
        self._last = last_seq
        return batch

    def _begun_at(self, data: bytes, end: int) -> bytes:
        """What is a begun character before data[end]: only the last three bytes can be."""
        return _decode(b"", data[end - 3 : end] if end >= 3 else self._tail + data[:end])[1]

    def _show(self, seq: int, data: bytes) -> str:
        prefix = self._prefix
        text, tail = _decode(self._tail, data)
        self._settle(tail, seq)
        return prefix + text

    def _settle(self, tail: bytes, seq: int) -> None:
        """All up to token `seq` is handed out, and of it `tail` is held back."""
        self._prefix, self._tail, self._held = "", tail, bool(tail)
        if not tail:
            self._shown = seq

    def _take_rest(self) -> Token:
        text = self._prefix + _flush(self._tail)
        self._prefix, self._tail, self._held = "", b"", False
        seq = self._last if self._last is not None else 0
        self._shown = self._last
        return Token(seq, text, b"", 0, 2, 0)

    def _mark(self, kind: int, seq: int, count: int, data: bytes) -> None:
        if kind == _OPEN:
            self.meta = _parse_meta(data)
        elif kind == _GAP:
            self.gaps.append(Gap(seq, seq + count - 1, data.decode(errors="replace")))
            self._prefix += _flush(self._tail)
            self._tail = b""
            self._held = bool(self._prefix)
        else:
            self.end_reason = data.decode(errors="replace")
            self._over = True
            self._owner._ended(self._inbox)

    def _turn_page(self) -> bool:
        """Go to the next segment, paying for the last; False when there is none yet."""
        inbox = self._inbox
        if self._page[3]:
            inbox.consumed += self._page[3]
            self._page = _NOTHING
            if inbox.owes_credit():
                self._owner._grant(inbox)
        if not inbox.pending:
            return False
        self._page = inbox.pending.popleft()
        self._rows = ITEM.iter_unpack(self._page[2])
        return True


def _parse_meta(data: bytes) -> Any:
    if not data:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data
