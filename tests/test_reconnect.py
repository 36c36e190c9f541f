# SPDX-License-Identifier: Apache-2.0
"""Connections cut at any byte and made again: each client gets everything exactly once, in order."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clawd.consumer import Consumer
from clawd.producer import Producer
from tests import load
from tests.daemon import Daemon
from tests.history import History, Put
from tests.load import Writer
from tests.proxy import Proxy

CUTS = 25


@pytest.mark.parametrize("batches", [False, True], ids=["token by token", "in batches"])
def test_a_client_whose_connection_is_cut_again_and_again_gets_everything_once(
    daemon: Daemon, history: History, seed: int, tmp_path: Path, batches: bool
) -> None:
    dice = random.Random(seed)
    names, part = load.names(4), 300
    with (
        Proxy(tmp_path / "proxy", daemon.runtime_dir) as proxy,
        Consumer(proxy.directory) as consumer,
        Writer(daemon.runtime_dir) as writer,
        ThreadPoolExecutor(4) as pool,
    ):
        reads = []
        for turn in range(CUTS):
            # mid-frame under load, and now and then so soon that the new connection does not even get to its attach
            for name in (fresh := [f"{name}-{turn}" for name in names]):
                history.put(name, *(Put(item.data, item.urgent, item.count) for item in load.tokens(seed, name, part)))
                history.end(name, "stop")
                reads.append(
                    pool.submit(history.reading(name).follow, consumer.attach(name, credit=8192), batches=batches)
                )
            proxy.arm(dice.choice([dice.randrange(1, 400), dice.randrange(400, 12_000), dice.randrange(1, 20)]))
            writer.load(fresh, part, seed)
            proxy.await_cuts(turn + 1)
            assert writer.wait() == "done"
        for read in reads:
            read.result()
        assert proxy.cuts == CUTS
    history.check()


def test_a_cancel_said_while_the_connection_is_cut_arrives(daemon: Daemon, tmp_path: Path) -> None:
    with (
        Proxy(tmp_path / "proxy", daemon.runtime_dir) as proxy,
        Consumer(proxy.directory) as consumer,
        Producer("p", daemon.runtime_dir) as producer,
    ):
        reading = consumer.attach("s")
        stream = producer.open("s")
        stream.write("one")
        assert reading.read().data == b"one"
        proxy.arm(1)
        stream.write("two")
        reading.cancel()
        assert [token.data for token in reading] in ([b"two"], [])
        assert reading.end_reason == "cancelled"
        daemon.await_total("cancelled", 1)
        assert stream.cancelled


def test_an_end_that_was_on_the_way_when_the_connection_was_cut_comes_again(
    daemon: Daemon, history: History, dice: random.Random, tmp_path: Path
) -> None:
    with (
        Proxy(tmp_path / "proxy", daemon.runtime_dir) as proxy,
        Consumer(proxy.directory) as consumer,
        Producer("p", daemon.runtime_dir) as producer,
    ):
        for number in range(20):
            name = f"s{number}"
            reading, got = consumer.attach(name), history.reading(name)
            stream = producer.open(name)
            stream.write("token")
            history.put(name, b"token")
            got.follow(reading, limit=1)
            proxy.arm(dice.randrange(1, 70))
            stream.close()
            history.end(name, "stop")
            got.follow(reading)
            proxy.await_cuts(number + 1)
    history.check()
