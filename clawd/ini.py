# SPDX-License-Identifier: Apache-2.0
"""Reads INI text line by line, so that whatever is wrong with it has its line. Knows no settings.

A subset of what configparser takes, which keeps no lines: [section], key = value, no continued lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMMENT = re.compile(r"(?:^|\s)#.*")
_SECTION = re.compile(r"\[([^\[\]]*)\]")
SHOWN_MAX = 60


@dataclass(frozen=True)
class Header:
    """A line `[section]`."""

    line: int
    section: str


@dataclass(frozen=True)
class Entry:
    """A line `key = value`. `section` is None before the first header."""

    line: int
    section: str | None
    key: str
    value: str


@dataclass(frozen=True)
class Flaw:
    """A line that is neither, and what it should be."""

    line: int
    message: str
    hint: str


def printable(text: str) -> str:
    """`text` in one line, without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def shown(text: str) -> str:
    """`text` from a file as it may stand in a message: printable and not too long."""
    clean = printable(text)
    return clean if len(clean) <= SHOWN_MAX else clean[: SHOWN_MAX - 1] + "…"


def read(data: bytes) -> Iterator[Header | Entry | Flaw]:
    """The lines of a file in order, blank ones and comments left out. UTF-8 with or without BOM, any line ends.

    A comment is a line that starts with # or ;, or what follows a # with white space before it.
    """
    section: str | None = None
    lines = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    for number, raw in enumerate(lines, 1):
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            yield Flaw(number, "this line is not UTF-8", "save the file as UTF-8")
            continue
        text = _COMMENT.sub("", text).strip()
        if not text or text.startswith(";"):
            continue
        if text.startswith("["):
            match = _SECTION.fullmatch(text)
            section = match[1].strip() if match else section
            if section is None or match is None:
                yield Flaw(number, f'"{shown(text)}" is not a section', "write it as in [stream]")
            else:
                yield Header(number, section)
            continue
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            yield Flaw(number, f'"{shown(text)}" is not a setting', "write it as in keep = 60s")
        elif not (key + value).isprintable():
            yield Flaw(number, f'"{shown(text)}" holds a character that cannot be seen', "write the line anew")
        else:
            yield Entry(number, section, key, value)
