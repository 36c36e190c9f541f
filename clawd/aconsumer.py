# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio. The link's descriptors are registered with the event loop itself: no thread, and a token goes
from the socket to the task that awaits it within one turn of the loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from clawd import protocol
from clawd.errors import ClawdError, ReadingClosed, ReadTimeout
from clawd.fleet import Key, open_link
from clawd.inbox import Inbox
from clawd.reading import BaseReading, Batch, Gap, Token, parse_position
from clawd.selection import Selection

__all__ = ["AsyncConsumer", "AsyncReading", "Batch", "Gap", "Token"]

T = TypeVar("T")
# Of what is here already, so that the loop's other tasks get their turns: 5 ms at most with 1,000 busy readings
_RUN = 32  # tokens a task takes before it lets others run
_BURST = 8  # messages taken at once


class AsyncReading(BaseReading):
    """One reading of one stream: `async for` over it, `read` or `read_batch`, from one task at a time.

    Iteration ends when the stream did; `end_reason` says why. A reading that clawd refuses raises AttachError. A task
    that is cancelled while it reads takes no token with it: the next read has it. `cancel` and `close` do not wait.
    """

    _owner: AsyncConsumer

    def __init__(self, owner: AsyncConsumer, inbox: Inbox) -> None:
        super().__init__(owner, inbox)
        self._run = _RUN
        self._busy = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if self._run and not self._busy:
            self._run -= 1
            token = self._take()
            if token is not None:
                return token
        token = await self._next(self._take, None)
        if token is None:
            raise StopAsyncIteration
        return token

    async def read(self, timeout: float | None = None) -> Token | None:
        """The next token, None at the end. Raises ReadTimeout when none came within `timeout` seconds."""
        return await self._next(self._take, timeout)

    async def read_batch(self, timeout: float | None = None) -> Batch | None:
        """All tokens that are here, up to the next gap, and at least one. None at the end. Raises as `read`."""
        return await self._next(self._take_batch, timeout)

    async def aclose(self) -> None:
        """`close`, for contextlib.aclosing."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    async def _next(self, take: Callable[[], T | None], timeout: float | None) -> T | None:
        if self._busy:
            raise ClawdError(f'another task is reading "{self.stream}"', "let each task attach for itself")
        deadline = None if timeout is None else self._owner._loop.time() + timeout
        self._busy = True
        try:
            if self._run:
                self._run -= 1
            else:
                await asyncio.sleep(0)
                self._run = _RUN
            # Nothing is awaited between the taking and the return, so that no cancellation can come between
            while (got := take()) is None and not self._over:
                await self._owner._wait(self._inbox, deadline)
                self._run = _RUN
            return got
        finally:
            self._busy = False

    def _turn_page(self) -> bool:
        self._owner._check_place()
        return super()._turn_page()

    def _take_batch(self) -> Batch | None:
        self._owner._check_place()
        return super()._take_batch()


class _LoopWatcher:
    """Stands for the epoll that a link registers its descriptors with."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[int], object]) -> None:
        self._loop = loop
        self._callback = callback

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def register(self, fd: socket.socket | int, events: int, /) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        self._loop.add_reader(number, self._callback, number)

    def unregister(self, fd: socket.socket | int, /) -> None:
        self._loop.remove_reader(fd if isinstance(fd, int) else fd.fileno())


