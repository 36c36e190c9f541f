# SPDX-License-Identifier: Apache-2.0
"""The history checker: what producers put in against what each client got. Nothing may be lost, doubled, reordered,
torn, of another class, or end otherwise than it did; a gap is told once and hides nothing that came.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from classes import CRITICAL, Classes
from clawd.consumer import Gap, Reading

COMPLAINTS_MAX = 20


class Put(NamedTuple):
    data: bytes
    urgent: bool = False
    count: int = 1


class Seen(NamedTuple):
    seq: int
    data: bytes
    klass: int
    count: int


class End(NamedTuple):
    reason: str


@dataclass
class Written:
    """One stream as its producer knows it. `cut`: a cancel may have dropped what was written last."""

    puts: list[Put] = field(default_factory=list)
    end: str | None = None
    cut: bool = False


@dataclass
class Got:
    """One reading of one stream by one client: what came, in order."""

    stream: str
    client: str
    after: int = -1
    events: list[Seen | Gap | End] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def take(self, token: Any) -> None:
        self.text.append(token.text)
        if token.data or token.count:  # else only the end of a text that was held back
            self.events.append(Seen(token.seq, bytes(token.data), token.klass, token.count))

    def follow(self, reading: Reading, *, batches: bool = False, limit: int | None = None) -> Got:
        """Read to the end, or `limit` tokens."""
        gaps = 0
        while limit is None or sum(isinstance(event, Seen) for event in self.events) < limit:
            batch = reading.read_batch(60) if batches else reading.read(60)
            self.events += reading.gaps[gaps:]
            gaps = len(reading.gaps)
            if batch is None:
                self.events.append(End(str(reading.end_reason)))
                break
            for token in batch.tokens() if batches else (batch,):
                self.take(token)
        return self

    def finish(self, reason: str) -> None:
        self.events.append(End(reason))

    def gaps(self) -> list[Gap]:
        return [event for event in self.events if isinstance(event, Gap)]


def _class(text: Classes, seq: int, put: Put) -> int:
    klass = text.take(put.data)
    return CRITICAL if put.urgent or seq == 0 else klass


def _classes(puts: list[Put]) -> list[int]:
    text = Classes()
    return [_class(text, seq, put) for seq, put in enumerate(puts)]


class History:
    """Everything that went in and came out in one test. Any thread may add to it."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}
        self.readings: list[Got] = []
        self._lock = threading.Lock()

    def put(self, stream: str, *puts: Put | bytes) -> None:
        written = self.written.setdefault(stream, Written())
        written.puts += [put if isinstance(put, Put) else Put(put) for put in puts]

    def end(self, stream: str, reason: str, *, cut: bool = False) -> None:
        written = self.written.setdefault(stream, Written())
        written.end, written.cut = reason, cut

    def reading(self, stream: str, client: str = "client", after: int = -1) -> Got:
        got = Got(stream, client, after)
        with self._lock:
            self.readings.append(got)
        return got

    def complaints(self, *, gaps: bool = False) -> list[str]:
        """What is wrong, one line each. `gaps`: tokens may be missing if a gap says so."""
        classes = {stream: _classes(written.puts) for stream, written in self.written.items()}
        return [
            f'stream "{got.stream}", {got.client}: {what}'
            for got in self.readings
            for what in self._judge(got, classes.get(got.stream, []), gaps)
        ]

    def check(self, *, gaps: bool = False) -> None:
        found = self.complaints(gaps=gaps)
        if found:
            more = f"\n… and {len(found) - COMPLAINTS_MAX} more" if len(found) > COMPLAINTS_MAX else ""
            raise AssertionError("\n".join(found[:COMPLAINTS_MAX]) + more)

    def _judge(self, got: Got, classes: list[int], gaps: bool) -> list[str]:
        written = self.written.get(got.stream)
        if written is None:
            return ["was read but never written"]
        found: list[str] = []
        due, over, whole = got.after + 1, False, got.after < 0
        anew = None if whole or not gaps else Classes()  # a producer's gap: what was written there, clawd never saw
        for event in got.events:
            if over:
                found.append(f"{event} came after the end")
            elif isinstance(event, End):
                over = True
                if event.reason != written.end:
                    found.append(f'ended with "{event.reason}", not "{written.end}"')
            elif isinstance(event, Gap):
                whole, anew = False, Classes()
                found += self._judge_gap(event, due, written, gaps)
                due = max(due, event.last + 1)
            else:
                allowed = classes[event.seq : event.seq + 1]
                if anew:
                    allowed.append(_class(anew, event.seq, Put(event.data, CRITICAL in allowed)))
                found += self._judge_token(got.stream, event, due, written, allowed)
                due = max(due, event.seq + 1)
        if not over and written.end is not None:
            found.append(f'has no end; it ended with "{written.end}"')
        if over and due < len(written.puts) and not written.cut:
            found.append(f"lost seq {due} to {len(written.puts) - 1} before the end")
        if over and whole and not found:
            data = b"".join(event.data for event in got.events if isinstance(event, Seen))
            if "".join(got.text) != data.decode(errors="replace"):
                found.append("shows another text than its bytes have")
        return found

    @staticmethod
    def _judge_gap(gap: Gap, due: int, written: Written, allowed: bool) -> list[str]:
        span = f"gap {gap.first} to {gap.last} ({gap.reason})"
        if not allowed:
            return [f"{span} where nothing may be missing"]
        if gap.first < due:
            return [f"{span} covers seq {gap.first}, which was delivered or told before"]
        if gap.first > due:
            return [f"lost seq {due} to {gap.first - 1} before {span}"]
        if gap.last < gap.first or gap.last >= len(written.puts):
            return [f"{span} covers what was never written"]
        return []

    def _judge_token(self, stream: str, seen: Seen, due: int, written: Written, classes: list[int]) -> list[str]:
        found = []
        if seen.seq < due:
            found.append(f"seq {seen.seq} came again or late, {due} was due")
        elif seen.seq > due:
            found.append(f"lost seq {due} to {seen.seq - 1} without a gap")
        if seen.seq >= len(written.puts):
            return [*found, f"seq {seen.seq} was never written: {seen.data[:40]!r}"]
        put = written.puts[seen.seq]
        if seen.data != put.data:
            found.append(
                f"seq {seen.seq} is {seen.data[:40]!r}{self._origin(stream, seen.data)}, not {put.data[:40]!r}"
            )
        elif seen.count != put.count:
            found.append(f"seq {seen.seq} stands for {seen.count} tokens, not {put.count}")
        elif seen.klass not in classes:
            found.append(f"seq {seen.seq} has class {seen.klass}, not {classes[0]}")
        return found

    def _origin(self, stream: str, data: bytes) -> str:
        for name in (stream, *(name for name in self.written if name != stream)):
            for seq, put in enumerate(self.written[name].puts):
                if put.data == data:
                    return f" (seq {seq} of {'this stream' if name == stream else repr(name)})"
        return " (torn or changed)"
