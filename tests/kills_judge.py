# SPDX-License-Identifier: Apache-2.0
"""What the clients of the kill loop were told, against what its producers say and did: the history checker over each
reading, put together from the lives of a client that was killed and went on from its position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clawd.consumer import Gap
from tests.history import End, Got, History, Seen
from tests.kills_text import REASON, length, puts


class Word(NamedTuple):
    """A producer's, of one of its streams."""

    published: int  # tokens that are in the ring for sure
    closed: bool  # so is its end
    alive: bool  # the producer lives


Look = Callable[[str], Word]


def _last(event: Seen | Gap) -> int:
    return event.last if isinstance(event, Gap) else event.seq


@dataclass
class Follow:
    """A client's reading of a stream, through all its lives."""

    name: str
    client: str
    position: str | None = None
    events: list[tuple[Seen | Gap, str]] = field(default_factory=list)

    @property
    def seen(self) -> int:
        """Tokens, of those that need not come again."""
        return len(self.events)

    def take(self, row: list[Any]) -> None:
        kind, *values = row
        if kind == "token":
            seq, klass, count, data, text = values
            self.events.append((Seen(seq, bytes.fromhex(data), klass, count), text))
        elif kind == "gap":
            self.events.append((Gap(*values), ""))
        else:
            (self.position,) = values

    def go_on(self) -> str:
        """Where a client that was killed begins again. What it had beyond that comes again."""
        if self.position is None:
            self.events.clear()
            return "-"
        last = int(self.position.partition("-")[2])
        self.events = [row for row in self.events if _last(row[0]) <= last]
        return self.position

    def got(self, reason: str) -> Got:
        got = Got(self.name, self.client)
        for event, text in self.events:
            got.text.append(text)
            if isinstance(event, Gap) or event.data or event.count:  # else only the end of a text that was held back
                got.events.append(event)
        got.events.append(End(reason))
        return got


class Judge:
    """Says what is wrong, and counts what was right."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._ends: dict[str, tuple[str, int]] = {}
        self.tokens = 0
        """That came, each client's."""
        self.complaints: list[str] = []

    def end(self, follow: Follow, reason: str) -> None:
        """A reading came to its end."""
        name, got = follow.name, follow.got(reason)
        count = sum(isinstance(event, Seen) for event in got.events)
        word = self._look(name)
        self.tokens += count
        if reason not in (REASON, "producer_lost"):
            self.complain(follow, f'ended with "{reason}"')
        elif word.closed and reason != REASON:
            self.complain(follow, f'ended with "{reason}"; its producer had ended it with "{REASON}"')
        elif reason != REASON and word.alive:
            self.complain(follow, "ended for want of its producer, which lives")
        due = length(name) if reason == REASON else max(count, word.published)
        if (end := self._ends.setdefault(name, (reason, count))) != (reason, count):
            self.complain(follow, f"ended with {(reason, count)}, for another client with {end}")
        history = History()
        history.put(name, *puts(name, due))
        history.end(name, reason)
        history.readings.append(got)
        self.complaints += history.complaints()

    def fail(self, follow: Follow, code: str, text: str) -> None:
        """A reading that clawd refused: right only for a stream whose producer never came to open it."""
        if code != "unknown" or self._look(follow.name).published or follow.events:
            self.complain(follow, f"refused: {text}")

    def complain(self, follow: Follow, what: str) -> None:
        self.complaints.append(f'stream "{follow.name}", {follow.client}: {what}')
