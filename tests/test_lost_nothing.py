# SPDX-License-Identifier: Apache-2.0
"""Starts that are cut short, again and again, and stops in mid-stream: the next clawd has everything, and comes up."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from clawd.consumer import Consumer
from clawd.errors import RingLost
from clawd.producer import Producer, Stream
from counts import count
from tests import load
from tests.daemon import PATIENCE_S, Daemon, until
from tests.history import History, Put
from tests.load import Writer

pytestmark = pytest.mark.plain

POINTS = {
    "the lock": "instance.Instance._read_id",
    "the way back found": "recovery.find",
    "an object looked at": "memory.open_left",
    "an object made": "memory.create",
    "the spool mapped": "recovery.make_spool",
    "streams found": "Core.recover",
    "a ring taken over": "recovery._adopt",
    "those without a ring ended": "Core.end_orphans",
    "all recovered": "recovery.recover",
    "the relay listens": "relay.Relay.listen",
    "the door listens": "registry.Registry.listen",
    "the page shown": "Core.publish",
    "the first turn": "Core.turn",
    "a producer back": "recovery.Adopted.take",
    "an answer to it": "ring.Ring.hear",
}
"""What a start has just done when it is killed, and the function that did it, below clawd.server or in the core."""

KILLED = """
import os, signal, sys
from clawd import core
from clawd.server import instance, loop, memory, recovery, registry, relay, ring
from clawd.__main__ import main
path, arguments = sys.argv[1].split("."), sys.argv[2:]
owner = core if path[0] == "Core" else globals()[path.pop(0)]
for name in path[:-1]: owner = getattr(owner, name)
done = getattr(owner, path[-1])
def then_die(*values, **named):
    done(*values, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, path[-1], then_die)
sys.exit(main(arguments))
"""


def take_down(history: History, names: list[str], seed: int, count: int) -> None:
    for name in names:
        history.put(name, *(Put(item.data, item.urgent, item.count) for item in load.tokens(seed, name, count)))


class Scene:
    """Streams that are under way, of a producer that lives and one that does not."""

    def __init__(self, daemon: Daemon, history: History) -> None:
        self.daemon, self.history = daemon, history
        self.producer = Producer("p", daemon.runtime_dir)
        self.streams = {name: self.producer.open(name) for name in load.names(6)}
        self.dead = Writer(daemon.runtime_dir)
        self.dead.load(load.names(3, "dead"), 20, 1, close=False)
        assert self.dead.wait() == "done"
        for name in load.names(3, "dead"):
            history.end(name, "producer_lost")
        take_down(history, load.names(3, "dead"), 1, 20)
        self.write("first")
        daemon.await_total("tokens", 3 * 20 + 6)

    def write(self, what: str) -> None:
        for name, stream in self.streams.items():
            data = f"{what} of {name} ".encode()
            stream.write(data)
            self.history.put(name, data)

    def finish(self) -> None:
        for name, stream in self.streams.items():
            stream.close("stop", block=PATIENCE_S)
            self.history.end(name, "stop")
        with Consumer(self.daemon.runtime_dir) as consumer:
            for name in self.history.written:
                self.history.reading(name).follow(consumer.attach(name))
        self.history.check()
        self.producer.close(PATIENCE_S)


@pytest.fixture
def scene(daemon: Daemon, history: History) -> Iterator[Scene]:
    scene = Scene(daemon, history)
    yield scene
    scene.dead.process.kill()
    scene.dead.process.communicate()
    with contextlib.suppress(RingLost):
        scene.producer.close(0)


def test_a_start_killed_after_each_of_its_steps_costs_nothing(scene: Scene) -> None:
    daemon = scene.daemon
    whole = daemon.command
    scene.dead.kill()
    daemon.kill()
    for what, point in POINTS.items():
        scene.write(what)  # in the ring, or waiting for it
        daemon.command = [sys.executable, "-c", KILLED, point, *whole[whole.index("clawd") + 1 :]]
        daemon.launch()
        assert daemon.process.wait(PATIENCE_S) == -signal.SIGKILL, f"{what}: {daemon.log}"
        daemon.kill()
    count(len(POINTS), "starts killed")
    daemon.command = whole
    daemon.start()
    scene.write("last")
    scene.finish()


def test_starts_killed_at_any_moment_cost_nothing_and_never_loop(scene: Scene, dice: random.Random) -> None:
    daemon, kills = scene.daemon, 12
    for number in range(kills):
        daemon.kill()
        if number == kills // 2:
            scene.dead.kill()
        scene.write(f"{number}")
        daemon.launch()
        threading.Event().wait(dice.uniform(0, 0.25))  # anywhere from its first instruction to its first turns
    daemon.kill()
    count(kills, "starts killed")
    daemon.start()
    scene.write("last")
    scene.finish()


def test_fifty_streams_go_through_a_stop_and_a_start_with_their_readers(
    daemon: Daemon, history: History, seed: int
) -> None:
    names, each = load.names(50), 30
    with (
        Producer("p", daemon.runtime_dir) as one,
        Producer("q", daemon.runtime_dir) as other,
        Consumer(daemon.runtime_dir) as consumer,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        streams: dict[str, Stream] = {}
        for number, name in enumerate(names):
            streams[name] = (one, other)[number % 2].open(name)
            history.end(name, "stop")
        reads = [pool.submit(history.reading(name).follow, consumer.attach(name)) for name in names]
        for turn in range(3):
            for name, stream in streams.items():
                for item in load.tokens(seed + turn, name, each):
                    stream.write(item.data, urgent=item.urgent, count=item.count, block=PATIENCE_S)
            take_down(history, names, seed + turn, each)
            if turn < 2:
                daemon.stop()
                daemon.start()
        for stream in streams.values():
            stream.close("stop", block=PATIENCE_S)
        for read in reads:
            read.result()
        history.check()
        until(lambda: daemon.total("streams_ended") == len(names), "all to have ended")


def test_a_start_without_room_for_its_figures_is_one_line_and_costs_nothing(scene: Scene) -> None:
    daemon = scene.daemon
    whole = daemon.command
    scene.dead.kill()
    daemon.kill()
    scene.write("meanwhile")
    daemon.command = ["prlimit", "--fsize=65536", *whole]
    daemon.launch()
    assert not daemon.await_ready(), "it came up"
    line = daemon.await_refusal()
    assert line.startswith("clawd: cannot allocate ")
    assert "make /dev/shm larger or lower max_streams" in line
    daemon.command = whole
    daemon.start()
    scene.finish()
