# SPDX-License-Identifier: Apache-2.0
"""The thread that finds the next clawd when the one a producer was attached to is gone."""

from __future__ import annotations

import errno
import os
import select
import threading
import weakref
from time import monotonic
from typing import Any, Protocol

from clawd.core import ffi, lib

PAUSE_MIN, PAUSE_MAX = 0.005, 0.5
"""Seconds between two tries: a tenth of the time that clawd was away, within these."""
_OVER = (-errno.ESHUTDOWN, -errno.ENOTCONN, -errno.ECHILD)


class Watched(Protocol):
    """What a ring does for it."""

    def hello(self) -> bytes | None:
        """What to say to the next clawd; None: there is nothing to go on with."""

    def take_over(self, fd: int, answer: Any, event_fd: int, count: int) -> int:
        """What came of it, as claw_take_over()."""


class Watcher:
    """Its state. Refers to the ring weakly: one that nobody else refers to must go at once."""

    def __init__(self, ring: Watched, directory: bytes, control_fd: int, name: str) -> None:
        self._ring = weakref.ref(ring)
        self._directory = directory
        self._over = threading.Event()
        # of its own, so that no poll ever is on a number that serves somebody else meanwhile; the ring's end wakes it,
        # because claw_detach() shuts the connection down
        fd = os.dup(control_fd)
        self._thread = threading.Thread(target=self._run, args=(fd,), name=f"clawd watch {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(fd)
            raise

    def stop(self) -> None:
        """Before the ring is detached."""
        self._over.set()

    def join(self) -> None:
        """After it. Leaves alone a thread that waits for a clawd which does not answer: that ends by itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(PAUSE_MAX)

    def _run(self, fd: int) -> None:
        while fd >= 0:
            poller = select.poll()
            poller.register(fd, select.POLLRDHUP)  # not POLLIN: bytes that nobody reads would keep it awake
            poller.poll()
            os.close(fd)
            fd = self._find()

    def _find(self) -> int:
        """Try until a clawd goes on with the ring; a descriptor of that connection, -1 when all is over."""
        gone = monotonic()
        answer = ffi.new("struct claw_attached *")
        event_fd, count = ffi.new("int *", -1), ffi.new("int *")
        while not self._over.is_set():
            ring = self._ring()
            hello = ring and ring.hello()
            ring = None
            if not hello:
                return -1
            ffi.memmove(answer, bytes(ffi.sizeof("struct claw_attached")), ffi.sizeof("struct claw_attached"))
            count[0] = 0
            fd = lib.claw_py_dial(self._directory, hello, answer, event_fd, count)
            own = os.dup(fd) if fd >= 0 else -1
            ring = self._ring()
            if ring is None:
                for each in (fd, own, event_fd[0] if count[0] else -1):
                    if each >= 0:
                        os.close(each)
                return -1
            result = ring.take_over(fd, answer, event_fd[0], count[0])
            ring = None
            if result == 0:
                return own
            if own >= 0:
                os.close(own)
            if result in _OVER:
                return -1
            self._over.wait(min(max((monotonic() - gone) / 10, PAUSE_MIN), PAUSE_MAX))
        return -1
