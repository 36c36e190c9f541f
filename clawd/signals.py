# SPDX-License-Identifier: Apache-2.0
"""Signals as a readable descriptor, so that none falls between a look at a flag and the sleep that follows it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Woken:
    """The end that is readable after a signal."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def numbers(self) -> bytes:
        """Which signals came, a byte each; then it is readable no more."""
        return self._end.recv(4096)


@contextmanager
def caught(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[Woken]:
    """Call a function at each of these signals, and make the descriptor readable; as it was before, afterwards.

    The functions run between two instructions of the main thread: they set a flag, and no more.
    """

    def call(number: int, _frame: object) -> None:
        handlers[signal.Signals(number)]()

    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    earlier_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    earlier = {number: signal.signal(number, call) for number in handlers}
    try:
        yield Woken(woken)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_fd)
        wake.close()
        woken.close()
