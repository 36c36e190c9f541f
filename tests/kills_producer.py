# SPDX-License-Identifier: Apache-2.0
"""A producer of the kill loop: kills_producer.py RUNTIME_DIR PREFIX PROGRESS. Writes streams until its stdin ends, then
ends them all in order. Whatever it says to be in the ring was seen to be there.
"""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path

from clawd.errors import ControlError
from clawd.producer import Producer, Stream
from tests.kills_text import PACES, REASON, RING_BYTES, WIDTH, Progress, hashed, length, token

PATIENCE_S = 60.0
STEP_S = 0.012
"""An engine's step. Slow enough that a stream lives for several kills."""


class Answer:
    def __init__(self, producer: Producer, prefix: str, index: int, progress: Progress) -> None:
        self.name, self.index = f"{prefix}-{index}", index
        self.length, self.written = length(self.name), 0
        progress.begin(index)  # first: a kill may come at any moment after the OPEN is in the ring
        pace = PACES[hashed(self.name) % len(PACES)]
        self.stream: Stream = producer.open(self.name, pace=pace, block=PATIENCE_S)

    @property
    def is_whole(self) -> bool:
        return self.written == self.length


def attached(runtime_dir: Path, prefix: str) -> Producer:
    """There may be no clawd at this moment."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return Producer(prefix, runtime_dir, RING_BYTES)
        except ControlError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def step(producer: Producer, answers: list[Answer]) -> None:
    """A token for each."""
    together = []
    for answer in answers:
        put = token(answer.name, answer.written)
        answer.written += 1
        if put.urgent:
            answer.stream.write(put.data, urgent=True, block=PATIENCE_S)
        else:
            together.append((answer.stream, put.data))
    producer.write_many(together, block=PATIENCE_S)


def main() -> None:
    runtime_dir, prefix, progress = Path(sys.argv[1]), sys.argv[2], Progress(Path(sys.argv[3]))
    with attached(runtime_dir, prefix) as producer:
        live: list[Answer] = []
        closed: list[Answer] = []
        begun, told = 0, False
        while not told or live:
            told = told or bool(select.select([sys.stdin], [], [], STEP_S)[0])
            while not told and len(live) < WIDTH:
                live.append(Answer(producer, prefix, begun, progress))
                begun += 1
            step(producer, live)
            for answer in live:
                if answer.is_whole:
                    answer.stream.close(REASON, block=PATIENCE_S)
                    closed.append(answer)
            live = [answer for answer in live if not answer.is_whole]
            if producer.backlog.accepted == 0:  # all there is is in the ring, in this order
                for answer in live:
                    progress.publish(answer.index, answer.written)
                for answer in closed:
                    progress.publish(answer.index, answer.written, closed=True)
                closed.clear()
        producer.close(PATIENCE_S)
        for answer in closed:
            progress.publish(answer.index, answer.written, closed=True)


if __name__ == "__main__":
    main()
