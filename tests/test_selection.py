# SPDX-License-Identifier: Apache-2.0
"""One thread that reads many streams, against the real daemon."""

from __future__ import annotations

import asyncio
import threading

import pytest

from clawd.aconsumer import AsyncConsumer
from clawd.consumer import Consumer
from clawd.errors import AttachError, ReadTimeout
from clawd.producer import Producer
from tests.daemon import Daemon
from tests.history import History


def test_one_thread_reads_a_hundred_streams(daemon: Daemon, history: History) -> None:
    names = [f"s{number}" for number in range(100)]
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        readings = {consumer.attach(name): history.reading(name) for name in names}
        streams = [producer.open(name, block=10) for name in names]
        for number in range(50):
            producer.write_many([(stream, b"%d" % number) for stream in streams], block=10)
        for stream in streams:
            stream.close(block=10)
        for name in names:
            history.put(name, *[b"%d" % number for number in range(50)])
            history.end(name, "stop")
        while found := consumer.select(timeout=20):
            for reading in found:
                got = readings[reading]
                while reading.end_reason is None or got.events == []:
                    try:
                        batch = reading.read_batch(timeout=0)
                    except ReadTimeout:
                        break
                    if batch is None:
                        break
                    for token in batch.tokens():
                        got.take(token)
        for reading, got in readings.items():
            assert reading.end_reason == "stop"
            got.finish("stop")
    history.check()


def test_a_reading_stays_readable_until_it_is_read_and_comes_a_last_time_at_its_end(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        quiet, busy = consumer.attach("quiet"), consumer.attach("busy")
        stream = producer.open("busy")
        stream.write("a")
        producer.open("quiet")
        seen: set[object] = set()
        while busy not in seen or quiet not in seen:
            found = consumer.select(timeout=20)
            seen.update(found)
            if quiet in found:
                with pytest.raises(ReadTimeout):
                    quiet.read_batch(timeout=0)  # an OPEN is no token
        assert consumer.select(timeout=20) == [busy]
        assert busy.read_batch(timeout=0).data == b"a"  # type: ignore[union-attr]
        with pytest.raises(ReadTimeout):
            consumer.select(timeout=0.05)
        stream.close()
        assert consumer.select(timeout=20) == [busy]
        assert busy.read_batch() is None
        quiet.close()
        while found := consumer.select(timeout=20):
            assert found == [busy]
        assert busy.end_reason == "stop"


def test_a_failed_reading_is_told_and_then_forgotten(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer:
        reading = consumer.attach("nobody", wait=0.01)
        assert consumer.select(timeout=20) == [reading]
        with pytest.raises(AttachError):
            reading.read_batch()
        assert consumer.select() == []


def test_a_thread_that_selects_and_threads_that_read_share_a_consumer(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        mine = consumer.attach("mine")
        texts: list[bytes] = []
        thread = threading.Thread(target=lambda: texts.extend(token.data for token in mine))
        thread.start()
        other = consumer.attach("other")
        got = b""
        streams = [producer.open("mine"), producer.open("other")]
        for number in range(500):
            producer.write_many([(stream, b"%d " % number) for stream in streams], block=10)
        for stream in streams:
            stream.close(block=10)
        while other.end_reason is None:
            if other in consumer.select(timeout=20):
                batch = other.read_batch()
                got += batch.data if batch else b""
        thread.join(20)
        assert b"".join(texts) == got == b"".join(b"%d " % number for number in range(500))


def test_streams_that_ended_before_the_first_select_are_told(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        early, other = consumer.attach("early"), consumer.attach("other")
        stream = producer.open("early")
        stream.write("x")
        stream.close()
        producer.open("other").write("y")
        assert other.read().data == b"y"  # type: ignore[union-attr]
        assert early in consumer.select(timeout=20)
        assert early.read_batch().data == b"x"  # type: ignore[union-attr]


def test_who_never_selects_keeps_nothing_of_what_ended(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        for number in range(20):
            stream = producer.open(f"s{number}")
            stream.write("x")
            stream.close()
            assert [token.text for token in consumer.attach(f"s{number}")] == ["x"]
        with pytest.raises(AttachError):
            consumer.attach("nobody", wait=0).read()
        assert consumer._selection.is_empty


async def read_many(daemon: Daemon, producer: Producer) -> dict[str, bytes]:
    got: dict[str, bytes] = {}
    async with AsyncConsumer(daemon.runtime_dir) as consumer:
        readings = [consumer.attach(f"s{number}") for number in range(50)]
        streams = [producer.open(reading.stream, block=10) for reading in readings]
        for number in range(20):
            producer.write_many([(stream, b"%d " % number) for stream in streams], block=10)
        for stream in streams:
            stream.close(block=10)
        while found := await consumer.select(timeout=20):
            for reading in found:
                batch = await reading.read_batch(timeout=20)
                if batch is not None:
                    got[reading.stream] = got.get(reading.stream, b"") + batch.data
    return got


def test_one_task_reads_many_streams(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        got = asyncio.run(read_many(daemon, producer))
    assert len(got) == 50
    assert set(got.values()) == {b"".join(b"%d " % number for number in range(20))}
