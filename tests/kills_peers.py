# SPDX-License-Identifier: Apache-2.0
"""The producers and clients of the kill loop as processes: started, killed, started again and sent on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kills_judge import Follow, Judge, Word
from tests.kills_text import STREAMS_MAX, WIDTH, Progress

HERE = Path(__file__).resolve().parent


def launch(*command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, bufsize=0)


class ProducerSlot:
    """One producer after the other. `engine` is the program of those in C."""

    def __init__(self, runtime_dir: Path, directory: Path, name: str, engine: Path | None = None) -> None:
        self.runtime_dir, self.directory, self.name, self.engine = runtime_dir, directory, name, engine
        self.lives: list[Progress] = []
        self._life = self._told = 0  # clients were sent to the streams of lives before, and to so many of this one

    def start(self) -> None:
        number = len(self.lives)
        path = self.directory / f"{self.name}.{number}"
        self.lives.append(Progress(path))
        program = [str(self.engine)] if self.engine else [sys.executable, str(HERE / "kills_producer.py")]
        self.alive = True
        self.process = launch(*program, str(self.runtime_dir), f"{self.name}.{number}", str(path))

    def kill(self) -> None:
        self.alive = False
        self.process.kill()

    def reap(self) -> None:
        self.process.wait()
        assert self.process.stdin
        self.process.stdin.close()

    def fresh(self) -> list[str]:
        """Streams that were begun since asked last."""
        found = []
        while True:
            while self._told < STREAMS_MAX and self.lives[self._life].look(self._told):
                found.append(f"{self.name}.{self._life}-{self._told}")
                self._told += 1
            if self._life == len(self.lives) - 1:
                return found
            self._life, self._told = self._life + 1, 0

    def word(self, life: int, index: int) -> Word:
        published, closed = self.lives[life].look(index) or (0, False)
        return Word(published, closed, self.alive and life == len(self.lives) - 1)

    def written(self) -> set[str]:
        """All streams of which something is in the ring."""
        return {
            f"{self.name}.{life}-{index}"
            for life, progress in enumerate(self.lives)
            for index in range(STREAMS_MAX)
            if (word := progress.look(index)) and any(word)
        }


class ClientSlot:
    """One client after the other, each going on where the one before was."""

    def __init__(self, runtime_dir: Path, kind: str, judge: Judge) -> None:
        self.runtime_dir, self.kind, self.judge = runtime_dir, kind, judge
        self.follows: dict[str, Follow] = {}
        self.over: set[str] = set()
        self.alive = False
        self._orders = b""
        self._part = b""

    @property
    def is_slow(self) -> bool:
        return self.kind == "slow"

    def start(self) -> None:
        self.process = launch(
            sys.executable, str(HERE / "kills_reader.py"), self.kind, str(self.runtime_dir), stdout=subprocess.PIPE
        )
        assert self.process.stdin
        assert self.process.stdout
        self.fd = self.process.stdout.fileno()
        os.set_blocking(self.fd, False)
        os.set_blocking(self.process.stdin.fileno(), False)
        self._part, self._orders = b"", b""
        self.alive = True
        for name, follow in self.follows.items():
            self._order(f"{name} {follow.go_on()}")

    def kill(self) -> None:
        self.process.kill()

    def reap(self) -> None:
        """What it had told before is kept; half a line is not."""
        self.process.wait()
        self.hear()
        self.alive = False
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()

    def follow(self, name: str) -> None:
        self.follows[name] = Follow(name, self.kind)
        self._order(f"{name} -")

    def hurry(self) -> None:
        self._order("fast")

    def _order(self, line: str) -> None:
        if self.alive:  # the next one is sent on from where it was
            self._orders += line.encode() + b"\n"
            self.push()

    def push(self) -> None:
        """Orders that its pipe has room for."""
        assert self.process.stdin
        try:
            sent = os.write(self.process.stdin.fileno(), self._orders) if self.alive and self._orders else 0
        except (BlockingIOError, BrokenPipeError):
            return
        self._orders = self._orders[sent:]

    def hear(self) -> None:
        """All that it told."""
        while self.alive:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self._part = (self._part + data).split(b"\n")
            for line in lines:
                self._take(*json.loads(line))

    def _take(self, name: str, kind: str, *values: object) -> None:
        follow = self.follows[name]
        if kind == "end":
            self.judge.end(follow, str(values[0]))
        elif kind == "failed":
            self.judge.fail(follow, *map(str, values))
        else:
            follow.take([kind, *values])
            return
        del self.follows[name]
        self.over.add(name)


def next_slow(client: ClientSlot, fresh: list[str]) -> None:
    """The one held back reads one stream at a time, so that there always is what it has not got."""
    if fresh and len(client.follows) < WIDTH // 2:
        client.follow(fresh[-1])
