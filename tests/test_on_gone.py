# SPDX-License-Identifier: Apache-2.0
"""What becomes of a stream when its readers are gone, through the whole path: closed, killed, cut off and come back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clawd import protocol
from clawd.aconsumer import AsyncConsumer
from clawd.consumer import Consumer
from clawd.errors import AttachError
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon, until
from tests.history import History
from tests.proxy import Proxy
from tests.rogue.producer import dial

WHY = "stream cancelled", 'why="nobody reads it"'


def test_a_reading_that_is_closed_ends_the_stream_after_its_grace_and_says_why(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("x")
        with consumer.attach("s", on_gone="cancel", grace=0.05) as reading:
            assert reading.read(PATIENCE_S) is not None
        daemon.log.wait(*WHY, "stream=s")
        until(lambda: stream.cancelled, "the engine to see it")
        assert [each.end_reason for each in [consumer.attach("s")] if list(each)] == ["cancelled"]


def test_one_in_asyncio_that_is_closed_likewise(daemon: Daemon) -> None:
    async def main() -> None:
        async with (
            AsyncConsumer(daemon.runtime_dir) as consumer,
            consumer.attach("s", on_gone="cancel", grace=0.05) as reading,
        ):
            assert await reading.read(PATIENCE_S) is not None

    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("x")
        asyncio.run(main())
        until(lambda: stream.cancelled, "the engine to see it")


def test_a_client_that_is_killed_before_the_first_token_ends_its_stream(daemon: Daemon) -> None:
    code = (
        "import sys; from clawd.consumer import Consumer\n"
        "reading = Consumer(sys.argv[1]).attach('s', on_gone='cancel', grace=0.05)\n"
        "print(reading.read())"
    )
    with Producer("p", daemon.runtime_dir) as producer:
        client = subprocess.Popen([sys.executable, "-c", code, str(daemon.runtime_dir)])
        try:
            until(lambda: "s" in daemon.streams(), "its attach, before the stream opened")
        finally:
            client.kill()
            client.wait()
        stream = producer.open("s")
        until(lambda: stream.cancelled, "the engine to see it")


def test_a_client_that_keeps_its_stream_may_go(daemon: Daemon, history: History) -> None:
    history.put("s", b"one", b"two")
    history.end("s", "stop")
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as other:
        stream, mark = producer.open("s"), producer.open("mark")
        with Consumer(daemon.runtime_dir) as consumer:
            for name, on_gone in (("s", "keep"), ("mark", "cancel")):
                consumer.attach(name, on_gone=on_gone, grace=0.01)
            until(lambda: daemon.total("attachments") == 2, "both attaches")
        until(lambda: mark.cancelled, "the other's time to be over")
        stream.write(b"one")
        stream.write(b"two")
        stream.close()
        history.reading("s").follow(other.attach("s"))
    history.check()


def test_a_cut_connection_that_comes_back_within_the_grace_ends_nothing(
    daemon: Daemon, history: History, tmp_path: Path
) -> None:
    history.put("s", *[b"%d" % number for number in range(10)])
    history.end("s", "stop")
    with (
        Proxy(tmp_path / "proxy", daemon.runtime_dir) as proxy,
        Consumer(proxy.directory) as consumer,
        Producer("p", daemon.runtime_dir) as producer,
    ):
        reading, got = consumer.attach("s", on_gone="cancel", grace=PATIENCE_S), history.reading("s")
        stream = producer.open("s")
        for number in range(10):
            proxy.arm(1)
            stream.write(b"%d" % number)
            got.follow(reading, limit=number + 1)
            proxy.await_cuts(number + 1)
        stream.close()
        got.follow(reading)
    history.check()
    assert daemon.total("cancelled") == 0


def test_an_observer_neither_ends_a_stream_nor_holds_it(daemon: Daemon) -> None:
    class Observer(Consumer):
        _role = "observer"

    with Producer("p", daemon.runtime_dir) as producer, Observer(daemon.runtime_dir) as observer:
        stream = producer.open("s")
        watching = observer.attach("s")
        with pytest.raises(AttachError, match="may not cancel") as caught:
            observer.attach("s", on_gone="cancel").read(PATIENCE_S)
        assert caught.value.code == "denied"
        with Consumer(daemon.runtime_dir) as consumer:
            consumer.attach("s", on_gone="cancel", grace=0.01)
            until(lambda: daemon.streams()["s"]["attachments"] == 2, "the reader")
        assert list(watching) == []
        assert watching.end_reason == "cancelled"
        assert stream.cancelled


def test_a_stopped_client_is_no_gone_client(daemon: Daemon) -> None:
    """Only an end of file is: one that is stopped, or whose control connection alone is silent, still reads."""
    with Producer("p", daemon.runtime_dir) as producer, dial(daemon.runtime_dir) as control:
        control.send(protocol.encode(protocol.Hello(protocol.VERSION, "consumer")))
        code = (
            "import sys; from clawd.consumer import Consumer\n"
            "consumer = Consumer(sys.argv[1])\n"
            "print([token.text for token in consumer.attach('s', on_gone='cancel', grace=0.01)], flush=True)"
        )
        command = [sys.executable, "-c", code, str(daemon.runtime_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                stream, mark = producer.open("s"), producer.open("mark")
                until(lambda: daemon.streams()["s"]["attachments"] == 1, "its attach")
                os.kill(client.pid, 19)
                with Consumer(daemon.runtime_dir) as other:
                    other.attach("mark", on_gone="cancel", grace=0.2)
                    until(lambda: daemon.total("attachments") == 2, "the attach that tells the time")
                until(lambda: mark.cancelled, "a longer grace to be over")
                assert not stream.cancelled
                stream.write("a")
                stream.close()
            finally:
                os.kill(client.pid, 18)
            assert client.communicate(timeout=PATIENCE_S)[0] == "['a']\n"
