# SPDX-License-Identifier: Apache-2.0
"""From records to tokens, batches, text and position: what every kind of client shares. Waiting is not here."""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from clawd.core import check, ffi, lib
from clawd.errors import ClawdError
from clawd.inbox import PLAIN, RECORD, Inbox

__all__ = ["BaseReading", "Batch", "Gap", "Token", "parse_position"]

_TOKEN, _GAP, _OPEN = int(lib.CLAW_TOKEN), int(lib.CLAW_GAP), int(lib.CLAW_OPEN)
_HEAD = RECORD.size
_PAD = int(lib.CLAW_SPOOLED_ALIGN) - 1
_TIME_AT = 16  # written_ns in a record
_unpack = RECORD.unpack_from
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

    __slots__ = ("_data", "_prefix", "_runs", "_tail", "_times", "count", "first_seq", "last_seq")

    def __init__(self, runs: Sequence[bytes], first_seq: int, count: int, prefix: str, tail: bytes) -> None:
        self.first_seq = first_seq
        self.last_seq = first_seq + count - 1 if count else first_seq
        self.count = count
        self._runs = runs  # records as they came, TOKENs only
        self._prefix = prefix
        self._tail = tail
        self._data: bytes | None = None
        self._times = b""

    @property
    def data(self) -> bytes:
        """Exactly what was written."""
        data = self._data
        if data is None:
            if self.count == 1:
                run = self._runs[0]
                data = self._data = run[_HEAD : _HEAD + (run[0] | run[1] << 8)]
            else:
                data, self._times = _join(self._runs, self.count)
                self._data = data
        return data

    @property
    def written_ns(self) -> memoryview:
        """CLOCK_MONOTONIC of each token's write."""
        if self.count == 1:
            return memoryview(self._runs[0])[_TIME_AT:_HEAD].cast("Q")
        if not self._times and self.count:
            self._data, self._times = _join(self._runs, self.count)
        return memoryview(self._times).cast("Q")

    @property
    def text(self) -> str:
        """The join of what `tokens()` shows."""
        data = self.data
        if not self._tail and data.isascii():
            text = data.decode("ascii")
            return self._prefix + text if self._prefix else text
        return self._prefix + _decode(self._tail, data)[0]

    def tokens(self) -> Iterator[Token]:
        """Each token by itself."""
        prefix, tail = self._prefix, self._tail
        if not self.count:
            yield Token(self.last_seq, prefix, b"", 0, 2, 0)
        seq = self.first_seq
        for run in self._runs:
            at = 0
            while at < len(run):
                length, _, klass, count, _, written_ns = _unpack(run, at)
                at += _HEAD
                data = run[at : at + length]
                at += length + _PAD & ~_PAD
                text, tail = _decode(tail, data)
                yield Token(seq, prefix + text, data, written_ns, klass, count)
                prefix = ""
                seq += 1


