# SPDX-License-Identifier: Apache-2.0
"""How values look to people: tables of at most the terminal's width, durations and sizes in units."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

ABSENT = "-"


def width() -> int:
    """Columns to use: the terminal's, 80 where there is none."""
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def duration(value_ns: int | None) -> str:
    """Three digits and a unit, as in 850us, 12.3ms, 4.20s, 3h05m."""
    if value_ns is None:
        return ABSENT
    for unit, size in (("ns", 1), ("us", 10**3), ("ms", 10**6), ("s", 10**9)):
        value = value_ns / size
        if value < 999.5 or (unit == "s" and value < 60):
            return f"{value:.0f}{unit}" if unit == "ns" or value >= 100 else f"{value:.3g}{unit}"
    minutes = value_ns // (60 * 10**9)
    if minutes < 60:
        return f"{minutes}m{value_ns // 10**9 % 60:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


def size(value: int | None) -> str:
    """Bytes with a binary unit, as in 640, 12.5k, 64M."""
    if value is None:
        return ABSENT
    scaled = float(value)
    for unit in ("", "k", "M", "G"):
        if scaled < 1024 or unit == "G":
            return f"{value}" if not unit else f"{scaled:.3g}{unit}"
        scaled /= 1024
    raise AssertionError


def cell(value: object) -> str:
    """A value as it stands in a table. What a peer named must not reach the terminal as an escape."""
    text = ABSENT if value is None else str(value)
    return "".join(char if char.isprintable() else "?" for char in text)


def fold(line: str, indent: int) -> str:
    """The line over as many as the terminal's width asks for, all but the first indented."""
    columns = width()
    pad = " " * min(indent, columns // 4)
    return textwrap.fill(line, columns, subsequent_indent=pad, break_on_hyphens=False) if len(line) > columns else line


def paragraph(text: str, columns: int) -> str:
    """Prose for help, with an empty line after it; nothing for nothing."""
    return f"{textwrap.fill(text, columns)}\n\n" if text else ""


def table(header: Sequence[str], rows: Sequence[Sequence[object]], columns: int | None = None) -> str:
    """Columns under an upper-case header, numbers to the right. A line that is too long loses the end of its first
    column, then its last columns.
    """
    most = columns or width()
    while len(header) > 1 and _least(header, rows) > most:
        header, rows = header[:-1], [row[:-1] for row in rows]
    widths = [
        max(cell_len(cell(value)) for value in (name, *column)) for name, *column in zip(header, *rows, strict=True)
    ]
    spare = most - sum(widths[1:]) - 2 * (len(header) - 1)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        numbers = bool(rows) and all(row[index] is None or _is_number(row[index]) for row in rows)
        justify: JustifyMethod = "right" if numbers else "left"
        room = widths[index] if index else min(widths[0], max(8, spare))
        made.add_column(name.upper(), justify=justify, no_wrap=True, overflow="ellipsis", width=room)
    for row in rows:
        made.add_row(*(Text(cell(value)) for value in row))
    text = io.StringIO()
    columns = max(sum(widths) + 2 * len(widths), 8)
    Console(file=text, width=columns, color_system=None, highlight=False, markup=False).print(made)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _least(header: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    """Columns such a table takes when the first is cut to 8."""
    wide = [max(cell_len(cell(value)) for value in column) for column in zip(header, *rows, strict=True)]
    return min(8, wide[0]) + sum(wide[1:]) + 2 * (len(header) - 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value[:1].isdigit())
