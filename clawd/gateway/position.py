# SPDX-License-Identifier: Apache-2.0
"""Where a reader is in a stream, as `id:` of an event says it and `Last-Event-ID` says it again."""

from __future__ import annotations

import re
from typing import NamedTuple

from clawd.errors import ClawdError

_WRITTEN = re.compile(r"([0-9]{1,10})-([0-9]{0,19})(?:\+([0-9]{1,9}))?(!?)", re.ASCII)


class Position(NamedTuple):
    """After token `seq` of an incarnation, all of whose text was shown, and `chars` characters more of what follows it.

    `seq` is -1 before the first such token. `over`: the end was told, too. As text `7-41`, `7-41+2`, `7-41!`.
    """

    incarnation: int
    seq: int
    chars: int = 0
    over: bool = False

    def __str__(self) -> str:
        seq = self.seq if self.seq >= 0 else ""
        return f"{self.incarnation}-{seq}{f'+{self.chars}' if self.chars else ''}{'!' if self.over else ''}"


def parse(text: str) -> Position:
    """The position written as `text`. Raises ClawdError for anything else."""
    match = _WRITTEN.fullmatch(text)
    if match is None or int(match[1]) >= 2**32 or (match[2] and int(match[2]) >= 2**63):
        shown = "".join(char if char.isprintable() else "?" for char in text[:60])
        raise ClawdError(f'"{shown}" is not the id of an event', "send the last id that came, or none to start anew")
    return Position(int(match[1]), int(match[2]) if match[2] else -1, int(match[3] or 0), bool(match[4]))
