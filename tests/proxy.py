# SPDX-License-Identifier: Apache-2.0
"""A relay socket between client and daemon that can be cut: a runtime directory of its own, whose control.sock leads to
the daemon's and whose relay.sock forwards bytes, until told to break off after some number of them.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from pathlib import Path
from types import TracebackType

from clawd import protocol
from tests.daemon import PATIENCE_S


class Proxy:
    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self._target = str(target / protocol.RELAY_SOCKET)
        directory.mkdir()
        (directory / protocol.CONTROL_SOCKET).symlink_to(target / protocol.CONTROL_SOCKET)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / protocol.RELAY_SOCKET))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop, self._stopped = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._changed = threading.Condition()
        self._budget: int | None = None
        self.cuts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.send(b"x")
        self._thread.join(PATIENCE_S)
        for each in (self._listener, self._stop, self._stopped):
            each.close()
        self._selector.close()

    def arm(self, count: int) -> None:
        """Break all connections off once `count` more bytes went through, in either direction."""
        with self._changed:
            self._budget = count

    def await_cuts(self, count: int) -> None:
        """Return when connections were broken off `count` times in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.cuts >= count, PATIENCE_S), f"{self.cuts} cuts, not {count}"

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    self._break_off()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._peers:  # not cut by one before it
                    assert isinstance(key.fileobj, socket.socket)
                    self._forward(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.connect(self._target)
        for one, other in ((client, server), (server, client)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = source.recv(1 << 16)
        if not data:
            self._close(source)
            return
        with self._changed:
            cut = self._budget is not None and len(data) >= self._budget
            if cut:
                data = data[: self._budget]
                self._budget = None
            elif self._budget is not None:
                self._budget -= len(data)
        with contextlib.suppress(ConnectionError):
            self._peers[source].sendall(data)
        if cut:
            self._break_off()
            with self._changed:
                self.cuts += 1
                self._changed.notify_all()

    def _break_off(self) -> None:
        for each in list(self._peers):
            self._close(each)

    def _close(self, one: socket.socket) -> None:
        other = self._peers.pop(one, None)
        if other is not None:
            del self._peers[other]
            for each in (one, other):
                self._selector.unregister(each)
                each.close()
