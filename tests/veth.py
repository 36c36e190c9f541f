# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces of a test's own, with a link between them."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
NEAR, FAR = "10.99.0.1", "10.99.0.2"
_libc = ctypes.CDLL(None, use_errno=True)


class Side:
    def __init__(self) -> None:
        command = ["unshare", "-n", "sh", "-c", "ip link set lo up && echo up && exec sleep 600"]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.holder.stdout
        assert self.holder.stdout.readline() == b"up\n"

    def run(self, words: str) -> str:
        command = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *words.split()]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def make(self, what: Callable[[], T]) -> T:
        """The result of `what`, called inside: a socket stays where it was made."""
        made: list[T] = []

        def inside() -> None:
            with open(f"/proc/{self.holder.pid}/ns/net") as file:
                assert _libc.setns(file.fileno(), CLONE_NEWNET) == 0
            made.append(what())

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join(20)
        return made[0]

    def end(self) -> None:
        self.holder.kill()
        self.holder.wait()
        assert self.holder.stdout
        self.holder.stdout.close()


@contextmanager
def link() -> Iterator[tuple[Side, Side]]:
    near, far = Side(), Side()
    try:
        near.run(f"ip link add near type veth peer name far netns {far.holder.pid}")
        near.run(f"ip addr add {NEAR}/24 dev near")
        far.run(f"ip addr add {FAR}/24 dev far")
        for side, device in ((near, "near"), (far, "far")):
            side.run(f"ip link set {device} up")
        yield near, far
    finally:
        near.end()
        far.end()


@contextmanager
def connection(near: Side, far: Side) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Accepted by the near side, and its peer."""
    listener = near.make(lambda: socket.create_server((NEAR, 0)))
    with listener:
        peer = far.make(lambda: socket.create_connection(listener.getsockname(), 20))
        with peer:
            ours, _ = listener.accept()
            with ours:
                yield ours, peer
