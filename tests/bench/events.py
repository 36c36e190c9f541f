# SPDX-License-Identifier: Apache-2.0
"""The ends of the gateway's benchmark, each a process: engines that write tokens at a pace, and readers of events."""

from __future__ import annotations

import array
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from clawd.producer import Producer
from tests.bench.schedule import quantile

LEAD_S = 0.05
"""A reader asks so long before its stream opens."""
_TEXT = re.compile(rb'"text":"([0-9a-f]+)"')
STAMP = 16
"""A token is the time of its write as so many hexadecimal digits."""


def opens_at(order: dict[str, Any], number: int) -> float:
    """When stream `number` opens, by time.monotonic(): one after the other over the first fifth of the run."""
    return float(order["start"] + number * order["seconds"] / 5 / order["streams"])


def _clawd(order: dict[str, Any]) -> tuple[Callable[[int], None], Callable[[list[int]], None], Callable[[], None]]:
    producer = Producer("bench", order["directory"], 4 << 20)
    streams: dict[int, Any] = {}

    def begin(number: int) -> None:
        streams[number] = producer.open(f"s{number}")

    def write(numbers: list[int]) -> None:
        text = b"%016x" % time.monotonic_ns()
        producer.write_many([(streams[number], text) for number in numbers])

    def end() -> None:
        for stream in streams.values():
            stream.close("stop")
        producer.close()

    return begin, write, end


def _redis(order: dict[str, Any]) -> tuple[Callable[[int], None], Callable[[list[int]], None], Callable[[], None]]:
    import redis

    client = redis.Redis(unix_socket_path=order["redis"])

    def write(numbers: list[int]) -> None:
        text = b"%016x" % time.monotonic_ns()
        pipe = client.pipeline(transaction=False)
        for number in numbers:
            pipe.xadd(f"s{number}", {b"t": text})
        pipe.execute()

    def end() -> None:
        pipe = client.pipeline(transaction=False)
        for number in range(order["streams"]):
            pipe.xadd(f"s{number}", {b"e": b"stop"})
        pipe.execute()

    return lambda number: None, write, end


def engine(order: dict[str, Any]) -> dict[str, Any]:
    """Write `rate` tokens a second over all streams, each at an even pace, until `seconds` are over."""
    begin, write, end = (_clawd if order["path"] == "clawd" else _redis)(order)
    gap = order["streams"] / order["rate"]
    due = [opens_at(order, number) for number in range(order["streams"])]
    begun = [False] * order["streams"]
    stop_at, sent, late = order["start"] + order["seconds"], [0] * order["streams"], 0.0
    while (now := time.monotonic()) < stop_at:
        ready = [number for number in range(order["streams"]) if due[number] <= now]
        if ready:
            late = max(late, now - min(due[number] for number in ready))
            for number in ready:
                if not begun[number]:
                    begun[number] = True
                    begin(number)
                due[number] += gap
                sent[number] += 1
            write(ready)
        time.sleep(max(0.0, min(0.0005, min(due) - time.monotonic())))
    end()
    return {"sent": sent, "late_ms": 1000 * late}


class _Reader(asyncio.Protocol):
    def __init__(self, path: str) -> None:
        self.path = path
        self.over = asyncio.get_running_loop().create_future()
        self.delays = array.array("q")
        self.first = 0
        self.ended = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(f"GET {self.path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._tail + data
        whole, _, self._tail = data.rpartition(b"\n")
        for found in _TEXT.finditer(whole):
            text = found[1]
            for at in range(0, len(text), STAMP):
                self.delays.append(now - int(text[at : at + STAMP], 16))
        if not self.first and self.delays:
            self.first = self.delays[0]
        if b"event: end" in whole:
            self.ended = True
            if not self.over.done():
                self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def readers(order: dict[str, Any]) -> dict[str, Any]:
    """A connection for each stream, held until its end."""
    loop = asyncio.get_running_loop()

    async def one(number: int) -> _Reader:
        await asyncio.sleep(max(0.0, opens_at(order, number) - LEAD_S - time.monotonic()))
        reader = _Reader(f"/v1/streams/s{number}")
        await loop.create_connection(lambda: reader, "127.0.0.1", order["port"])
        await asyncio.wait([reader.over], timeout=order["seconds"] + 10)
        return reader

    done = await asyncio.gather(*(one(number) for number in range(order["streams"])), return_exceptions=True)
    good = [each for each in done if isinstance(each, _Reader)]
    delays = sorted(delay for each in good for delay in each.delays)
    firsts = sorted(each.first for each in good if each.first)
    return {
        "tokens": [len(each.delays) if isinstance(each, _Reader) else 0 for each in done],
        "ended": [isinstance(each, _Reader) and each.ended for each in done],
        "p50_us": quantile(delays, 0.5) if delays else None,
        "p99_us": quantile(delays, 0.99) if delays else None,
        "first_p95_us": quantile(firsts, 0.95) if firsts else None,
    }


def main() -> None:
    order = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    order["start"] = float(sys.stdin.readline())
    figures = engine(order) if sys.argv[1] == "engine" else asyncio.run(readers(order))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
