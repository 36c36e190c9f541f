# SPDX-License-Identifier: Apache-2.0
"""An engine and a service that reads it, two processes of one user: streams flow until the line "end" comes on stdin;
then the history checker judges what the service got. Prints "flowing" once every stream has, and its verdict as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from clawd import AsyncConsumer, Producer
from history import History, Seen

FLOWING = 3
"""Tokens of each stream that say it flows."""
BLOCK_S = 60.0
"""How long a write may wait while clawd is away, in emulation."""


class Reader:
    """The service: all streams with one consumer."""

    def __init__(self, prefix: str, count: int) -> None:
        self.names = [f"{prefix}-{number}" for number in range(count)]
        self.got: dict[str, Any] = {}
        self.flowing = 0
        self.last_ns = time.monotonic_ns()
        self.silence_ns = 0

    async def read(self, consumer: AsyncConsumer, name: str) -> None:
        tokens: list[tuple[int, str, int, int, str]] = []
        async with consumer.attach(name) as reading:
            async for token in reading:
                tokens.append((token.seq, bytes(token.data).hex(), token.klass, token.count, token.text))
                now_ns = time.monotonic_ns()
                self.silence_ns = max(self.silence_ns, now_ns - self.last_ns)
                self.last_ns = now_ns
                if len(tokens) == FLOWING:
                    self.flowing += 1
                    if self.flowing == len(self.names):
                        self.silence_ns = 0
                        print("flowing", flush=True)
            self.got[name] = {"tokens": tokens, "gaps": len(reading.gaps), "end": reading.end_reason}

    async def run(self, options: dict[str, str]) -> None:
        async with AsyncConsumer(**options) as consumer:  # type: ignore[arg-type]
            await asyncio.gather(*(self.read(consumer, name) for name in self.names))
        print(json.dumps({"got": self.got, "silence_ms": self.silence_ns / 1e6}), flush=True)


def write(prefix: str, count: int, interval_s: float, ended: threading.Event, history: History) -> None:
    with Producer(name=prefix) as producer:
        streams = {f"{prefix}-{number}": producer.open(f"{prefix}-{number}") for number in range(count)}
        step = 0
        while not ended.wait(interval_s):
            for name, stream in streams.items():
                data = b"%s/%d; " % (name.encode(), step)
                stream.write(data, block=BLOCK_S)
                history.put(name, data)
            step += 1
        for name, stream in streams.items():
            stream.close("stop", block=BLOCK_S)
            history.end(name, "stop")


def judge(history: History, answer: dict[str, Any]) -> dict[str, Any]:
    count = 0
    for name, row in answer["got"].items():
        got = history.reading(name)
        for seq, data, klass, tokens, text in row["tokens"]:
            got.text.append(text)
            if data or tokens:
                got.events.append(Seen(seq, bytes.fromhex(data), klass, tokens))
                count += 1
        got.finish(row["end"])
    complaints = history.complaints()
    complaints += [f"{name}: {row['gaps']} gaps" for name, row in answer["got"].items() if row["gaps"]]
    complaints += [f"{name}: never read" for name in history.written if name not in answer["got"]]
    return {"complaints": complaints, "tokens": count, "silence_ms": answer["silence_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prefix")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--interval", type=float, default=0.05)
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--reader", type=json.loads, default={})
    options = parser.parse_args()
    if options.read:
        asyncio.run(Reader(options.prefix, options.streams).run(options.reader))
        return
    command = [sys.executable, "-P", __file__, options.prefix, "--streams", str(options.streams), "--read"]
    command += ["--reader", json.dumps(options.reader)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert reader.stdout
    history, ended = History(), threading.Event()
    writer = threading.Thread(target=write, args=(options.prefix, options.streams, options.interval, ended, history))
    writer.start()
    try:
        line = reader.stdout.readline()
        print(line.strip() or "the reader ended", flush=True)
        sys.stdin.readline()
    finally:
        ended.set()
    writer.join()
    print(json.dumps(judge(history, json.loads(reader.stdout.readline()))), flush=True)
    reader.wait()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