def _join(runs: Sequence[bytes], count: int) -> tuple[bytes, bytes]:
    """The payloads, and the times, of `count` records that are TOKENs only."""
    records = runs[0] if len(runs) == 1 else b"".join(runs)
    data, times = _allocate("uint8_t[]", len(records)), _allocate("uint64_t[]", count)
    used = check(lib.claw_records_join(records, len(records), data, len(records), times, count), "join a batch")
    return ffi.buffer(data, used)[:], ffi.buffer(times)[:]


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
        self._records = b""  # the page that is read
        self._at = 0  # its first record that was not looked at
        self._seq = 0  # that one's sequence, if it takes any
        self._tokens = self._flags = 0  # of the page
        self._owed = 0  # what it costs, while it was not paid
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
            records, at = self._records, self._at
            if at == len(records):
                if self._turn_page():
                    continue
                return self._take_rest() if self._over and self._held else None
            length, kind, klass, count, _, written_ns = _unpack(records, at)
            at += _HEAD
            data = records[at : at + length]
            self._at = at + (length + _PAD & ~_PAD)
            seq = self._seq
            if kind != _TOKEN:
                self._mark(kind, seq, count, data)
                continue
            self._seq = seq + 1
            if not self._held and data.isascii():
                text = data.decode("ascii")
                self._shown = seq
            else:
                text = self._show(seq, data)
            self._last = seq
            return Token(seq, text, data, written_ns, klass, count)

    def _take_batch(self) -> Batch | None:
        """As `_take`, for all tokens that are here up to the next gap."""
        inbox = self._inbox
        pending = inbox.pending
        if len(pending) == 1 and pending[0][3] == PLAIN and not self._held and self._at == len(self._records):
            # What an engine's step mostly is for one stream: whole characters, and nothing that came before. As
            # `_turn_page` and all below, without a call
            inbox.consumed += self._owed
            self._owed = 0
            if inbox.offset + inbox.consumed - inbox.limit >= inbox.quarter and inbox.owes_credit():
                self._owner._grant(inbox)
            records, seq, count, _ = pending.popleft()
            self._records = records
            self._owed = self._at = len(records)
            self._last = self._shown = seq + count - 1
            return Batch((records,), seq, count, "", b"")
        runs: list[bytes] = []
        first_seq = count = 0
        whole = False  # the core saw that the last run's end is a character's
        for _ in range(2 + len(pending)):
            while self._at < len(self._records):
                run, tokens = self._take_run()
                if tokens:
                    first_seq = first_seq if runs else self._seq
                    self._seq += tokens
                    self._at += len(run)
                    runs.append(run)
                    count += tokens
                    whole = self._flags == PLAIN
                    continue
                length, kind, _, number, _, _ = _unpack(self._records, self._at)
                if kind == _GAP and runs:
                    return self._batch(runs, first_seq, count, whole)
                at = self._at + _HEAD
                self._at = at + (length + _PAD & ~_PAD)
                self._mark(kind, self._seq, number, self._records[at : at + length])
            if not self._turn_page():
                break
        if runs:
            return self._batch(runs, first_seq, count, whole)
        if self._over and self._held:
            token = self._take_rest()
            return Batch((), token.seq, 0, token.text, b"")
        return None

    def _take_run(self) -> tuple[bytes, int]:
        """The records from here to the page's end, or to the first that is no TOKEN, and how many they are."""
        records = self._records[self._at :] if self._at else self._records
        if self._flags & PLAIN and not self._at:
            return records, self._tokens
        tokens = ffi.new("uint32_t *")
        size = check(lib.claw_records_run(records, len(records), tokens), "read a page")
        return records[:size], int(tokens[0])

    def _batch(self, runs: list[bytes], first_seq: int, count: int, whole: bool) -> Batch:
        batch = Batch(runs, first_seq, count, self._prefix, self._tail)
        tail = b"" if whole else self._begun_at(batch.data, len(batch.data))
        if tail:
            self._show_whole(batch)
        self._settle(tail, batch.last_seq)
        self._last = batch.last_seq
        return batch

    def _show_whole(self, batch: Batch) -> None:
        """The last token of a batch that ends inside a character, after which the text did not, is where to go on."""
        end, seq = len(batch.data), batch.last_seq
        for token in reversed(list(batch.tokens())):
            end -= len(token.data)
            seq -= 1
            if not self._begun_at(batch.data, end):
                if seq >= batch.first_seq:
                    self._shown = seq
                return

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
            self._seq = seq + count
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
        if self._owed:
            inbox.consumed += self._owed
            self._owed = 0
            if inbox.owes_credit():
                self._owner._grant(inbox)
        if not inbox.pending:
            return False
        self._records, self._seq, self._tokens, self._flags = inbox.pending.popleft()
        self._at = 0
        self._owed = len(self._records)
        return True


def _parse_meta(data: bytes) -> Any:
    if not data:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data
