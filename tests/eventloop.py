# SPDX-License-Identifier: Apache-2.0
"""What the tests of the client for asyncio share: a loop of their own, and waiting that lets it run."""

from __future__ import annotations

import asyncio
import functools
import gc
import select
from collections.abc import Awaitable, Callable
from typing import Any

from clawd import protocol
from clawd.aconsumer import AsyncConsumer, AsyncReading
from fake_relay import PATIENCE_S, FakeRelay


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run it in a loop of its own, in debug mode; what the loop's callbacks raise fails it too."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        faults: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            async with asyncio.timeout(4 * PATIENCE_S):
                await test(*args, **kwargs)

        asyncio.run(main(), debug=True)
        gc.collect()
        assert faults == []

    return run


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def came(relay: FakeRelay, *wanted: Any) -> Any:
    """As `relay.expect`, with the loop running."""
    return await asyncio.to_thread(relay.expect, *wanted)


async def attach(relay: FakeRelay, consumer: AsyncConsumer, stream: str = "s") -> tuple[AsyncReading, int]:
    reading = consumer.attach(stream)
    return reading, (await came(relay, protocol.Attach, lambda request: request.stream == stream)).id


async def waiting(consumer: AsyncConsumer, *readings: AsyncReading) -> None:
    await until(lambda: all(reading._inbox in consumer._waiters for reading in readings))


def arrive(consumer: AsyncConsumer) -> None:
    """Wait until the relay's descriptor has something, without a turn of the loop."""
    poll = select.poll()
    poll.register(consumer._link.relay_fd, select.POLLIN)
    assert poll.poll(1000 * PATIENCE_S)
