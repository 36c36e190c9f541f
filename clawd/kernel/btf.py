# SPDX-License-Identifier: Apache-2.0
"""The running kernel's own description of its types (BTF): numbers of functions, where members of structs are."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawd.errors import HostError

FILE = Path("/sys/kernel/btf/vmlinux")
_MAGIC = 0xEB9F
_STRUCT, _FUNCTION = 4, 12
# Bytes that follow each kind's 12, by its number in linux/btf.h: so many, and so many for each member
_MORE = {1: (4, 0), 3: (12, 0), 4: (0, 12), 5: (0, 12), 6: (0, 8), 13: (0, 8), 14: (4, 0), 15: (0, 12), 17: (4, 0),
         19: (0, 12)}  # fmt: skip


@dataclass(frozen=True)
class Types:
    """`functions` and `structs`: numbers by name. `members`: bytes from the start, by struct and member."""

    functions: dict[str, int]
    structs: dict[str, int]
    members: dict[tuple[str, str], int]


def look_up(functions: Sequence[str], members: Sequence[tuple[str, str]], file: Path = FILE) -> Types:
    """What of these is there. Raises HostError with the first that is not. Takes a fifth of a second."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise HostError("this kernel does not describe its types (CONFIG_DEBUG_INFO_BTF)") from error
    found = Types({}, {}, {})
    try:
        _fill(found, data, {name.encode() for name in functions}, {name.encode() for name, _ in members})
    except (struct.error, ValueError) as error:
        raise HostError(f'"{file}" is no description of types that is known here') from error
    for name in functions:
        if name not in found.functions:
            raise HostError(f"this kernel has no {name}()")
    for place in members:
        if place not in found.members:
            raise HostError(f"this kernel has no {'.'.join(place)}")
    return found


def _fill(found: Types, data: bytes, functions: set[bytes], structs: set[bytes]) -> None:
    magic, _version, _flags, header, type_at, type_len, text_at, text_len = struct.unpack_from("=HBBIIIII", data)
    if magic != _MAGIC:
        raise ValueError(magic)
    types = memoryview(data)[header + type_at : header + type_at + type_len]
    text = data[header + text_at : header + text_at + text_len]
    # Names are told apart by where they are: few are looked for, and most types are passed without a look at theirs
    names = {text.index(b"\0" + name + b"\0") + 1: name.decode() for name in functions | structs if _has(text, name)}
    for number, kind, name_at, count, at in _each(types):
        name = names.get(name_at)
        if name is None:
            continue
        if kind == _FUNCTION and name.encode() in functions:
            found.functions[name] = number
        elif kind == _STRUCT and name.encode() in structs:
            found.structs[name] = number
            _members(found, name, text, types[at + 12 : at + 12 + 12 * count])


def _has(text: bytes, name: bytes) -> bool:
    return b"\0" + name + b"\0" in text


def _each(types: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, kind, name's place, members, place of each type."""
    at = number = 0
    while at < len(types):
        name_at, info, _size = struct.unpack_from("=III", types, at)
        number += 1
        kind, count = info >> 24 & 31, info & 0xFFFF
        yield number, kind, name_at, count, at
        fixed, each = _MORE.get(kind, (0, 0))
        at += 12 + fixed + each * count


def _members(found: Types, name: str, text: bytes, rows: memoryview) -> None:
    for name_at, _type, bits in struct.iter_unpack("=III", rows):
        member = text[name_at : text.index(b"\0", name_at)].decode()
        found.members[name, member] = (bits & 0xFFFFFF) // 8  # above these: how wide a bit field is
