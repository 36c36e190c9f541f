# SPDX-License-Identifier: Apache-2.0
"""bpf(2) where bcc does not reach: links, which end with their descriptor, pins, maps by descriptor, who else is
there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clawd.kernel.bpf import Map

# Numbers of linux/bpf.h
MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT = 1, 2, 3, 4
OBJ_PIN, OBJ_GET, OBJ_INFO = 6, 7, 15
PROG_QUERY, RAW_TRACEPOINT_OPEN, LINK_CREATE, ENABLE_STATS = 16, 17, 28, 32
INGRESS, EGRESS, SOCK_OPS, SETSOCKOPT, PERF_EVENT, TCX_EGRESS = 0, 1, 3, 22, 41, 47
QUERY_EFFECTIVE = 1
_PROG_ID_AT, _PROG_TAG_AT, _PROG_TIME_AT, _PROG_INFO_LEN = 4, 8, 192, 208
_NUMBER = {"x86_64": 321, "aarch64": 280}.get(platform.machine(), 280)
_ATTR_LEN = 128

_libc = ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attr: bytes) -> int:
    size = max(_ATTR_LEN, len(attr))
    buffer = ctypes.create_string_buffer(attr, size)
    result = int(_libc.syscall(_NUMBER, command, buffer, size))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _address(buffer: Any) -> int:
    return ctypes.addressof(buffer)


def attach(program: int, target: int, kind: int) -> int:
    """A link of `program` to `target` (a cgroup's directory, an interface's index, a perf event), which lasts as long
    as its descriptor or its pin. Others' programs stay beside it.
    """
    return _bpf(LINK_CREATE, struct.pack("=IIII", program, target, kind, 0))


def attach_tracing(program: int, tracepoint: str = "") -> int:
    """The same for a raw tracepoint, or for the function of the kernel that the program was loaded for."""
    name = ctypes.create_string_buffer(tracepoint.encode())
    return _bpf(RAW_TRACEPOINT_OPEN, struct.pack("=QI", _address(name) if tracepoint else 0, program))


def pin(fd: int, path: Path) -> None:
    name = ctypes.create_string_buffer(os.fsencode(path))
    _bpf(OBJ_PIN, struct.pack("=QII", _address(name), fd, 0))


def programs_at(target: int, kind: int, *, is_effective: bool = False) -> list[int]:
    """Ids of the programs attached at a cgroup; `is_effective`: in the order in which they run, those of above too."""
    ids = (ctypes.c_uint32 * 64)()
    size = max(_ATTR_LEN, 64)
    flags = QUERY_EFFECTIVE if is_effective else 0
    attr = ctypes.create_string_buffer(struct.pack("=IIIIQI", target, kind, flags, 0, _address(ids), len(ids)), size)
    if _libc.syscall(_NUMBER, PROG_QUERY, attr, size) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    (count,) = struct.unpack_from("=I", attr, 24)
    return list(ids[:count])


def _info(fd: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    _bpf(OBJ_INFO, struct.pack("=IIQ", fd, size, _address(buffer)))
    return buffer.raw


def program_id(fd: int) -> int:
    return int(struct.unpack_from("=I", _info(fd, _PROG_INFO_LEN), _PROG_ID_AT)[0])


def program_cost(fd: int) -> tuple[int, int]:
    """Nanoseconds it ran and how often, since `measure_cost`; zero before."""
    run_ns, runs = struct.unpack_from("=QQ", _info(fd, _PROG_INFO_LEN), _PROG_TIME_AT)
    return int(run_ns), int(runs)


def measure_cost() -> int:
    """Have the kernel take the time of every program until the returned descriptor is closed. Needs CAP_SYS_ADMIN."""
    return _bpf(ENABLE_STATS, struct.pack("=I", 0))


class Table:
    """A map by its descriptor, which stays the caller's. Keys are numbers where not called raw, values are bytes."""

    def __init__(self, of: Map) -> None:
        self._of = of

    def _call(self, command: int, key: bytes | None, value: Any = None) -> None:
        stored = ctypes.create_string_buffer(key or b"", self._of.key_size)
        place = 0 if key is None else _address(stored)
        at = 0 if value is None else _address(value)
        _bpf(command, struct.pack("=IIQQQ", self._of.fd, 0, place, at, 0))

    def _key(self, key: int) -> bytes:
        return key.to_bytes(self._of.key_size, "little")

    def get(self, key: int) -> bytes:
        """Raises KeyError. Of a map with a value for each processor: all of them, one after the other."""
        return self.get_raw(self._key(key))

    def get_raw(self, key: bytes) -> bytes:
        # The kernel writes a value for each possible processor, which may be more than bcc counted
        value = ctypes.create_string_buffer(max(self._of.value_size, 8 * possible_cpus()))
        try:
            self._call(MAP_LOOKUP, key, value)
        except FileNotFoundError as error:
            raise KeyError(key) from error
        return value.raw

    def set(self, key: int, value: bytes) -> None:
        room = ctypes.create_string_buffer(value, max(len(value), self._of.value_size))
        self._call(MAP_UPDATE, self._key(key), room)

    def remove(self, key: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(MAP_DELETE, self._key(key))

    def raw_keys(self) -> Iterator[bytes]:
        key: bytes | None = None
        following = ctypes.create_string_buffer(self._of.key_size)
        while True:
            try:
                self._call(MAP_NEXT, key, following)
            except FileNotFoundError:
                return
            key = following.raw
            yield key

    def total(self, key: int) -> int:
        """The sum over all processors of a counter."""
        values = struct.unpack_from(f"={possible_cpus()}Q", self.get(key))
        return sum(values)


def possible_cpus() -> int:
    last = Path("/sys/devices/system/cpu/possible").read_text().strip().rpartition(",")[2].rpartition("-")[2]
    return int(last) + 1


def unpack(of: Map, value: bytes | memoryview) -> dict[str, int]:
    """The numbers of a value by name."""
    return {
        field.name: int.from_bytes(value[field.offset : field.offset + field.size], "little")
        for field in of.layout
        if field.count == 1
    }


def packed(of: Map, values: Mapping[str, int | bytes]) -> bytes:
    """A value of these fields, zero where nothing is said."""
    room = bytearray(of.value_size)
    for field in of.layout:
        value = values.get(field.name, 0)
        made = value.ljust(field.size, b"\0") if isinstance(value, bytes) else value.to_bytes(field.size, "little")
        room[field.offset : field.offset + field.size] = made
    return bytes(room)


def mapped(of: Map, *, is_written: bool = False) -> mmap.mmap:
    """The values of a mappable array as memory."""
    size = -(-of.value_size * of.entries // mmap.PAGESIZE) * mmap.PAGESIZE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0)
    return mmap.mmap(of.fd, size, mmap.MAP_SHARED, protection)
