# SPDX-License-Identifier: Apache-2.0
"""The way to a client: one contract for the real port and for the fake that other tests use."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from clawd.server.network import Network, TcpWay, Way


class FakeWay:
    """What a test says."""

    def __init__(self, network: Network | None = None) -> None:
        self.network = network

    def look(self) -> Network | None:
        return self.network


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
    yield FakeWay(Network(120, 40, 0)), lambda: None


@pytest.mark.parametrize("make", [real, fake])
def test_a_way_tells_what_it_knows(make: Callable[..., Iterator[tuple[Way, Callable[[], None]]]]) -> None:
    with make() as (way, use):
        use()
        for _ in range(2):
            network = way.look()
            assert network is not None
            assert 0 < network.rtt_us < 1_000_000
            assert 0 <= network.jitter_us < 1_000_000
            assert network.loss_ppm == 0


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
