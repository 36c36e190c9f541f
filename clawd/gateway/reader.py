# SPDX-License-Identifier: Apache-2.0
"""One reader's connection and how far it is. It writes straight to its transport when its fan has more, without a task
of its own: a token costs each of a thousand readers one system call.
"""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import Protocol

from clawd.errors import ClawdError
from clawd.gateway.event import Event, Format
from clawd.gateway.fan import Fan, Hub
from clawd.gateway.figures import Figures
from clawd.gateway.position import Position

CHUNK_BYTES = 65_536
"""At most so much is encoded for one write."""


class Outlet(Protocol):
    """A connection that may be written to while it is not full."""

    @property
    def is_full(self) -> bool: ...

    def send(self, data: bytes) -> None:
        """Write `data` at once, or keep it."""


class Reader:
    """Reads stream `name` after `position`, or from its start. Raises ClawdError."""

    def __init__(
        self, hub: Hub, figures: Figures, form: type[Format], name: str, position: Position | None, wait: float
    ) -> None:
        self.name = name
        self.position = position
        self.form = form
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason, once the end was told."""
        self.wrote_at = 0.0
        """When something was written last, by time.monotonic()."""
        self._asked_at = time.monotonic()
        self._hub = hub
        self._figures = figures
        self._outlet: Outlet | None = None
        self._came: asyncio.Future[None] | None = None
        self._text_at = 0.0
        self._left = False
        self.fan, self.next = hub.join(name, position, wait)
        self.fan.followers.add(self)

    async def wait_first(self, timeout: float) -> None:
        """Until the first event is there, at most `timeout` seconds: an answer's status depends on it."""
        if self.next >= self.fan.end:
            self._came = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._came
            except TimeoutError:
                return
            finally:
                self._came = None

    def first(self) -> Event | None:
        """What would be told first, if it is there."""
        at = self.next - self.fan.first
        return self.fan.events[at] if 0 <= at < len(self.fan.events) else None

    def start(self, outlet: Outlet) -> None:
        """From now on events go to `outlet`, which has got the format's greeting."""
        self._outlet = outlet
        self.wrote_at = time.monotonic()
        self.wake()

    def wake(self) -> None:
        """There is more, or there is room again."""
        outlet = self._outlet
        if outlet is None:
            if self._came is not None and not self._came.done():
                self._came.set_result(None)
            return
        while not self.done.done() and not outlet.is_full:
            fan = self.fan
            if self.next < fan.first:
                self._figures.moved += 1
                try:
                    self._move(*self._hub.join(self.name, self.position, 0.0))
                except ClawdError:  # it can come again from where it is
                    self.done.set_result("unavailable")
                continue
            if self.next == fan.end:
                self._merge()
                if self.next == self.fan.end:
                    return
                continue
            self._tell(fan, outlet)

    def beat(self, now: float, keepalive: float) -> None:
        """Write something if nothing was for `keepalive` seconds."""
        outlet = self._outlet
        if outlet is not None and now - self.wrote_at >= keepalive and not outlet.is_full and not self.done.done():
            outlet.send(self.form.heartbeat)
            self.wrote_at = now

    def dismiss(self) -> None:
        """The gateway stops: tell the reader to come again."""
        if self._outlet is not None and not self.done.done():
            if self.form.farewell and not self._outlet.is_full:
                self._outlet.send(self.form.farewell)
            self.done.set_result("stopping")

    def leave(self) -> None:
        """It reads no more."""
        self._outlet = None
        if not self._left:
            self._left = True
            self._hub.leave(self.fan, self)

    def _tell(self, fan: Fan, outlet: Outlet) -> None:
        at = self.next - fan.first
        waiting = len(fan.events) - at
        events = (fan.events[-1],) if waiting == 1 else islice(fan.events, at, None)
        parts: list[bytes] = []
        size = tokens = 0
        last: Event | None = None
        for event in events:
            part = event.encoded(self.form, fan)
            parts.append(part)
            size += len(part)
            tokens += event.tokens
            last = event
            if size >= CHUNK_BYTES:
                break
        assert last is not None
        outlet.send(parts[0] if len(parts) == 1 else b"".join(parts))
        self.wrote_at = time.monotonic()
        self.next += len(parts)
        self.position = last.position
        self._count(last, tokens, size, is_live=waiting == 1)
        fan.advance(self.next)
        if last.kind == "end":
            self.done.set_result(last.reason)

    def _count(self, last: Event, tokens: int, size: int, *, is_live: bool) -> None:
        figures, now = self._figures, self.wrote_at
        figures.tokens += tokens
        figures.bytes += size
        if not tokens:
            return
        figures.burst.add(tokens)
        if not self._text_at:
            figures.first_token.add(now - self._asked_at)
        else:
            figures.delivered_gap.add(now - self._text_at)
        if tokens > 1:
            figures.delivered_gap.add(0.0, tokens - 1)
        self._text_at = now
        if is_live and last.written_ns:
            figures.added.add(max(0.0, now - last.written_ns / 1e9), tokens)

    def _merge(self) -> None:
        """Everything was told: if that is so with the stream's main fan too, follow that one."""
        main = self._hub.main(self.name)
        if main is not None and main is not self.fan and not self.fan.over:
            at = main.find(self.position)
            if at is not None:
                self._move(main, at)

    def _move(self, fan: Fan, at: int) -> None:
        fan.followers.add(self)
        old, self.fan, self.next = self.fan, fan, at
        self._hub.leave(old, self)
