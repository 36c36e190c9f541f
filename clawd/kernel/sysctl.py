# SPDX-License-Identifier: Apache-2.0
"""Sysctls as places. A read and a write count for the network namespace of the thread that makes them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from clawd.kernel.change import ABSENT, INVALID, MODULE, Place, Trouble, trouble

ROOT = Path("/proc/sys")
KIND = "sysctl"
NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


def canonical(text: str) -> str:
    """One space where the kernel has tabs, and numbers without what C would allow before them."""
    return " ".join(_number(word) for word in text.split())


def _number(word: str) -> str:
    try:
        return str(int(word, 0))
    except ValueError:
        return word


class Sysctls:
    """The lever. `root` is another directory in tests."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def read(self, place: Place) -> str:
        return canonical(self._raw(place))

    def _raw(self, place: Place) -> str:
        try:
            return self._path(place).read_text()
        except OSError as error:
            raise trouble(error, place.name) from error

    def _path(self, place: Place) -> Path:
        if not NAME.fullmatch(place.name):
            raise Trouble(INVALID, "this is no sysctl's name")
        return self._root / place.name.replace(".", "/")

    def write(self, place: Place, value: str) -> None:
        """Writes what is there first: what the kernel does not take back could not be put back either."""
        present = self._raw(place).strip()
        self._put(place, present, f'{place.name}: its present value "{present}" could not be put back')
        self._put(place, value, f'{place.name} = "{value}"')

    def _put(self, place: Place, value: str, what: str) -> None:
        data = f"{value}\n".encode()
        try:
            # as one write(2), whose error is seen: a buffered file would tell it when it is collected
            file = os.open(self._path(place), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                count = os.write(file, data)
            finally:
                os.close(file)
        except OSError as error:
            found = trouble(error, what)
            if found.why == ABSENT:  # the file was there to be read, so it is what the value names
                found = Trouble(MODULE, f"{what}: the kernel has no such module")
            raise found from error
        if count != len(data):
            raise Trouble(INVALID, f"{what}: the kernel took a part of it")

    def is_partial(self, live: str) -> bool:
        return False

    def operations(self, place: Place, live: str, value: str) -> Sequence[str]:
        return (f'sysctl -w {place.name}="{value}"' if " " in value else f"sysctl -w {place.name}={value}",)
