# SPDX-License-Identifier: Apache-2.0
"""One client, several clawds: it finds the one that has the stream, and one that is down costs the others nothing."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from clawd.aconsumer import AsyncConsumer
from clawd.consumer import Consumer
from clawd.errors import AttachError, ControlError, ReadingClosed
from clawd.keys import Allowed, allow, make_pair, write_pair
from clawd.producer import Producer
from tests import ports
from tests.daemon import PATIENCE_S, Daemon, until
from tests.gateway import Gateway
from tests.history import History
from tests.test_access import Site

pytestmark = pytest.mark.plain


class Nodes:
    """Two clawds by tcp, one by its directory, and one that is down."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.daemons: list[Daemon] = []
        self.places: list[str] = []
        for number in range(3):
            port = ports.pair()
            flags = ("--tcp-listen", f"127.0.0.1:{port}", "--keys-dir", str(directory / "none")) if number < 2 else ()
            daemon = Daemon(directory / f"run{number}", "--spool-bytes", "4M", *flags)
            self.daemons.append(stack.enter_context(daemon))
            self.places.append(f"tcp://127.0.0.1:{port}" if number < 2 else str(daemon.runtime_dir))
        self.places.insert(1, f"tcp://127.0.0.1:{ports.pair()}")

    def producer(self, number: int) -> Producer:
        return Producer("p", self.daemons[number].runtime_dir)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def test_each_reading_finds_its_node(nodes: Nodes, history: History) -> None:
    with Consumer(endpoint=nodes.places) as consumer, ExitStack() as stack:
        producers = [stack.enter_context(nodes.producer(number)) for number in range(3)]
        before = [consumer.attach(f"s{number}") for number in range(3)]
        streams = [producer.open(f"s{number}") for number, producer in enumerate(producers)]
        for number, stream in enumerate(streams):
            for each in range(100):
                data = b"%d of %d " % (each, number)
                stream.write(data)
                history.put(f"s{number}", data)
            stream.close("stop")
            history.end(f"s{number}", "stop")
        after = [consumer.attach(f"s{number}") for number in range(3)]
        for number in range(3):
            history.reading(f"s{number}", "before").follow(before[number])
            history.reading(f"s{number}", "after").follow(after[number])
        for daemon in nodes.daemons:
            daemon.await_total("attachments", 0)
    history.check()


def test_a_node_that_is_down_delays_no_first_token(nodes: Nodes) -> None:
    with Consumer(endpoint=nodes.places) as consumer, nodes.producer(0) as producer:
        consumer.attach("warm")
        producer.open("warm").write("x")
        for number in range(5):
            reading = consumer.attach(f"s{number}")
            stream = producer.open(f"s{number}")
            started = time.monotonic()
            stream.write("x")
            assert reading.read(PATIENCE_S)
            assert time.monotonic() - started < 1, "as if it waited for the node that is down"


def test_a_cancel_before_it_is_known_who_has_the_stream_reaches_the_engine(nodes: Nodes) -> None:
    with Consumer(endpoint=nodes.places) as consumer, nodes.producer(1) as producer:
        reading = consumer.attach("s")
        reading.cancel()
        nodes.daemons[1].await_total("streams_awaited", 1)
        stream = producer.open("s")
        until(lambda: stream.cancelled, "the cancel")
        assert reading.read(PATIENCE_S) is None
        assert reading.end_reason == "cancelled"


def test_a_stream_that_nobody_has_is_told_as_the_one_that_knows_most_says(nodes: Nodes) -> None:
    places = [nodes.places[0], *nodes.places[2:]]  # without the one that is down
    with Consumer(endpoint=places) as consumer, nodes.producer(0) as producer:
        with pytest.raises(AttachError) as caught:
            consumer.attach("never", wait=0).read(PATIENCE_S)
        assert caught.value.code == "unknown"
        stream = producer.open("s")
        stream.write("x")
        reading = consumer.attach("s")
        assert reading.read(PATIENCE_S)
        position = str(reading.position)
        again = consumer.attach("s", after=position)
        stream.write("y")
        token = again.read(PATIENCE_S)
        assert token is not None
        assert token.data == b"y"
        with pytest.raises(AttachError) as caught:
            consumer.attach("s", after="1-0").read(PATIENCE_S)
        assert caught.value.code == "lost"


