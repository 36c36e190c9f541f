# SPDX-License-Identifier: Apache-2.0
"""One attachment to clawd for many readers of a stream. Recent events are kept once; readers are told when there are
more and take them at their own pace. Nobody waits for a slow one: it gets an attachment of its own until it caught up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from clawd import log
from clawd.aconsumer import AsyncConsumer, AsyncReading, Batch
from clawd.errors import AttachError, ClawdError, ControlError
from clawd.gateway.event import Event, end_event, gap_event, hint_event, text_event
from clawd.gateway.figures import Figures
from clawd.gateway.filter import Pipeline
from clawd.gateway.position import Position

CREDIT = 65_536
"""Bytes that clawd may send ahead for one attachment, which bounds its memory here."""
REASON_MAX = 64
"""Different reasons that are counted by name; the rest are `other`: engines choose them."""


class Follower(Protocol):
    """Who reads a fan."""

    def wake(self) -> None:
        """There is more."""


@dataclass(frozen=True)
class Terms:
    """How streams are read; seconds and bytes."""

    recent_bytes: int
    open_wait: float
    gone_grace: float
    pipeline: Callable[[], Pipeline | None]


class Fan:
    """An attachment to stream `name`, after `after` or from its start."""

    def __init__(
        self, consumer: AsyncConsumer, name: str, after: Position | None, wait: float, terms: Terms, figures: Figures
    ) -> None:
        self.name = name
        self.created = int(time.time())
        self.events: deque[Event] = deque()
        self.first = 0
        """Number of `events[0]`."""
        self.start = after
        """Where a reader is before it."""
        self.followers: set[Follower] = set()
        self.lead = 0
        """The number up to which the fastest follower has got."""
        self.over = False
        self.error: ClawdError | None = None
        """Why nothing came at all."""
        self._consumer = consumer
        self._terms = terms
        self._figures = figures
        self._degrade = 0  # what readers were told last
        self._bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._pipeline = terms.pipeline()
        self._whole = after._replace(chars=0) if after else None  # where all text was shown, and how much since
        self._shown = 0
        self._untold = 0  # tokens that showed nothing yet
        self._skip = after.chars if after else 0  # characters that were shown before
        position = f"{after.incarnation}-{after.seq}" if after and after.seq >= 0 else None
        grace = terms.gone_grace
        self.reading: AsyncReading = consumer.attach(
            name, position, wait=wait, credit=CREDIT, on_gone="cancel", grace=grace
        )
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def model(self) -> str:
        """What the producer calls its model, in the meta it opened the stream with."""
        meta = self.reading.meta
        found = meta.get("model") if isinstance(meta, dict) else None
        return found if isinstance(found, str) else "clawd"

    @property
    def end(self) -> int:
        """Number of the event that comes next."""
        return self.first + len(self.events)

    def find(self, position: Position | None) -> int | None:
        """Number of the first event after `position`, None where it is not among those kept."""
        if position == self.start:
            return self.first
        for back, event in enumerate(reversed(self.events)):
            if event.position == position and position is not None:
                return self.end - back
        return None

    def tail(self) -> Position | None:
        """Where a reader of all of it is."""
        return self.events[-1].position if self.events else self.start

    def advance(self, number: int) -> None:
        """A follower has got all events before `number`."""
        if number > self.lead:
            self.lead = number
            if self._room is not None and not self._room.done() and not self._full():
                self._room.set_result(None)

    def close(self) -> None:
        """Nobody reads it any more. clawd gives the stream its grace."""
        self._task.cancel()
        self.reading.close()

    # ---- from clawd

    async def _run(self) -> None:
        try:
            await self._read()
        except ControlError as error:
            self._finish("unavailable", error)
        except AttachError as error:
            self._finish(error.code, error)
        except ClawdError as error:
            self._finish("error", error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # one stream's, and not the gateway's end
            log.failure("reading a stream failed", error, stream=self.name)
            self._finish("error", ClawdError("the gateway failed on this stream"))
        finally:
            with contextlib.suppress(ClawdError):
                self.reading.close()

    async def _read(self) -> None:
        reading, gaps = self.reading, 0
        while True:
            batch = await reading.read_batch()
            if self.start and reading.incarnation not in (None, self.start.incarnation):
                raise AttachError(f'another stream has the name "{self.name}" now', "lost")
            for gap in reading.gaps[gaps:]:
                gaps += 1
                self._flush(gap.first - 1)
                self._skip = 0
                self._settle(gap.last)
                self._figures.gaps[_known(self._figures.gaps, gap.reason)] += 1
                self._tell(gap_event(gap.first, gap.last, gap.reason, self._whole))
            if batch is None:
                break
            self._take(batch)
            if self._consumer.degrade != self._degrade:
                self._degrade = self._consumer.degrade
                self._tell(hint_event(self._degrade, self._position()))
            if self._pipeline is not None and self._pipeline.stopped:
                reading.cancel()
                self._finish("stop")
                return
            if self._full():
                await self._wait_room()
        self._flush(self._whole.seq if self._whole else 0)
        self._finish(reading.end_reason or "end")

    def _take(self, batch: Batch) -> None:
        text, pipeline = batch.text, self._pipeline
        written = batch.written_ns
        if pipeline is not None:
            text = pipeline.feed(text)
        position = self.reading.position
        is_whole = position is not None and position.endswith(f"-{batch.last_seq}")
        self._show(text, batch.last_seq, batch.count, written[0] if batch.count else 0, is_whole)

    def _show(self, text: str, seq: int, tokens: int, written_ns: int, is_whole: bool) -> None:
        self._shown += len(text)
        self._untold += tokens
        is_settled = is_whole and not (self._pipeline is not None and self._pipeline.held)
        if is_settled:
            self._settle(seq)
        if self._skip:
            skipped = min(self._skip, len(text))
            self._skip -= skipped
            text = text[skipped:]
        # A begun character shows nothing yet; a token that is empty for good is told all the same
        if text or is_settled:
            untold, self._untold = self._untold, 0
            self._tell(text_event(text, seq, untold, self._position(), written_ns))

    def _flush(self, seq: int) -> None:
        if self._pipeline is not None:
            text = self._pipeline.flush()
            if text:
                self._show(text, seq, 0, 0, False)

    def _settle(self, seq: int) -> None:
        """All text up to token `seq` was shown."""
        self._whole = Position(self.reading.incarnation or 0, seq)
        self._shown = 0

    def _position(self) -> Position:
        whole = self._whole or Position(self.reading.incarnation or 0, -1)
        return whole._replace(chars=self._shown)

    def _finish(self, reason: str, error: ClawdError | None = None) -> None:
        if error is not None and not self.events and self.first == 0:
            self.error = error
        position = self._position()
        over = position._replace(over=True) if error is None else None
        self._figures.ends[_known(self._figures.ends, reason)] += 1
        self.over = True
        self._tell(end_event(reason, str(error) if error else None, over))

    # ---- to followers

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self._bytes += event.size
        for follower in tuple(self.followers):
            follower.wake()
        while self._bytes > self._terms.recent_bytes and self.first < self.lead and self.events:
            gone = self.events.popleft()
            self._bytes -= gone.size
            self.first += 1
            self.start = gone.position

    def _full(self) -> bool:
        return self._bytes > self._terms.recent_bytes and self.first >= self.lead and not self.over

    async def _wait_room(self) -> None:
        """Until the fastest follower has taken something: then what it took can go."""
        self._room = asyncio.get_running_loop().create_future()
        try:
            await self._room
        finally:
            self._room = None


def _known(counted: dict[str, int], reason: str) -> str:
    return reason if reason in counted or len(counted) < REASON_MAX else "other"


class Hub:
    """Every fan of a gateway, by the name of its stream."""

    def __init__(self, connect: Callable[[], AsyncConsumer], terms: Terms, figures: Figures) -> None:
        """`connect` makes the connection to clawd, or to several."""
        self._connect = connect
        self._terms = terms
        self._figures = figures
        self._consumer: AsyncConsumer | None = None
        self._fans: dict[str, list[Fan]] = {}

    def consumer(self) -> AsyncConsumer:
        """The connection to clawd. Raises ControlError when none is there."""
        if self._consumer is None:
            self._consumer = self._connect()
        return self._consumer

    def join(self, name: str, position: Position | None, wait: float) -> tuple[Fan, int]:
        """A fan that has what comes after `position`, and the number of its first event. Raises ClawdError."""
        for fan in self._fans.get(name, ()):
            at = fan.find(position)
            if at is not None and not fan.over:
                return fan, at
        try:
            fan = Fan(self.consumer(), name, position, min(wait, self._terms.open_wait), self._terms, self._figures)
        except ControlError:
            self.drop()
            raise
        self._fans.setdefault(name, []).append(fan)
        return fan, 0

    def main(self, name: str) -> Fan | None:
        """The fan that the others of this stream give way to."""
        return next((fan for fan in self._fans.get(name, ()) if not fan.over), None)

    def leave(self, fan: Fan, follower: Follower) -> None:
        """It does not read that fan any more."""
        fan.followers.discard(follower)
        if not fan.followers:
            fans = self._fans.get(fan.name, [])
            if fan in fans:
                fans.remove(fan)
                if not fans:
                    del self._fans[fan.name]
            fan.close()

    def drop(self) -> None:
        """The connection is of no use any more; the next reader gets another."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    @property
    def streams(self) -> int:
        return len(self._fans)

    @property
    def attachments(self) -> int:
        return sum(map(len, self._fans.values()))
