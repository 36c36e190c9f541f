# SPDX-License-Identifier: Apache-2.0
"""The reading half of each path, as a process: `python -m tests.bench.consumers PATH`, its order on stdin as JSON. It
says `ready` once it is attached, and ends with one line of what it measured: written → in the reader's hands.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.bench.schedule import quantile, sleep_exactly

Order = dict[str, Any]


class Tally:
    """What came: how late each was, and when the first and the last came."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.late_ns: list[int] = []
        self.first_ns = self.last_ns = self.text = 0
        self._before = resource.getrusage(resource.RUSAGE_SELF)
        self._main_before_s = time.thread_time()

    def take(self, written_ns: Iterable[int]) -> None:
        now = time.monotonic_ns()
        before = len(self.late_ns)
        self.late_ns.extend([now - at for at in written_ns])
        self.left -= len(self.late_ns) - before
        if not before:
            self.first_ns = now
            self._before = resource.getrusage(resource.RUSAGE_SELF)
            self._main_before_s = time.thread_time()
        self.last_ns = now

    def take_one(self, written_ns: int) -> None:
        self.take((written_ns,))

    def figures(self) -> dict[str, float]:
        after, before = resource.getrusage(resource.RUSAGE_SELF), self._before
        took = (self.last_ns - self.first_ns) / 1e9
        return {
            "tokens": len(self.late_ns),
            "tokens_per_s": len(self.late_ns) / took if took else 0.0,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "main_cpu_s": time.thread_time() - self._main_before_s,
            "p50_us": quantile(self.late_ns, 0.5),
            "p99_us": quantile(self.late_ns, 0.99),
        }


def ready() -> None:
    print("ready", flush=True)


def clawd_batches(order: Order, tally: Tally) -> None:
    """One thread, whatever is here at once."""
    from clawd.consumer import Consumer
    from clawd.errors import ReadTimeout

    with Consumer(order["directory"]) as consumer:
        for number in range(order["streams"]):
            consumer.attach(f"s{number}", credit=1 << 24)
        ready()
        while readings := consumer.select():
            for reading in readings:
                try:
                    batch = reading.read_batch(timeout=0)
                except ReadTimeout:  # its beginning is no token
                    continue
                if batch is not None:
                    tally.text += len(batch.text)  # as every other path has it by then
                    tally.take(batch.written_ns)


async def clawd_tasks(order: Order, tally: Tally) -> None:
    """One asyncio task a stream, token by token."""
    from clawd.aconsumer import AsyncConsumer, AsyncReading

    async def read(reading: AsyncReading) -> None:
        async for token in reading:
            tally.take_one(token.written_ns)

    async with AsyncConsumer(order["directory"]) as consumer:
        readings = [consumer.attach(f"s{number}", credit=1 << 24) for number in range(order["streams"])]
        ready()
        await asyncio.gather(*map(read, readings))


def pyzmq_messages(order: Order, tally: Tally) -> None:
    """One thread, one message a token."""
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(f"ipc://{order['directory']}/plain")
    ready()
    while tally.left:
        message = socket.recv()
        tally.take_one(int.from_bytes(message[4:12], "little"))
    context.destroy(linger=0)


async def engine_queues(order: Order, tally: Tally) -> None:
    """One asyncio task decodes a step and fills a queue a stream; one task a stream reads it."""
    import msgspec
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(f"ipc://{order['directory']}/engine")
    decode = msgspec.msgpack.Decoder(list[tuple[str, str, int]]).decode
    queues: dict[str, asyncio.Queue[tuple[str, int] | None]] = {
        f"s{number}": asyncio.Queue() for number in range(order["streams"])
    }

    async def spread() -> None:
        left = tally.left
        while left > 0:
            frame = await socket.recv(copy=False)
            outputs = decode(frame.buffer)
            left -= len(outputs)
            for stream, text, written_ns in outputs:
                queues[stream].put_nowait((text, written_ns))
        for queue in queues.values():
            queue.put_nowait(None)

    async def read(queue: asyncio.Queue[tuple[str, int] | None]) -> None:
        while (got := await queue.get()) is not None:
            tally.take_one(got[1])

    ready()
    await asyncio.gather(spread(), *map(read, queues.values()))
    context.destroy(linger=0)


READERS: dict[str, Callable[[Order, Tally], Any]] = {
    "clawd": clawd_batches,
    "clawd-tasks": clawd_tasks,
    "pyzmq": pyzmq_messages,
    "engine": engine_queues,
}


def main() -> None:
    order = json.loads(sys.stdin.readline())
    tally = Tally(order["count"])
    sleep_exactly()
    reader = READERS[sys.argv[1]]
    if asyncio.iscoroutinefunction(reader):
        asyncio.run(reader(order, tally))
    else:
        reader(order, tally)
    print(json.dumps(tally.figures()), flush=True)


if __name__ == "__main__":
    main()
