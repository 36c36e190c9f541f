# SPDX-License-Identifier: Apache-2.0
"""The way to a client: one contract for the real port and for the fake that other tests use."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from clawd.core import Told
from clawd.server.network import TcpWay, Way


class FakeWay:
    """What a test says."""

    def __init__(self, told: Told | None = None) -> None:
        self.told = told

    def look(self) -> Told | None:
        return self.told


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            yield near, far


@contextmanager
def real() -> Iterator[tuple[Way, Callable[[], None]]]:
    with pair() as (near, far):

        def use() -> None:
            for _ in range(300):
                near.sendall(b"x")
                far.recv(1)
                far.sendall(b"y")
                near.recv(1)

        yield TcpWay(near.fileno()), use


@contextmanager
def fake() -> Iterator[tuple[Way, Callable[[], None]]]:
    yield FakeWay(Told(time.monotonic_ns(), 120, 40, 600, 0)), lambda: None


@pytest.mark.parametrize("make", [real, fake])
def test_a_way_tells_what_it_knows(make: Callable[..., Iterator[tuple[Way, Callable[[], None]]]]) -> None:
    with make() as (way, use):
        use()
        for _ in range(2):
            told = way.look()
            assert told is not None
            assert 0 <= time.monotonic_ns() - told.at_ns < 20 * 10**9
            assert 0 < told.rtt_us < 1_000_000
            assert 0 <= told.jitter_us < 1_000_000
            assert told.segments >= 300
            assert told.again == 0


def test_ipc_has_none() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert TcpWay(near.fileno()).look() is None
        assert near.fileno() >= 0, "the descriptor is its owner's"
        near.send(b"still there")


def test_a_descriptor_that_is_gone_or_something_else() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    assert TcpWay(fd).look() is None
    os.close(fd)
    assert TcpWay(fd).look() is None