class AsyncConsumer:
    """A connection to the clawd of `runtime_dir` (else $CLAWD_RUNTIME_DIR, else /run/clawd), for the tasks of the event
    loop that runs when it is made.

    Raises ControlError when no clawd is there. One that goes away later is waited for, then readings go on.

    `endpoint` instead: a clawd on another host, `tcp://HOST:PORT`, or a list of those and of runtime directories, of
    which a reading finds the one that has its stream. `key`: this client's key file, `server_key`: that clawd's public
    key or a file that has it, or one by endpoint. A clawd behind an endpoint need not be there yet.
    """

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str] | None = None,
        *,
        endpoint: str | Sequence[str] | None = None,
        key: Key | None = None,
        server_key: Key | Mapping[str, Key] | None = None,
    ) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise ClawdError("no event loop runs here", "make an AsyncConsumer inside of a coroutine") from error
        self._closed = False
        self._waiters: dict[Inbox, asyncio.Future[None]] = {}
        self._selection: Selection[AsyncReading] = Selection()
        self._again: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._link = open_link(runtime_dir, endpoint, key, server_key)
        self._watcher = _LoopWatcher(self._loop, self._hear)
        self._link.watch(self._watcher)
        self._used()

    @property
    def degrade(self) -> int:
        """How much of what is not needed to leave out, 0 nothing … 3 all: this client takes too slowly what it is
        sent, or clawd's host is short of processor time. As of the last frame.
        """
        return self._link.degrade

    def attach(
        self,
        stream: str,
        after: str | None = None,
        *,
        wait: float = 30.0,
        credit: int = protocol.CREDIT_DEFAULT,
        on_gone: str = "keep",
        grace: float = 30.0,
    ) -> AsyncReading:
        """Start to read `stream`; returns at once. `after` is a `position` to go on from.

        A stream that is not open yet is waited for `wait` seconds. clawd sends at most `credit` bytes (a token's text
        and 24 more) that were not read, which bounds the memory of a reading until it is closed.

        `on_gone`: what clawd does with the stream when this reading was its last and is gone, closed or by a lost
        connection: "keep" it, or "cancel" it when no reader has come `grace` seconds later, also before it opened.
        """
        position = None if after is None else parse_position(after)
        self._check()
        inbox = self._link.attach(stream, position, wait, credit, on_gone, grace)
        reading = AsyncReading(self, inbox)
        self._selection.add(inbox, reading)
        self._used()
        return reading

    async def select(self, timeout: float | None = None) -> list[AsyncReading]:
        """Readings that have something here, for one task that reads many: then `read_batch` them.

        At least one, each until all it has was read; one that ended or failed a last time, so that its next read says
        so. Empty when nothing is read any more. Raises ReadTimeout when nothing came within `timeout` seconds.
        """
        deadline = None if timeout is None else self._loop.time() + timeout
        while True:
            self._check()
            found = self._selection.take()
            if found or self._selection.is_empty:
                return found
            if self._selection in self._waiters:
                raise ClawdError("another task selects from this consumer", "let each task have a consumer of its own")
            await self._wait(self._selection, deadline)

    def close(self) -> None:
        """Close every reading and the connection. Idempotent; tasks that still read get ReadingClosed."""
        if self._link.disowned or self._closed:
            return
        if self._loop.is_running():
            self._check_place()
        self._closed = True
        for handle in (self._again, self._timer):
            if handle is not None:
                handle.cancel()
        if not self._watcher.closed:
            self._link.unwatch(self._watcher)
        self._link.close()
        if not self._watcher.closed:
            self._dispatch()

    async def aclose(self) -> None:
        """`close`, for contextlib.aclosing."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    # ---- for readings

    def _check_place(self) -> None:
        if self._link.disowned:
            raise ReadingClosed("this consumer belongs to the parent process", "make a new one after fork")
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if not here:
            raise ClawdError("this consumer belongs to another event loop", "make one in each loop that reads")

    def _check(self) -> None:
        self._check_place()
        if self._closed:
            raise ReadingClosed("the consumer is closed")

    def _grant(self, inbox: Inbox) -> None:
        self._check()
        self._link.grant(inbox)
        self._used()

    def _cancel(self, inbox: Inbox) -> None:
        self._check()
        self._link.cancel(inbox)
        self._used()

    def _detach(self, inbox: Inbox) -> None:
        if self._link.disowned or self._closed:
            return
        self._check_place()
        self._selection.drop(inbox)
        self._link.detach(inbox, ReadingClosed(f'the reading of "{inbox.stream}" is closed'))
        self._used()

    def _ended(self, inbox: Inbox) -> None:
        self._selection.end(inbox)

    async def _wait(self, inbox: Inbox, deadline: float | None) -> None:
        """Return when `inbox` may have something; raise its error, or ReadTimeout."""
        self._check()
        if inbox.done and not inbox.pending:
            self._ended(inbox)
            raise inbox.error or ReadingClosed(f'the reading of "{inbox.stream}" is at its end')
        if deadline is not None and self._loop.time() >= deadline:
            self._link.is_idle = False  # what came by now was not told yet
            self._turn()
            if not (inbox.pending or inbox.done):
                raise ReadTimeout(f'nothing came from "{inbox.stream}" in time')
            return
        waiter = self._waiters[inbox] = self._loop.create_future()
        timer = None if deadline is None else self._loop.call_at(deadline, _wake, waiter)
        try:
            await waiter
        finally:
            del self._waiters[inbox]
            if timer is not None:
                timer.cancel()

    # ---- on the loop

    def _hear(self, fd: int) -> None:
        """A descriptor has something."""
        is_relay = fd == self._link.relay_fd
        if not is_relay or self._again is None:
            self._turn(control=not is_relay, relay=is_relay)

    def _used(self) -> None:
        """The relay was used: what its descriptor had to tell may be gone, so look at it again soon."""
        if self._again is None:
            self._again = self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._again = None
        self._turn()

    def _turn(self, *, control: bool = False, relay: bool = False) -> None:
        """Take what is there, up to a bound; wake who waits for it; come again if that was not all."""
        link = self._link
        link.pump(control=control, relay=relay, burst=_BURST)
        if not link.is_idle:  # mostly this says that it was all, without another turn of the loop
            link.pump(control=False, burst=_BURST)
        self._dispatch()
        if not link.is_idle:
            self._used()
        deadline = link.next_deadline()
        if deadline != self._timer_at:
            self._set_timer(deadline)

    def _dispatch(self) -> None:
        ready, waiters = self._link.ready, self._waiters
        if not ready:
            return
        for inbox in ready:
            if inbox in waiters:
                _wake(waiters[inbox])
        if self._selection.note(ready) and self._selection in waiters:
            _wake(waiters[self._selection])
        ready.clear()

    def _set_timer(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, deadline
        if deadline is not None:  # by time.monotonic(), which need not be the loop's clock
            at = self._loop.time() + max(0.0, deadline - time.monotonic())
            self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = self._timer_at = None
        self._turn()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
