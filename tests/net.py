# SPDX-License-Identifier: Apache-2.0
"""A host of its own for a daemon and one for its clients, with a network between them that can be bad. Nothing of it is
seen by this host, and nothing is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.daemon import Daemon
from tests.tunnel import ADDRESSES

T = TypeVar("T")
NEAR, FAR = ADDRESSES
"""The daemon's address and the clients'."""
PORT = 7400
_CLONE_NEWNET = 0x40000000


def reason() -> str:
    """Why there can be none here, empty if there can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "needs /dev/net/tun"


class Net:
    """`loss` is a share of the packets of each direction, `delay_s` of one way and `jitter_s` how much it strays from
    that at most, `rate` bytes a second of each way.
    """

    def __init__(self, seed: int, **quality: float) -> None:
        command = [sys.executable, str(Path(__file__).with_name("tunnel.py")), str(seed)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )  # fmt: skip
        assert self._process.stdout
        near, far = json.loads(self._process.stdout.readline())
        self._near, self._far = (f"/proc/{self._process.pid}/fd/{fd}" for fd in (near, far))
        self.endpoint = f"tcp://{NEAR}:{PORT}"
        self.be(**quality)

    def __enter__(self) -> Net:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def be(self, **quality: Any) -> dict[str, int]:
        """Change: loss, delay_s, jitter_s, rate, up. Returns what it counted so far."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(quality) + "\n")
        self._process.stdin.flush()
        counted: dict[str, int] = json.loads(self._process.stdout.readline())
        return counted

    def there(self, make: Callable[[], T], *, near: bool = False) -> T:
        """What `make` returns on the clients' host (or the daemon's): a thread goes there, and those it starts."""
        made: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                namespace = os.open(self._near if near else self._far, os.O_RDONLY)
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(namespace)
                made.append(make())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return made[0]


class NearDaemon(Daemon):
    """A daemon on its own host."""

    def __init__(self, net: Net, runtime_dir: Path, *flags: str) -> None:
        super().__init__(runtime_dir, *flags)
        self._net = net

    def launch(self) -> None:
        # the thread's host is the process's, and that of the abstract socket it reports to
        self._net.there(super().launch, near=True)
