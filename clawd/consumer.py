# SPDX-License-Identifier: Apache-2.0
"""The synchronous client. Of the threads that wait, one (the leader) sleeps on the sockets and wakes the others, so a
token reaches a lone reader without a thread between; a keeper thread takes over when nobody reads.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from clawd import protocol
from clawd.errors import ReadingClosed, ReadTimeout
from clawd.fleet import Key, open_link
from clawd.inbox import Inbox
from clawd.reading import BaseReading, Batch, Gap, Token, parse_position
from clawd.selection import Selection

__all__ = ["Batch", "Consumer", "Gap", "Reading", "Token"]

_KEEPER_S = 0.2  # without a reader for so long, the keeper pumps
_KEEPER = Inbox("", None, 1, 0)  # stands for the keeper where the leader is named


class Reading(BaseReading):
    """One reading of one stream: iterate it, `read` or `read_batch`, from one thread at a time.

    Iteration ends when the stream did; `end_reason` says why. A reading that clawd refuses raises AttachError.
    """

    _owner: Consumer

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        token = self._take()
        if token is None:
            token = self.read()
            if token is None:
                raise StopIteration
        return token

    def read(self, timeout: float | None = None) -> Token | None:
        """The next token, None at the end. Raises ReadTimeout when none came within `timeout` seconds."""
        deadline = None
        while True:
            token = self._take()
            if token is not None or self._over:
                return token
            if timeout is not None and deadline is None:
                deadline = time.monotonic() + timeout
            self._owner._wait(self._inbox, deadline, eager=True)

    def read_batch(self, timeout: float | None = None) -> Batch | None:
        """All tokens that are here, up to the next gap, and at least one. None at the end. Raises as `read`."""
        deadline = None
        while True:
            batch = self._take_batch()
            if batch is not None or self._over:
                return batch
            if timeout is not None and deadline is None:
                deadline = time.monotonic() + timeout
            self._owner._wait(self._inbox, deadline, eager=False)


class Consumer:
    """A connection to the clawd of `runtime_dir` (else $CLAWD_RUNTIME_DIR, else /run/clawd), usable by many threads.

    Raises ControlError when no clawd is there. One that goes away later is waited for, then readings go on.

    `endpoint` instead: a clawd on another host, `tcp://HOST:PORT`, or a list of those and of runtime directories, of
    which a reading finds the one that has its stream. `key`: this client's key file, `server_key`: that clawd's public
    key or a file that has it, or one by endpoint. A clawd behind an endpoint need not be there yet.
    """

    _role = "consumer"

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str] | None = None,
        *,
        endpoint: str | Sequence[str] | None = None,
        key: Key | None = None,
        server_key: Key | Mapping[str, Key] | None = None,
    ) -> None:
        self._closed = False
        # guards the link (so both sockets) and every field below; nobody sleeps with it
        self._lock = threading.Lock()
        self._link = open_link(runtime_dir, endpoint, key, server_key, self._role)
        self._leader: Inbox | None = None
        self._followers: dict[Inbox, threading.Condition] = {}
        self._selection: Selection[Reading] = Selection()
        self._waits = 0
        self._sleep_until: float | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._link.watch(self._epoll)
        self._keeper_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._keeper_epoll = select.epoll()
        self._keeper_epoll.register(self._keeper_wake, select.EPOLLIN)
        self._link.watch(self._keeper_epoll)
        self._keeper = threading.Thread(target=self._keep, name="clawd-keeper", daemon=True)
        self._keeper.start()

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
    ) -> Reading:
        """Start to read `stream`; returns at once. `after` is a `position` to go on from.

        A stream that is not open yet is waited for `wait` seconds. clawd sends at most `credit` bytes (a token's text
        and 24 more) that were not read, which bounds the memory of a reading.

        `on_gone`: what clawd does with the stream when this reading was its last and is gone, closed or by a lost
        connection: "keep" it, or "cancel" it when no reader has come `grace` seconds later, also before it opened.
        """
        position = None if after is None else parse_position(after)
        self._check()
        with self._lock:
            self._check()
            inbox = self._link.attach(stream, position, wait, credit, on_gone, grace)
            reading = Reading(self, inbox)
            self._selection.add(inbox, reading)
            self._used()
        return reading

    def select(self, timeout: float | None = None) -> list[Reading]:
        """Readings that have something here, for one thread that reads many: then `read_batch` them.

        At least one, each until all it has was read; one that ended or failed a last time, so that its next read says
        so. Empty when nothing is read any more. Raises ReadTimeout when nothing came within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                found = self._selection.take()
                if found or self._selection.is_empty:
                    return found
            self._wait(self._selection, deadline, eager=False)

    def close(self) -> None:
        """Close every reading and the connection. Idempotent; other threads that still read get ReadingClosed."""
        if self._link.disowned:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._link.close()
            self._dispatch(None)
            os.eventfd_write(self._keeper_wake, 1)
            if self._leader is None or self._leader is _KEEPER:
                self._drop_wake()
            else:
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._keeper:
            self._keeper.join()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- for readings

    def _check(self) -> None:
        if self._link.disowned:
            raise ReadingClosed("this consumer belongs to the parent process", "make a new one after fork")
        if self._closed:
            raise ReadingClosed("the consumer is closed")

    def _grant(self, inbox: Inbox) -> None:
        self._check()
        with self._lock:
            if not self._closed:
                self._link.grant(inbox)
                self._used()

    def _cancel(self, inbox: Inbox) -> None:
        self._check()
        with self._lock:
            self._check()
            self._link.cancel(inbox)
            self._used()

    def _detach(self, inbox: Inbox) -> None:
        if self._link.disowned:
            return
        with self._lock:
            self._selection.drop(inbox)
            if not self._closed:
                self._link.detach(inbox, ReadingClosed(f'the reading of "{inbox.stream}" is closed'))
                self._used()

    def _ended(self, inbox: Inbox) -> None:
        self._selection.end(inbox)

    def _wait(self, inbox: Inbox, deadline: float | None, *, eager: bool) -> None:
        """Return once `inbox` has something; raise its error, or ReadTimeout. `eager`: with the first thing."""
        self._check()
        until = inbox if eager else None
        relay = control = False
        with self._lock:
            self._waits += 1
            if deadline is not None and time.monotonic() >= deadline:
                self._link.is_idle = False  # there will be no sleep to tell what came by now
            try:
                while True:
                    if inbox.pending:
                        return
                    if inbox.done:
                        self._ended(inbox)
                        raise inbox.error or ReadingClosed(f'the reading of "{inbox.stream}" is at its end')
                    if self._leader is None or self._leader is inbox or self._leader is _KEEPER:
                        if self._leader is _KEEPER:  # now, as what this pump leaves behind would not wake it
                            os.eventfd_write(self._keeper_wake, 1)
                        self._leader = inbox
                        self._link.pump(control=control, relay=relay, until=until)
                        relay = control = False
                        self._dispatch(inbox)
                        if inbox.pending or inbox.done or not self._link.is_idle:
                            continue
                        relay, control = self._lead(self._left(inbox, deadline))
                    else:
                        self._follow(inbox, self._left(inbox, deadline))
            finally:
                self._leave(inbox)

    @staticmethod
    def _left(inbox: Inbox, deadline: float | None) -> float | None:
        if deadline is None:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            raise ReadTimeout(f'nothing came from "{inbox.stream}" in time')
        return left

    def _lead(self, left: float | None) -> tuple[bool, bool]:
        """Sleep on the sockets. Tells whether the relay's has something, and whether another has."""
        timeout = self._until_deadline(left)
        self._lock.release()
        try:
            events = self._epoll.poll(timeout)
        finally:
            self._lock.acquire()
        if len(events) == 1 and events[0][0] == self._link.relay_fd:
            return True, False
        if events:
            self._link.is_idle = False
        if any(fd == self._wake for fd, _ in events):
            os.eventfd_read(self._wake)
        return False, bool(events)

    def _follow(self, inbox: Inbox, left: float | None) -> None:
        condition = self._followers[inbox] = threading.Condition(self._lock)
        try:
            condition.wait(left)
        finally:
            del self._followers[inbox]

    def _leave(self, inbox: Inbox) -> None:
        if self._leader is inbox:
            self._leader = None
            if self._closed:
                self._drop_wake()
        if self._leader is None and self._followers:
            next(iter(self._followers.values())).notify()

    # ---- under the lock

    def _until_deadline(self, left: float | None) -> float | None:
        """Seconds to sleep: at most `left`, at most to the link's deadline."""
        self._sleep_until = self._link.next_deadline()
        if self._sleep_until is not None:
            due = max(0.0, self._sleep_until - time.monotonic())
            return due if left is None else min(left, due)
        return left

    def _used(self) -> None:
        """The relay was used beside a sleeping leader: what its descriptor had to tell may be gone, so look here."""
        self._link.pump(control=False)
        self._dispatch(None)
        deadline = self._link.next_deadline()
        sooner = deadline is not None and (self._sleep_until is None or deadline < self._sleep_until)
        if (sooner or not self._link.is_idle) and self._leader is not None:
            self._kick()

    def _dispatch(self, me: Inbox | None) -> None:
        """Wake who waits for what arrived."""
        ready = self._link.ready
        if not ready:
            return
        selection = self._selection
        noted = selection.note(ready)
        if me is not selection or self._followers:
            if noted and me is not selection:
                self._tell(selection)
            for inbox in ready:
                if inbox is not me:
                    self._tell(inbox)
        ready.clear()

    def _tell(self, inbox: Inbox) -> None:
        if inbox is self._leader:
            self._kick()
        elif inbox in self._followers:
            self._followers[inbox].notify()

    def _kick(self) -> None:
        os.eventfd_write(self._keeper_wake if self._leader is _KEEPER else self._wake, 1)

    def _drop_wake(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    # ---- the keeper thread

    def _keep(self) -> None:
        rest = select.poll()
        rest.register(self._keeper_wake, select.POLLIN)
        seen = self._waits
        while True:
            with self._lock:
                if self._closed:
                    break
                lead = self._leader is None and seen == self._waits
                if lead:
                    self._leader = _KEEPER
                seen = self._waits
            if lead:
                self._keep_pumping()
            elif rest.poll(_KEEPER_S * 1000):
                os.eventfd_read(self._keeper_wake)
        self._keeper_epoll.close()
        os.close(self._keeper_wake)

    def _keep_pumping(self) -> None:
        """Until a reader takes over."""
        while True:
            with self._lock:
                if self._closed or self._leader is not _KEEPER:
                    return
                self._link.is_idle = False  # told or not: this is not often
                self._link.pump()
                self._dispatch(None)
                if not self._link.is_idle:
                    continue
                timeout = self._until_deadline(None)
            if any(fd == self._keeper_wake for fd, _ in self._keeper_epoll.poll(timeout)):
                os.eventfd_read(self._keeper_wake)
