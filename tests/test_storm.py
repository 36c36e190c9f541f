# SPDX-License-Identifier: Apache-2.0
"""What a storm of wake-ups costs: the turns it causes, and what another producer's tokens wait beside it. Figures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawd.consumer import Consumer
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, SANITIZED, Daemon
from tests.history import History
from tests.rogue.producer import Rogue

TOKENS = 400


@contextmanager
def storm(runtime_dir: Path) -> Iterator[list[int]]:
    """Another producer that writes its eventfd as fast as it can. Counts how often."""
    count = [0]
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            os.eventfd_write(rogue.event_fd, 1)
            count[0] += 1

    with Rogue(runtime_dir) as rogue:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield count
        finally:
            over.set()
            thread.join()


def delays(daemon: Daemon, history: History, name: str) -> list[int]:
    """ns from write to read, token by token, sorted."""
    found = []
    history.put(name, *[b"%d" % number for number in range(TOKENS)])
    history.end(name, "stop")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        reading, got = consumer.attach(name), history.reading(name)
        stream = producer.open(name)
        for put in history.written[name].puts:
            stream.write(put.data)
            token = reading.read(PATIENCE_S)
            found.append(time.monotonic_ns() - token.written_ns)  # type: ignore[union-attr]
            got.take(token)
        stream.close()
        got.follow(reading)
    return sorted(found)


def test_a_storm_costs_few_turns_and_delays_nobody(daemon: Daemon, history: History) -> None:
    calm = delays(daemon, history, "calm")
    with storm(daemon.runtime_dir) as count:
        stormy = delays(daemon, history, "stormy")
        turns, begun, first = daemon.total("turns"), time.monotonic(), count[0]
        while count[0] - first < 100_000 and time.monotonic() - begun < PATIENCE_S:
            os.sched_yield()
        seconds = time.monotonic() - begun
        wakes, turns = count[0] - first, daemon.total("turns") - turns
    p50 = TOKENS // 2
    calm_us, stormy_us = ([row[at] // 1000 for at in (p50, TOKENS * 99 // 100)] for row in (calm, stormy))
    print(f"{wakes} wake-ups in {seconds:.2f} s made {turns} turns")
    print(f"another's tokens, p50 and p99 in µs: calm {calm_us}, stormy {stormy_us}")
    history.check()
    # 16 wake-ups until it is muted, each time twice as long; what daemon.total() asks is some turns of its own
    assert turns < 600 + 50 * seconds, f"{turns} turns in {seconds:.2f} s"
    # the stormer takes a processor and this process's GIL: what is left to see is whether tokens wait for its turns
    assert SANITIZED or stormy[p50] < 50_000_000
