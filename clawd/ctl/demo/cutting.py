# SPDX-License-Identifier: Apache-2.0
"""Cuts text into tokens of 1 to 7 bytes, 4 on average, also inside characters; the same way for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import BinaryIO

CHUNK_BYTES = 16384
_LENGTHS = bytes(1 + value % 7 for value in range(256))


def cut(data: bytes, source: random.Random) -> list[bytes]:
    """The tokens of `data`; their join is `data`."""
    tokens: list[bytes] = []
    start = 0
    # as many lengths as bytes are enough if each were 1
    for end in accumulate(source.randbytes(len(data)).translate(_LENGTHS)):
        if start >= len(data):
            break
        tokens.append(data[start:end])
        start = end
    return tokens


def cut_file(file: BinaryIO, seed: str) -> Iterator[list[bytes]]:
    """The tokens of `file`, chunk by chunk, so that a large one needs little memory."""
    source = random.Random(seed)
    while data := file.read(CHUNK_BYTES):
        yield cut(data, source)
