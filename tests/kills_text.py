# SPDX-License-Identifier: Apache-2.0
"""What a stream of the kill loop carries, by its name alone, and how its producer says how far it came: in a file that
outlives it. tests/engines/killed.c does the same in C.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from tests.history import Put
from tests.load import PROSE

STREAMS_MAX = 8192
"""Of one producer process."""
WIDTH = 4
"""Streams that a producer writes at once."""
RING_BYTES = 8192
"""Small, so that the overflow is used whenever no clawd reads."""
REASON = "stop"
PACES = (None, "off", "smooth", "steady")
_CLOSED = 1 << 31
_ENTRY = struct.Struct("=I")


def hashed(name: str) -> int:
    """FNV-1a, 32 bits."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def length(name: str) -> int:
    """Tokens of a stream."""
    return 20 + hashed(name) % 130


def token(name: str, number: int) -> Put:
    """Prose cut anywhere, also inside of characters, behind what no other token has."""
    at = (hashed(name) % 1000 + 7 * number) % len(PROSE)
    data = b"%s %d " % (name.encode(), number) + PROSE[at : at + 1 + number % 11]
    return Put(data, urgent=number % 16 == 15)


def puts(name: str, count: int) -> list[Put]:
    return [token(name, number) for number in range(count)]


class Progress:
    """A word a stream: 0 not begun, else 1 and the tokens of it that are in the ring for sure; the top bit: so is its
    end. A store to the mapping is there for others even when the next instruction never comes.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_ENTRY.size * STREAMS_MAX)
            self._words = mmap.mmap(file.fileno(), 0)

    def begin(self, index: int) -> None:
        self._put(index, 1)

    def publish(self, index: int, tokens: int, *, closed: bool = False) -> None:
        self._put(index, 1 + tokens | (_CLOSED if closed else 0))

    def _put(self, index: int, word: int) -> None:
        _ENTRY.pack_into(self._words, _ENTRY.size * index, word)

    def look(self, index: int) -> tuple[int, bool] | None:
        """(tokens, closed), None: not begun."""
        (word,) = _ENTRY.unpack_from(self._words, _ENTRY.size * index)
        return ((word & ~_CLOSED) - 1, bool(word & _CLOSED)) if word else None

    def close(self) -> None:
        self._words.close()
