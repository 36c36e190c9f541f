# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio on the whole path: producer processes, the daemon, a thousand tasks on one loop."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
import tracemalloc

import pytest

from clawd import AsyncConsumer, Producer
from clawd.aconsumer import AsyncReading
from clawd.errors import AttachError
from tests import load
from tests.daemon import PATIENCE_S, SANITIZED, Daemon
from tests.history import End, Got, History, Put
from tests.load import Writer

MANY = 200 if SANITIZED else 1000


async def follow(reading: AsyncReading, got: Got, *, batches: bool = False) -> None:
    """Read to the end. Cancelled and called again it goes on, and all that came is in `got`."""
    while True:
        told = len(got.gaps())
        part = await (reading.read_batch(PATIENCE_S) if batches else reading.read(PATIENCE_S))
        got.events += reading.gaps[told:]
        if part is None:
            got.events.append(End(str(reading.end_reason)))
            return
        for token in part.tokens() if batches else (part,):
            got.take(token)


def expect(history: History, names: list[str], count: int, seed: int) -> None:
    for name in names:
        history.put(name, *(Put(item.data, item.urgent, item.count) for item in load.tokens(seed, name, count)))
        history.end(name, "stop")


@pytest.mark.parametrize("batches", [False, True], ids=["token by token", "in batches"])
def test_a_thousand_tasks_on_one_loop_each_get_their_stream(
    daemon: Daemon, history: History, seed: int, batches: bool
) -> None:
    count = 20
    groups = [load.names(MANY // 2, f"p{number}") for number in range(2)]
    expect(history, [name for group in groups for name in group], count, seed)

    async def main() -> None:
        async with AsyncConsumer(daemon.runtime_dir) as consumer:
            tasks = [
                asyncio.create_task(follow(consumer.attach(name), history.reading(name), batches=batches))
                for group in groups
                for name in group
            ]
            for writer, group in zip(writers, groups, strict=True):
                writer.load(group, count, seed)
            await asyncio.gather(*tasks)

    with Writer(daemon.runtime_dir, "one") as one, Writer(daemon.runtime_dir, "two") as two:
        writers = (one, two)
        asyncio.run(main())
        assert [writer.wait() for writer in writers] == ["done", "done"]
    assert len(history.readings) == MANY
    history.check()


def test_tasks_cancelled_at_random_moments_lose_nothing(
    daemon: Daemon, history: History, seed: int, dice: random.Random
) -> None:
    names = load.names(20)
    expect(history, names, 600, seed)
    cancelled = 0

    async def harass(reading: AsyncReading, got: Got) -> None:
        nonlocal cancelled
        while True:
            task = asyncio.create_task(follow(reading, got, batches=dice.random() < 0.3))
            moment = dice.choice([0.0, 0.0, 0.001, 0.005])
            await asyncio.sleep(moment * dice.random())
            task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                cancelled += 1

    async def main() -> None:
        async with AsyncConsumer(daemon.runtime_dir) as consumer:
            # so little that credit is given all the time, each a use of the socket beside its descriptor
            readings = [(consumer.attach(name, credit=600), history.reading(name)) for name in names]
            writer.load(names, 600, seed)
            await asyncio.gather(*(harass(*pair) for pair in readings))

    with Writer(daemon.runtime_dir) as writer:
        asyncio.run(main())
        assert writer.wait() == "done"
    print(f"{cancelled} tasks cancelled")
    assert cancelled > len(names)
    history.check()


def test_a_restart_of_the_daemon_is_waited_for(daemon: Daemon) -> None:
    async def main() -> None:
        async with AsyncConsumer(daemon.runtime_dir) as consumer:
            reading = consumer.attach("s", wait=PATIENCE_S)
            task = asyncio.create_task(reading.read_batch(PATIENCE_S))
            await asyncio.to_thread(daemon.await_total, "streams_awaited", 1)
            await asyncio.to_thread(daemon.kill)
            daemon.discard()
            await asyncio.to_thread(daemon.start)
            with Producer("p", daemon.runtime_dir) as producer:
                stream = producer.open("s")
                stream.write("after all")
                stream.close("stop")
                batch = await task
            assert batch is not None
            assert batch.text == "after all"
            assert [token async for token in reading] == []
            with pytest.raises(AttachError, match="unknown"):
                await consumer.attach("never", wait=0).read()

    asyncio.run(main())


def test_a_token_comes_soon_also_beside_a_thousand_that_wait(daemon: Daemon) -> None:
    late_ns: list[int] = []

    async def main() -> None:
        async with AsyncConsumer(daemon.runtime_dir) as consumer:
            idle = [asyncio.create_task(consumer.attach(name, wait=300).read()) for name in load.names(MANY, "idle")]
            with Producer("p", daemon.runtime_dir) as producer:
                reading = consumer.attach("s")
                stream = producer.open("s", pace="off")  # on a busy machine its jitter would be evened out
                for _ in range(100):
                    stream.write("x")
                    token = await reading.read(PATIENCE_S)
                    assert token is not None
                    late_ns.append(time.monotonic_ns() - token.written_ns)
                    await asyncio.sleep(0.001)  # so that the next finds the loop asleep
                stream.close()
            assert not any(task.done() for task in idle)
            for task in idle:
                task.cancel()
            await asyncio.gather(*idle, return_exceptions=True)

    asyncio.run(main())
    median_ms = statistics.median(late_ns) / 1e6
    print(f"written to read: median {median_ms:.3f} ms")
    assert median_ms < (50 if SANITIZED else 10)  # a lost wake-up would show as a timeout, not as this


def test_readings_that_ended_or_were_closed_leave_no_memory(daemon: Daemon) -> None:
    rounds = 50 if SANITIZED else 200

    async def use(consumer: AsyncConsumer, producer: Producer, number: int) -> None:
        stream = producer.open(f"s{number}")
        stream.write("x" * 100)
        async with consumer.attach(f"s{number}") as closed:
            assert (await closed.read(PATIENCE_S)) is not None
            task = asyncio.create_task(closed.read())
            await asyncio.sleep(0)
            task.cancel()
        stream.close()
        assert len([token async for token in consumer.attach(f"s{number}")]) == 1

    async def main() -> None:
        async with AsyncConsumer(daemon.runtime_dir) as consumer:
            with Producer("p", daemon.runtime_dir) as producer:
                for number in range(rounds):
                    await use(consumer, producer, number)
                gc.collect()
                tracemalloc.start()
                for number in range(rounds, 2 * rounds):
                    await use(consumer, producer, number)
                gc.collect()
                kept, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            assert (consumer._link._inboxes, consumer._waiters, consumer._link.ready) == ({}, {}, [])
        print(f"{kept} bytes kept by {rounds} rounds")
        assert kept < 200 * rounds

    asyncio.run(main())
