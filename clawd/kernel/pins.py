# SPDX-License-Identifier: Apache-2.0
"""What of the shaper outlives a helper that is killed: pins in a directory of a BPF file system. Its lock is the
helper's whose pins they are, and ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from clawd.kernel import bpfcall

PREFIX = "shaper-"
"""Of our pins. Whatever else lies in there is not ours and stays."""


class Pins:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = -1

    def pin(self, objects: Mapping[str, int]) -> str:
        """Instead of what an earlier helper left. Returns why that cannot be."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            why = self._take()
            if why:
                return f"{why}; it ends with clawd-kernel"
            self.sweep()
            for name, fd in objects.items():
                bpfcall.pin(fd, self._directory / f"{PREFIX}{name}")
        except OSError as error:
            self.close()
            place = self._directory.parent
            return f'nothing can be pinned in "{place}": {error.strerror}; it ends with clawd-kernel'
        return ""

    def _take(self) -> str:
        """Whose pins they are is who has the lock of the directory. Returns why it is not us."""
        if self._lock >= 0:
            return ""
        lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(lock)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(lock)
            return f'"{self._directory}" is not for root alone'
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return f'another clawd-kernel has "{self._directory}"'
        self._lock = lock
        return ""

    def sweep(self) -> None:
        """Take away what was pinned, also by a helper that was killed."""
        with contextlib.suppress(OSError):  # there is none
            if not self._take():
                for path in self._directory.iterdir():
                    if path.name.startswith(PREFIX):
                        path.unlink(missing_ok=True)

    def close(self) -> None:
        self.sweep()
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # somebody's pin is in there
                self._directory.rmdir()
            os.close(self._lock)
            self._lock = -1
