# SPDX-License-Identifier: Apache-2.0
"""Shows text as it arrives: in a terminal one section a stream, drawn over and over; elsewhere whole lines, each with
its stream's name in front.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from rich.cells import get_character_cell_size

from clawd.ctl import render

DRAW_S = 0.05
KEPT_LINES = 100
"""Of a section; with more, only its end is shown."""
INDENT = "  "
_MARGIN = 2  # terminals disagree about the width of some characters
_UP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[{}F", "\x1b[K", "\x1b[J"
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"


class Wrap:
    """Breaks growing text into lines of at most `columns` cells: at a space where there is one near."""

    def __init__(self, columns: int) -> None:
        self._columns = max(8, columns)
        self._width = 0
        self.line = ""
        """The line that still grows."""

    def feed(self, text: str) -> list[str]:
        """Add `text`; returns the lines that are complete now."""
        done: list[str] = []
        for char in text:
            if char == "\n":
                done.append(self._take(len(self.line)))
                continue
            shown = " " if char == "\t" else render.cell(char)
            cells = get_character_cell_size(shown)
            if self._width + cells > self._columns:
                if shown == " ":
                    done.append(self._take(len(self.line)))
                    continue
                space = self.line.rfind(" ", -self._columns // 3)
                done.append(self._take(space + 1 if space >= 0 else len(self.line)))
            if shown == " " and not self.line and done:
                continue
            self.line += shown
            self._width += cells
        return done

    def _take(self, length: int) -> str:
        done, self.line = self.line[:length].rstrip(), self.line[length:]
        self._width = sum(map(get_character_cell_size, self.line))
        return done


class Screen:
    """Where the text of `names` goes; `feed` from one thread."""

    def __init__(self, out: TextIO, names: Sequence[str], columns: int, lines: int) -> None:
        self._out = out
        self._live = out.isatty()
        self._lines = lines
        self._label = max(map(len, names)) + 2
        room = columns - (len(INDENT) + _MARGIN if self._live else self._label)
        self._wraps = {name: Wrap(room) for name in names}
        self._kept: dict[str, deque[str]] = {name: deque(maxlen=KEPT_LINES) for name in names}
        self._tail = 4 * columns * lines
        self._height = 0
        self._drawn = 0.0

    def feed(self, name: str, text: str) -> None:
        """`text` has arrived. In a terminal only as much of it is kept as could be seen."""
        if self._live:
            self._kept[name].extend(self._wraps[name].feed(text[-self._tail :]))
        else:
            for line in self._wraps[name].feed(text):
                self._print(name, line)

    def refresh(self) -> None:
        """Draw, unless that was a moment ago."""
        if self._live and time.monotonic() - self._drawn >= DRAW_S:
            room = max(1, (self._lines - 1) // len(self._wraps) - 2)
            self._draw({name: self._section(name)[-room:] for name in self._wraps})

    def finish(self) -> None:
        """Show all that is kept."""
        if self._live:
            self._draw({name: self._section(name) for name in self._wraps})
            return
        for name, wrap in self._wraps.items():
            if wrap.line:
                self._print(name, wrap.line)

    def _section(self, name: str) -> list[str]:
        line = self._wraps[name].line
        return [*self._kept[name], line] if line else list(self._kept[name])

    def _print(self, name: str, line: str) -> None:
        self._out.write(f"{name:<{self._label}}{line}".rstrip() + "\n")
        self._out.flush()

    def _draw(self, sections: dict[str, list[str]]) -> None:
        rows = [row for name, lines in sections.items() for row in (name, *(INDENT + line for line in lines), "")]
        up = _UP.format(self._height) if self._height else ""
        text = "".join(f"{row}{_CLEAR_LINE}\n" for row in rows)
        self._out.write(f"{_WRAP_OFF}{up}{text}{_CLEAR_BELOW}{_WRAP_ON}")
        self._out.flush()
        self._height = len(rows)
        self._drawn = time.monotonic()
