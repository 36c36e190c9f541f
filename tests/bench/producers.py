# SPDX-License-Identifier: Apache-2.0
"""The writing half of each path, as a process: `python -m tests.bench.producers PATH`, its order on stdin as JSON. It
says `ready`, starts at the next line, and ends with one line of what it measured.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.bench.schedule import TEXT, paced, quantile

Write = Callable[[int], None]
"""Writes the step that starts with this token's number."""


def clawd_writer(order: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    from clawd.producer import Producer

    producer = Producer("bench", order["directory"])
    streams = [producer.open(f"s{number}") for number in range(order["streams"])]
    step = order["step"]

    def write_one(number: int) -> None:
        streams[number % len(streams)].write(TEXT, block=10)

    items = [(streams[number % len(streams)], TEXT) for number in range(step)]

    def write_step(_number: int) -> None:
        producer.write_many(items, block=10)

    def finish() -> None:
        for stream in streams:
            stream.close()
        sys.stdin.readline()  # until the client has it all
        producer.close()

    return (write_one if step == 1 else write_step), finish


def pyzmq_writer(order: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    """One message a token over PUSH: the plainest use of the same library."""
    import zmq

    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(f"ipc://{order['directory']}/plain")
    text, streams, step = TEXT.encode(), order["streams"], order["step"]

    def write(number: int) -> None:
        for at in range(number, number + step):
            head = (at % streams).to_bytes(4, "little") + time.monotonic_ns().to_bytes(8, "little")
            socket.send(head + text)

    return write, lambda: (sys.stdin.readline(), socket.close(), None)[-1]


def engine_writer(order: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    """Today's engine pattern: one msgspec batch a step over PUSH, for asyncio queues behind it."""
    import msgspec
    import zmq

    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(f"ipc://{order['directory']}/engine")
    encode = msgspec.msgpack.Encoder().encode
    streams, step = order["streams"], order["step"]

    def write(number: int) -> None:
        now_ns = time.monotonic_ns()
        outputs = [(f"s{at % streams}", TEXT, now_ns) for at in range(number, number + step)]
        socket.send(encode(outputs), copy=False)

    return write, lambda: (sys.stdin.readline(), socket.close(), None)[-1]


def nothing_writer(order: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    """The harness alone: what its clock and its sleeps cost."""
    return (lambda _number: None), (lambda: None)


WRITERS = {"clawd": clawd_writer, "pyzmq": pyzmq_writer, "engine": engine_writer, "nothing": nothing_writer}


def main() -> None:
    order = json.loads(sys.stdin.readline())
    write, finish = WRITERS[sys.argv[1]](order)
    print("ready", flush=True)
    sys.stdin.readline()
    held: list[int] = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter_ns()
    for number in paced(order["rate"], order["count"], order["step"], order["seed"]):
        begun = time.perf_counter_ns()
        write(number)
        held.append(time.perf_counter_ns() - begun)
    took = time.perf_counter_ns() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    finish()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    held_us = {"held_p50_us": quantile(held, 0.5), "held_p99_us": quantile(held, 0.99)}
    figures = {**held_us, "cpu_s": cpu, "took_s": took / 1e9}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
