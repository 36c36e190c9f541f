# SPDX-License-Identifier: Apache-2.0
"""Writer and reader of `scripts/bench pacing`, each a process: its order on stdin as JSON; it says `ready`, goes at the
next line, and ends with one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import select
import struct
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from clawd.aconsumer import AsyncConsumer, AsyncReading
from clawd.consumer import Consumer, Reading
from clawd.errors import ReadTimeout
from clawd.producer import Producer
from tests.bench.schedule import sleep_exactly

WARM = 30
"""Gaps of a stream that are left out: what is learnt in them."""
TAIL = 30
"""Tokens at a stream's end whose lag is told."""


def write(order: dict[str, Any]) -> None:
    plan = list(struct.iter_unpack("<QI", Path(order["plan"]).read_bytes()))
    with Producer("bench", order["directory"], 1 << 22) as producer:
        streams = {number: producer.open(f"s{number}") for number in order["streams"]}
        print("ready", flush=True)
        sys.stdin.readline()
        sleep_exactly()
        start = time.monotonic_ns()
        at = 0
        while at < len(plan):
            left = plan[at][0] + start - time.monotonic_ns()
            if left > 0:
                time.sleep((left + order["slack_ns"]) / 1e9)
            now = time.monotonic_ns() - start
            due = at
            while due < len(plan) and plan[due][0] <= now:
                due += 1
            producer.write_many([(streams[number], "token ") for _, number in plan[at:due]], block=5)
            at = due
        for stream in streams.values():
            stream.close()
        producer.close()
        print(json.dumps({"written": len(plan)}), flush=True)


def read(order: dict[str, Any]) -> None:
    last: dict[Reading, tuple[int, int]] = {}
    lags: dict[Reading, deque[int]] = defaultdict(lambda: deque(maxlen=TAIL))
    gaps: list[float] = []
    tokens = 0
    with Consumer(order["directory"]) as consumer:
        for number in range(order["streams"]):
            consumer.attach(f"s{number}", credit=1 << 20)
        print("ready", flush=True)
        while readings := consumer.select():
            for reading in readings:
                try:
                    batch = reading.read_batch(timeout=0)
                except ReadTimeout:
                    continue
                if batch is None:
                    continue
                now = time.monotonic_ns()
                for written_ns in batch.written_ns:
                    tokens += 1
                    before, count = last.get(reading, (0, 0))
                    if count > WARM:
                        gaps.append((now - before) / 1e6)
                    last[reading] = (now, count + 1)
                    lags[reading].append(now - written_ns)
        sys.stdin.readline()
    if len(gaps) > 200_000:
        gaps = gaps[:: len(gaps) // 200_000 + 1]
    late_ns = max((max(each) for each in lags.values()), default=0)
    print(json.dumps({"tokens": tokens, "gaps_ms": gaps, "lag_at_end_ms": late_ns / 1e6}), flush=True)


def flood(order: dict[str, Any]) -> None:
    """As many tokens as go, to many streams, until told to stop."""
    with Producer("flood", order["directory"], 1 << 20) as producer:
        streams = [producer.open(f"s{number}", pace="off") for number in range(order["streams"])]
        print("ready", flush=True)
        sys.stdin.readline()
        poll = select.poll()
        poll.register(sys.stdin, select.POLLIN)
        while not poll.poll(0):
            producer.write_many([(stream, "token ") for stream in streams], block=5)
        for stream in streams:
            stream.close()
        producer.close(30)
        print(json.dumps({}), flush=True)


def fill(order: dict[str, Any]) -> None:
    """So many tokens to each of many streams that their readers are behind until told to stop."""
    with Producer("fill", order["directory"], 1 << 20) as producer:
        streams = [producer.open(f"s{number}", pace="off") for number in range(order["streams"])]
        for _ in range(order["tokens"]):
            producer.write_many([(stream, "token ") for stream in streams], block=5)
        print("ready", flush=True)
        sys.stdin.readline()
        for stream in streams:
            stream.close()
        producer.close(30)
        print(json.dumps({}), flush=True)


def open_first(order: dict[str, Any]) -> None:
    """A new answer now and then, of one token."""
    with Producer("first", order["directory"]) as producer:
        print("ready", flush=True)
        sys.stdin.readline()
        sleep_exactly()
        for number in range(order["count"]):
            stream = producer.open(f"first{number}")
            stream.write("first ")
            stream.close()
            time.sleep(order["every_s"])
        print(json.dumps({}), flush=True)


async def read_along(reading: AsyncReading, begin_s: float, rest_s: float) -> None:
    """What there is, then a rest, as somebody whose way is slow."""
    await asyncio.sleep(begin_s)
    while await reading.read_batch() is not None:
        await asyncio.sleep(rest_s)


async def take_first(reading: AsyncReading, late_us: list[float]) -> None:
    token = await reading.read()
    assert token
    late_us.append((time.monotonic_ns() - token.written_ns) / 1e3)


async def read_first(order: dict[str, Any]) -> None:
    """How late the first token of each new answer is, of a task for each, beside tasks that have a lot to read."""
    late_us: list[float] = []
    count, streams, rest_s = order["count"], order["streams"], order["rest_s"]
    async with AsyncConsumer(order["directory"]) as consumer:
        others = []
        for at in range(streams):
            reading = consumer.attach(f"s{at}", credit=order["credit"])
            others.append(asyncio.create_task(read_along(reading, rest_s * at / streams, rest_s)))
        firsts = [asyncio.create_task(take_first(consumer.attach(f"first{at}"), late_us)) for at in range(count)]
        print("ready", flush=True)
        await asyncio.gather(*firsts)
        behind = sum(not task.done() for task in others)
        for task in others:
            task.cancel()
    sys.stdin.readline()
    print(json.dumps({"late_us": late_us, "behind": behind}), flush=True)


ROLES = {
    "writer": write,
    "reader": read,
    "fill": fill,
    "flood": flood,
    "open_first": open_first,
    "read_first": lambda order: asyncio.run(read_first(order)),
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.stdin.readline()))
