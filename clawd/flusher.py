# SPDX-License-Identifier: Apache-2.0
"""The thread that moves on what an engine wrote while its ring was full. There is none until that happens."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

LINGER = 1.0
"""Seconds without anything to move until the thread ends and the overflow's memory is given back."""


class Flushed(Protocol):
    """What a ring does for it."""

    def flush(self) -> int:
        """Move on what fits; how many records are left, below 0 when the ring takes no more."""

    def left(self) -> int:
        """How many records are left."""

    def sleep(self) -> None:
        """Until something can be moved on, without the interpreter."""


class Flusher:
    """Its state. Knows no ring but the one its thread works on: a ring that nobody refers to must go at once."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._lock = threading.Lock()  # guards _thread against an end and a start at the same time
        self._thread: threading.Thread | None = None

    def start(self, ring: Flushed, name: str) -> None:
        """See that the overflow of `ring` is moved on. Cheap when that is so."""
        if self._wanted.is_set():
            return
        self._wanted.set()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, args=(ring,), name=f"clawd flush {name}", daemon=True)
                # no thread to be had: the next call tries again, and each one moves on what fits by itself
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
                if self._thread is None:
                    self._wanted.clear()

    def _run(self, ring: Flushed) -> None:
        while True:
            while (left := ring.flush()) > 0:
                ring.sleep()
            self._wanted.clear()
            if left == 0 and ring.left():  # written before the line above, when it was wanted already
                self._wanted.set()
                continue
            if left == 0 and self._wanted.wait(LINGER):
                continue
            with self._lock:
                if left < 0 or not self._wanted.is_set():
                    if left == 0:
                        ring.flush()  # with nothing left it gives the memory back
                    self._thread = None
                    return

    def join(self) -> None:
        """Wait for the thread of a ring that takes no more."""
        thread = self._thread
        self._wanted.set()  # one that lingers
        if thread and thread is not threading.current_thread():
            thread.join()