def test_a_fleet_of_nodes_that_are_down_says_so_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("clawd.link._ANSWER_S", 0.2)
    places = [f"tcp://127.0.0.1:{ports.pair()}", str(tmp_path / "nothing")]
    with Consumer(endpoint=places) as consumer, pytest.raises(ControlError, match="no answer"):
        consumer.attach("s", wait=0.1).read(PATIENCE_S)


def test_a_node_that_comes_later_is_found(nodes: Nodes, tmp_path: Path) -> None:
    nodes.daemons[0].stop()
    nodes.daemons[2].stop()
    with Consumer(endpoint=nodes.places) as consumer:
        readings = [consumer.attach(name) for name in ("a", "b")]
        for number, name in ((0, "a"), (2, "b")):
            nodes.daemons[number].start()
            with nodes.producer(number) as producer:
                producer.open(name).write("x")
                assert readings[number // 2].read(PATIENCE_S)


def test_closing_a_search_leaves_nothing_behind(nodes: Nodes) -> None:
    with Consumer(endpoint=nodes.places) as consumer:
        reading = consumer.attach("s")
        nodes.daemons[1].await_total("attachments", 1)
        reading.close()
        for daemon in nodes.daemons:
            daemon.await_total("attachments", 0)
        with pytest.raises(ReadingClosed):
            reading.read(PATIENCE_S)
        assert not consumer._link._searches
        left = consumer.attach("t")
    with pytest.raises(ReadingClosed):
        left.read(PATIENCE_S)


def test_tasks_of_one_loop_read_from_all_nodes(nodes: Nodes) -> None:
    async def main() -> list[str]:
        async with AsyncConsumer(endpoint=nodes.places) as consumer:
            readings = [consumer.attach(f"s{number}") for number in range(3)]

            async def read(number: int) -> str:
                return "".join([token.text async for token in readings[number]])

            tasks = [asyncio.create_task(read(number)) for number in range(3)]
            for number in range(3):
                with nodes.producer(number) as producer:
                    stream = producer.open(f"s{number}")
                    for each in range(50):
                        stream.write(f"{each} ")
                        await asyncio.sleep(0)
                    stream.close()
            return list(await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S))

    assert asyncio.run(main()) == ["".join(f"{each} " for each in range(50))] * 3


def test_one_gateway_serves_a_fleet(tmp_path: Path) -> None:
    """Two nodes by tcp with keys of their own, and one that is down."""
    with ExitStack() as stack:
        sites = [Site(tmp_path / f"node{number}", "--pace", "off") for number in range(2)]
        key = tmp_path / "gateway.key"
        pair = make_pair()
        write_pair(key, pair, "test")
        servers = tmp_path / "servers"
        servers.write_text("".join(f"{site.endpoint} = {site.server.public}\n" for site in sites))
        for site in sites:
            allow(site.keys, Allowed("gateway", pair.public, "consumer"))
            stack.enter_context(site.daemon)
        nodes = [sites[0].endpoint, str(tmp_path / "down"), sites[1].endpoint]
        flags = ("--nodes", " ".join(nodes), "--node-key", str(key), "--node-servers", str(servers))
        gateway = stack.enter_context(Gateway(tmp_path / "none", *flags))
        for number, site in enumerate(sites):
            with Producer("p", site.daemon.runtime_dir) as producer:
                stream = producer.open(f"s{number}")
                stream.write(f"from node {number}")
                stream.close("stop")
                with urllib.request.urlopen(f"{gateway.url}/v1/streams/s{number}", timeout=PATIENCE_S) as answer:
                    text = answer.read().decode()
            assert f'"text":"from node {number}"' in text
            assert '"reason":"stop"' in text
