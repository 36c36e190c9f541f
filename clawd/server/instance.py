# SPDX-License-Identifier: Apache-2.0
"""One clawd a runtime directory: its lock, its id, its sockets' places."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path
from types import TracebackType

from clawd.errors import AlreadyRunning, HostError
from clawd.protocol import CONTROL_SOCKET, RELAY_SOCKET

SOCKET_PATH_MAX = 107
"""Bytes of a Unix socket's path (unix(7), sun_path less its NUL)."""
LOCK_TRIES = 5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Another one after each start of the kernel (random(4))."""


class Instance:
    """Holds the runtime directory's lock from entry to exit; the kernel lets go of it if clawd dies."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.control_path = runtime_dir / CONTROL_SOCKET
        self.relay_path = runtime_dir / RELAY_SOCKET
        self.id = ""
        self.boot_id = b""
        """16 bytes; empty when this host does not tell."""
        self.is_new = False
        """What an earlier clawd of this id left is not to be used: it is of another boot, or there was none."""
        self._lock = -1

    def __enter__(self) -> Instance:
        longest = max(len(os.fsencode(path)) for path in (self.control_path, self.relay_path))
        if longest > SOCKET_PATH_MAX:
            spare = SOCKET_PATH_MAX - longest + len(os.fsencode(self.runtime_dir))
            raise HostError(f'runtime directory "{self.runtime_dir}" is too long', f"use one of at most {spare} bytes")
        try:
            self.runtime_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            check_owner(self.runtime_dir)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(self.runtime_dir / "lock", flags, 0o640)
        except OSError as error:
            raise HostError(f'cannot use runtime directory "{self.runtime_dir}": {error.strerror}') from error
        try:
            self._take_lock()
        except BlockingIOError as error:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise AlreadyRunning(
                f'another clawd (pid {owner or "unknown"}) serves "{self.runtime_dir}"', "stop it, or use --runtime-dir"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self._read_id()
        return self

    def _take_lock(self) -> None:
        # clawctl holds it shared for a moment when it asks whether anyone does
        for left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(0.01)

    def _read_id(self) -> None:
        """The id outlives a run, so that a start finds what an earlier one of the same directory left behind: the first
        line of the file. The second is the boot that this was in, because times count from there.
        """
        path = self.runtime_dir / "instance"
        try:
            boot = BOOT_ID.read_text().strip()
            self.boot_id = bytes.fromhex(boot.replace("-", ""))
        except (OSError, ValueError):
            boot = ""
        try:
            lines = path.read_text().split("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            lines = []
        known = len(lines) > 0 and re.fullmatch(r"[0-9a-f]{16}", lines[0])
        self.id = lines[0] if known else os.urandom(8).hex()
        self.is_new = not known or lines[1:] != [boot, ""]
        if self.is_new:
            new = path.with_name("instance.new")
            new.write_text(f"{self.id}\n{boot}\n")
            new.replace(path)  # never half of it, or nobody would find again what is of this id

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)


def check_owner(directory: Path) -> None:
    """Raise HostError unless only we (or root) decide what is in `directory`: others could put links in our way."""
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise HostError(f'runtime directory "{directory}" belongs to user {status.st_uid}', "use one of your own")
    if status.st_mode & 0o002:
        raise HostError(f'runtime directory "{directory}" can be written by everybody', f"chmod o-w {directory}")
