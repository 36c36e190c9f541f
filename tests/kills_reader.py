# SPDX-License-Identifier: Apache-2.0
"""A client of the kill loop: kills_reader.py tokens|batches|slow RUNTIME_DIR. Each line of stdin is a stream to read
and where to go on. What came, and the position after it, is told on stdout before anything else is read: a pipe keeps
it when this process is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from clawd.aconsumer import AsyncConsumer, AsyncReading
from clawd.consumer import Consumer, Reading
from clawd.errors import AttachError, ControlError, ReadTimeout
from clawd.reading import BaseReading, Token

PATIENCE_S = 60.0
SLOW_CREDIT = 300
"""Bytes: a handful of tokens."""
SLOW_S = 0.03
WAIT_S = 10.0
"""For a stream whose producer was killed before it opened."""

T = TypeVar("T")


def tell(name: str, reading: BaseReading, tokens: Iterable[Token], *, over: bool = False) -> None:
    """One write, so that a kill tears at most its end; the position is that behind the last of `tokens`."""
    rows: list[list[Any]] = [
        [name, "token", token.seq, token.klass, token.count, token.data.hex(), token.text] for token in tokens
    ]
    rows += [[name, "gap", *gap] for gap in reading.gaps]
    if over:
        rows.append([name, "end", reading.end_reason])
    elif reading.position is not None:
        rows.append([name, "position", reading.position])
    if rows:
        os.write(1, "".join(json.dumps(row) + "\n" for row in rows).encode())


def fail(name: str, error: AttachError) -> None:
    os.write(1, (json.dumps([name, "failed", error.code, str(error)]) + "\n").encode())


def consumer_of(make: type[T], runtime_dir: str) -> T:
    """There may be no clawd at this moment."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return make(runtime_dir)  # type: ignore[call-arg]
        except ControlError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Threaded:
    """A synchronous client: one thread reads streams, one reads orders."""

    def __init__(self, runtime_dir: str, *, slow: bool) -> None:
        self.consumer = consumer_of(Consumer, runtime_dir)
        self.names: dict[Reading, str] = {}
        self.credit = {"credit": SLOW_CREDIT} if slow else {}
        self.pause_s = SLOW_S if slow else 0.0
        self.ordered = threading.Event()
        self.over = False

    def run(self) -> None:
        threading.Thread(target=self.obey, daemon=True).start()
        while not self.over:
            readings = self.consumer.select() if self.names else []
            for reading in readings:
                if name := self.names.get(reading):  # else it is only being attached, and selected again
                    self.follow(reading, name)
            if not readings:
                self.ordered.wait()
                self.ordered.clear()

    def obey(self) -> None:
        for line in sys.stdin:
            words = line.split()
            if words == ["fast"]:
                self.pause_s = 0.0
                continue
            name, after = words
            reading = self.consumer.attach(name, None if after == "-" else after, wait=WAIT_S, **self.credit)
            self.names[reading] = name
            self.ordered.set()
        self.over = True
        self.ordered.set()

    def follow(self, reading: Reading, name: str) -> None:
        """What is here of it, token by token."""
        try:
            while (token := reading.read(0)) is not None:
                tell(name, reading, [token])
                if self.pause_s:
                    time.sleep(self.pause_s)
            tell(name, reading, [], over=True)
        except ReadTimeout:
            return
        except AttachError as error:
            fail(name, error)
        del self.names[reading]


async def follow(reading: AsyncReading, name: str) -> None:
    try:
        while (batch := await reading.read_batch()) is not None:
            tell(name, reading, batch.tokens())
        tell(name, reading, [], over=True)
    except AttachError as error:
        fail(name, error)


async def run_async(runtime_dir: str) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with consumer_of(AsyncConsumer, runtime_dir) as consumer, asyncio.TaskGroup() as tasks:
        while line := await orders.readline():
            words = line.decode().split()
            if words != ["fast"]:
                name, after = words
                reading = consumer.attach(name, None if after == "-" else after, wait=WAIT_S)
                tasks.create_task(follow(reading, name))


if __name__ == "__main__":
    kind, directory = sys.argv[1:]
    if kind == "batches":
        asyncio.run(run_async(directory))
    else:
        Threaded(directory, slow=kind == "slow").run()
