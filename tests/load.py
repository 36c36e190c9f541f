# SPDX-License-Identifier: Apache-2.0
"""What producers write in tests, the same for the same seed in every process; and a producer process under a test's
command: run as a program, it carries out one JSON line after the other.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from clawd.core import lib
from clawd.producer import Producer, Stream

ROOM_S = 60.0
PROSE = "The ring is full; 环形缓冲区已满，请稍候。 Ёмкость 0123456789 🦞 naïve ∑".encode()


class Item:
    """One token to write."""

    __slots__ = ("count", "data", "urgent")

    def __init__(self, data: bytes, urgent: bool, count: int) -> None:
        self.data, self.urgent, self.count = data, urgent, count


def tokens(seed: int, stream: str, count: int) -> list[Item]:
    """Prose cut anywhere, also inside of characters; now and then something long, binary, urgent, or many in one."""
    dice = random.Random(f"{seed} {stream}")
    items = []
    for number in range(count):
        start = dice.randrange(len(PROSE) - 1)
        data = b"%d " % number + PROSE[start : start + dice.randrange(1, 12)]
        if dice.random() < 0.02:
            data = dice.randbytes(dice.randrange(1, 1000))
        items.append(Item(data, dice.random() < 0.05, dice.randrange(2, 9) if dice.random() < 0.1 else 1))
    return items


def names(count: int, prefix: str = "s") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


class Writer:
    """A producer process. `load` returns at once; `wait` says when it is done."""

    def __init__(self, runtime_dir: Path, name: str = "writer", buffer_size: int | None = None) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(runtime_dir), name, str(buffer_size or "")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self.wait() == "attached"

    def tell(self, op: str, **values: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"op": op, **values}) + "\n")

    def wait(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the producer process ended with {self.process.wait()}"
        return json.loads(line)

    def load(
        self, streams: list[str], count: int, seed: int, reason: str = "stop", *, start: int = 0, close: bool = True
    ) -> None:
        """Write `tokens(seed, stream, count)` from `start` on to each stream, turn by turn, then close them if told."""
        self.tell("load", streams=streams, count=count, seed=seed, reason=reason, start=start, close=close)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.process.kill()
        self.close()


def write_all(producer: Producer, streams: dict[str, Stream], count: int, seed: int, start: int = 0) -> None:
    """Every stream's tokens, a turn each: plain ones of a turn in one call, as an engine's step."""
    rows = zip(*(tokens(seed, name, count)[start:] for name in streams), strict=True)
    for row in rows:
        together = []
        for stream, item in zip(streams.values(), row, strict=True):
            if item.urgent or item.count != 1 or len(item.data) > 64:
                stream.write(item.data, urgent=item.urgent, count=item.count, block=ROOM_S)
            else:
                together.append((stream, item.data))
        producer.write_many(together, block=ROOM_S)


def main() -> None:
    runtime_dir, name, size = sys.argv[1:]
    with Producer(name, runtime_dir, int(size) if size else None) as producer:
        print('"attached"', flush=True)
        opened: dict[str, Stream] = {}
        for line in sys.stdin:
            order = json.loads(line)
            streams = {name: opened.get(name) or producer.open(name, block=ROOM_S) for name in order["streams"]}
            opened |= streams
            write_all(producer, streams, order["count"], order["seed"], order["start"])
            for stream in streams.values() if order["close"] else ():
                stream.close(order["reason"], block=ROOM_S)
            print('"done"', flush=True)


assert lib.CLAW_RECORD_MAX > 1000, "a token above must fit one record, or it has several sequence numbers"

if __name__ == "__main__":
    main()
