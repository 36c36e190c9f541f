# SPDX-License-Identifier: Apache-2.0
"""Writer and reader of `scripts/bench pacing`, each a process: its order on stdin as JSON; it says `ready`, goes at the
next line, and ends with one line of JSON.
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

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
                time.sleep(left / 1e9)
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
            time.sleep(0.02)
        print(json.dumps({}), flush=True)


def read_first(order: dict[str, Any]) -> None:
    """How late the first token of each new answer is, beside whatever else there is to read."""
    late: list[float] = []
    with Consumer(order["directory"]) as consumer:
        for number in range(order["streams"]):
            consumer.attach(f"s{number}", credit=1 << 24)
        firsts = {consumer.attach(f"first{number}") for number in range(order["count"])}
        print("ready", flush=True)
        while len(late) < order["count"]:
            for reading in consumer.select():
                try:
                    batch = reading.read_batch(timeout=0)
                except ReadTimeout:
                    continue
                if batch is not None and reading in firsts:
                    late += [(time.monotonic_ns() - written_ns) / 1e3 for written_ns in batch.written_ns]
    sys.stdin.readline()
    print(json.dumps({"late_us": late}), flush=True)


ROLES = {"writer": write, "reader": read, "flood": flood, "open_first": open_first, "read_first": read_first}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.stdin.readline()))
