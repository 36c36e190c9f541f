# SPDX-License-Identifier: Apache-2.0
"""Clients of other hosts: the whole path by tcp, peers that vanish, bad ways. Each test has two hosts of its own."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd.consumer import Consumer
from clawd.keys import Allowed, allow, make_pair, make_server, write_pair
from clawd.producer import Producer
from clawd.server import tcp
from tests import load, net
from tests.daemon import PATIENCE_S, until
from tests.history import History, Put
from tests.net import NEAR, PORT, NearDaemon, Net
from tests.test_ctl import clawctl, told

pytestmark = pytest.mark.skipif(bool(net.reason()), reason=net.reason() or "can")


@pytest.fixture
def way(seed: int) -> Iterator[Net]:
    with Net(seed) as made:
        yield made


class Site:
    """A daemon on one host, with keys, and what a client on the other needs."""

    def __init__(self, way: Net, directory: Path, *flags: str) -> None:
        self.way = way
        self.keys = directory / "keys"
        self.keys.mkdir(exist_ok=True)
        self.server = make_server(self.keys)
        self.key = directory / "gw.key"
        if not self.key.exists():
            pair = make_pair()
            write_pair(self.key, pair, "test")
            allow(self.keys, Allowed("gw", pair.public, "consumer"))
        self.daemon = NearDaemon(
            way, directory / "run", "--tcp-listen", f"{NEAR}:{PORT}", "--keys-dir", str(self.keys), *flags
        )

    def consumer(self, **changed: Any) -> Consumer:
        options = {"key": self.key, "server_key": self.server.public} | changed
        return self.way.there(lambda: Consumer(endpoint=self.way.endpoint, **options))


@contextmanager
def site(way: Net, directory: Path, *flags: str) -> Iterator[Site]:
    made = Site(way, directory, "--pace", "off", *flags)
    with made.daemon:
        yield made


def test_streams_by_tcp_are_what_was_written(way: Net, tmp_path: Path, history: History, dice: random.Random) -> None:
    way.be(loss=0.02, delay_s=0.002)
    with site(way, tmp_path) as here, here.consumer() as consumer, Producer("p", here.daemon.runtime_dir) as producer:
        names = load.names(20, "far")
        readings = {name: consumer.attach(name) for name in names}
        streams = {name: producer.open(name) for name in names}
        for number in range(50):
            for name, stream in streams.items():
                data = f"{number} of {name} ".encode() * dice.randrange(1, 20)
                urgent = dice.random() < 0.1
                stream.write(data, urgent=urgent)
                history.put(name, Put(data, urgent))
        for name, stream in streams.items():
            stream.close("stop")
            history.end(name, "stop")
            history.reading(name).follow(readings[name])
        copied = here.daemon.total("copied_frames")
        assert copied > 0, "first and urgent tokens go twice"
        until(lambda: consumer._link.duplicates == copied, "all copies to come")
    history.check()


def test_clawctl_tells_of_a_client_what_is_known_of_it(way: Net, tmp_path: Path) -> None:
    way.be(delay_s=0.02)
    with site(way, tmp_path) as here, Producer("p", here.daemon.runtime_dir) as producer:
        with here.consumer() as consumer:
            reading, stream = consumer.attach("s"), producer.open("s")
            stream.write("hello")
            assert reading.read(PATIENCE_S)
            assert told(here.daemon.runtime_dir, "status")["clients"] == 1
            [row] = told(here.daemon.runtime_dir, "consumers")["consumers"]
            assert row["name"].startswith("gw/")
            until(lambda: told(here.daemon.runtime_dir, "consumers")["consumers"][0]["rtt_us"], "its round trip")
            head, line = clawctl(here.daemon.runtime_dir, "consumers", columns=100).stdout.splitlines()
            assert head.split()[-6:] == ["RTT", "JITTER", "LOSS", "SINCE", "PID", "UID"]
            assert line.split()[-2:] == ["-", "-"], "there is no process of this host, and no user"
        until(lambda: told(here.daemon.runtime_dir, "status")["clients"] == 0, "it to be gone")


def test_options_of_listeners_reach_the_sockets_that_carry_tokens(way: Net, tmp_path: Path) -> None:
    want = {
        "TCP_NODELAY": (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        "TCP_NOTSENT_LOWAT": (socket.IPPROTO_TCP, tcp.TCP_NOTSENT_LOWAT, tcp.LOWAT_BYTES),
        "SO_KEEPALIVE": (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        "TCP_USER_TIMEOUT": (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 6000),
        "TCP_KEEPIDLE": (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    }

    def look() -> dict[str, int]:
        with tcp.listen(NEAR, 7500, fastopen=True, keepalive_ns=3_000_000_000) as listener:
            with socket.create_connection((NEAR, 7500)):
                accepted, _ = listener.accept()
            with accepted:
                found = {name: accepted.getsockopt(level, option) for name, (level, option, _) in want.items()}
            return found | {"TCP_FASTOPEN": listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN)}

    found = way.there(look, near=True)
    assert found == {name: value for name, (_, _, value) in want.items()} | {"TCP_FASTOPEN": tcp.BACKLOG}


@pytest.mark.parametrize("direction", ["both ways", "to the client"])
def test_a_client_that_vanishes_without_a_word_is_found_in_time(way: Net, tmp_path: Path, direction: str) -> None:
    """Within twice the keepalive, and what a loaded machine takes; its stream is cancelled by its grace."""
    keepalive_s = 2.0
    with site(way, tmp_path, "--keepalive", "2s") as here, Producer("p", here.daemon.runtime_dir) as producer:
        consumer = here.consumer()
        try:
            reading = consumer.attach("s", on_gone="cancel", grace=0.5)
            stream = producer.open("s")
            stream.write("x")
            assert reading.read(PATIENCE_S)
            way.be(up=False)
            started = time.monotonic()
            if direction == "to the client":
                stream.write("more")  # unacked: the kernel sees it too
            here.daemon.log.wait("client gone")
            took = time.monotonic() - started
            print(f"found after {took:.2f} s")
            assert took <= 2 * keepalive_s + 0.5
            until(lambda: stream.cancelled, "the grace to end")
        finally:
            way.be(up=True)
            consumer.close()


def test_a_way_that_comes_back_goes_on_where_it_was(way: Net, tmp_path: Path, history: History) -> None:
    with (
        site(way, tmp_path, "--keepalive", "1s") as here,
        here.consumer() as consumer,
        Producer("p", here.daemon.runtime_dir) as producer,
    ):
        reading, stream = consumer.attach("s"), producer.open("s")
        got = history.reading("s")
        for number in range(4):
            for each in range(20):
                data = b"%d-%d " % (number, each)
                stream.write(data)
                history.put("s", data)
            if number == 1:
                way.be(up=False)
                here.daemon.log.wait("client gone")
                way.be(up=True)
            if number == 2:
                here.daemon.kill()
                here.daemon.start()
                until(lambda: not producer.backlog[1], "the producer to be attached again")
            got.follow(reading, limit=20 * (number + 1))
        stream.close("stop")
        history.end("s", "stop")
        got.follow(reading)
    history.check()


def test_every_frame_goes_on_both_lanes_while_much_is_lost(way: Net, tmp_path: Path, history: History) -> None:
    with site(way, tmp_path) as here, here.consumer() as consumer, Producer("p", here.daemon.runtime_dir) as producer:
        way.be(loss=0.06, delay_s=0.001)
        reading, stream = consumer.attach("s"), producer.open("s")
        got = history.reading("s")
        count = 0

        def feed(until_line: str) -> None:
            nonlocal count
            while not here.daemon.log.find(until_line):
                for _ in range(50):
                    stream.write(b"%d " % count)
                    history.put("s", b"%d " % count)
                    count += 1
                    got.follow(reading, limit=count)

        feed("frames go on both lanes")
        before = consumer._link.duplicates
        way.be(loss=0.0)
        feed("one lane is enough")
        assert consumer._link.duplicates > before
        stream.close("stop")
        history.end("s", "stop")
        got.follow(reading)
    history.check()


def test_many_idle_connections_keep_a_known_client_out_of_nothing(way: Net, tmp_path: Path) -> None:
    with site(way, tmp_path) as here, Producer("p", here.daemon.runtime_dir) as producer:

        def crowd() -> list[socket.socket]:
            return [socket.create_connection((NEAR, PORT + number % 2)) for number in range(1000)]

        held = way.there(crowd)
        try:
            with here.consumer() as consumer:
                for name in ("a", "b"):
                    reading = consumer.attach(name)
                    producer.open(name).write("x")
                    assert reading.read(PATIENCE_S)
            here.daemon.log.wait("tcp connections refused")
        finally:
            for each in held:
                each.close()


def test_nonsense_on_a_tcp_port_ends_its_sender_alone(way: Net, tmp_path: Path, dice: random.Random) -> None:
    def attack() -> None:
        for number in range(60):
            with socket.create_connection((NEAR, PORT + number % 2)) as enemy:
                if number % 3:
                    mechanism = dice.choice((b"NULL", b"CURVE", b"PLAIN")).ljust(20, b"\0")
                    enemy.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism + bytes(32))
                enemy.sendall(dice.randbytes(dice.randrange(1, 2000)))

    with site(way, tmp_path) as here, here.consumer() as consumer, Producer("p", here.daemon.runtime_dir) as producer:
        reading, stream = consumer.attach("s"), producer.open("s")
        way.there(attack)
        stream.write("x")
        assert reading.read(PATIENCE_S)


def test_fast_open_is_used_by_a_client_that_sends_with_its_syn(way: Net, tmp_path: Path) -> None:
    """libzmq's clients do not; those in other languages may. Counted by the kernel of the daemon's host."""

    def counted() -> int:
        head, values = Path("/proc/thread-self/net/netstat").read_text().splitlines()[:2]
        return int(dict(zip(head.split(), values.split(), strict=True))["TCPFastOpenPassive"])

    def dial() -> None:
        for _ in range(2):  # the first gets the cookie
            with socket.socket() as client:
                client.sendto(b"\xff" + bytes(8) + b"\x7f", socket.MSG_FASTOPEN, (NEAR, PORT))
                client.settimeout(PATIENCE_S)
                assert client.recv(1) == b"\xff"

    def permit() -> None:
        Path("/proc/sys/net/ipv4/tcp_fastopen").write_text("3")

    def here(make: Callable[[], Any]) -> Any:
        return way.there(make, near=True)

    with site(way, tmp_path):
        here(permit)
        way.there(permit)
        before = here(counted)
        way.there(dial)
        assert here(counted) > before
