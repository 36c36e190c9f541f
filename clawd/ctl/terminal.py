# SPDX-License-Identifier: Apache-2.0
"""A terminal that is painted over and over, and given back as it was found."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_QUIT = frozenset(b"qQ\x04")


def can_repaint() -> bool:
    return bool(sys.stdout) and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _put(text: str) -> None:
    """Past sys.stdout, whose buffer refuses a signal's handler while it is being written."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


class Terminal:
    """`with Terminal() as terminal:` paints on the alternate screen. SIGTERM and SIGHUP raise SystemExit there; they,
    Ctrl-C and Ctrl-Z leave the terminal as it was.
    """

    def __init__(self) -> None:
        self._input: int | None = None
        self._modes: list[object] | None = None
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Terminal:
        if sys.stdin and sys.stdin.isatty():
            self._input = sys.stdin.fileno()
            self._modes = termios.tcgetattr(self._input)
        handlers = {signal.SIGTERM: self._end, signal.SIGHUP: self._end, signal.SIGTSTP: self._suspend}
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def paint(self, text: str) -> None:
        """The lines from the top on, as many as there are rows, over what was there."""
        lines = text.splitlines()[: self.rows]
        _put("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")

    @property
    def rows(self) -> int:
        return max(1, shutil.get_terminal_size((80, 24)).lines)

    def wait(self, until: float) -> bool:
        """Sleep until then, of time.monotonic(). False: somebody wants to quit."""
        while (left := until - time.monotonic()) > 0:
            if self._input is None:
                time.sleep(left)
            elif select.select([self._input], [], [], left)[0]:
                try:
                    keys = os.read(self._input, 64)
                except OSError:
                    keys = b""  # the terminal hung up
                if not keys or _QUIT & set(keys):
                    return False
        return True

    def _take(self) -> None:
        if self._input is not None:
            tty.setcbreak(self._input, termios.TCSADRAIN)
        _put(_ENTER)

    def _give_back(self) -> None:
        try:
            _put(_LEAVE)
            if self._input is not None and self._modes is not None:
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)  # type: ignore[arg-type]
        except (OSError, termios.error):
            pass  # it is gone: nobody sees it

    def _end(self, number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def _suspend(self, number: int, _frame: FrameType | None) -> None:
        self._give_back()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        # here again after fg
        signal.signal(signal.SIGTSTP, handler)
        self._take()
