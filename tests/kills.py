# SPDX-License-Identifier: Apache-2.0
"""The kill loop: producers, clawd and clients killed at random, alone and together, at any moment, also while they
start; and everything that was in a ring reaches every client. `python tests/kills.py --seconds 600 --seed 1`.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from clawd.core import ffi, lib
from clawd.errors import ControlError
from clawd.page import Page
from tests.cprogram import TESTS, compile_c
from tests.daemon import PATIENCE_S, SHM, Daemon, keep_bytecode
from tests.kills_judge import Judge, Word
from tests.kills_peers import ClientSlot, ProducerSlot, next_slow

FLAGS = ("--spool-bytes", "64M", "--keep", "2min")
PAUSE_S = 0.15
"""Between two strikes, in the mean."""
START_S = 0.25
"""A clawd that is killed as it starts is killed within so long."""
SLOW_AHEAD = 12
"""Tokens beyond the slow client's last that its credit cannot have let through."""
HEAD_AT = 128


def build_engine(directory: Path) -> Path:
    return compile_c(directory / "killed", [TESTS / "engines" / "killed.c"], "-O1")


class KillLoop:
    """Peers, the daemon, and the one who kills them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.daemon = Daemon(directory / "run", *FLAGS)
        self.judge = Judge(self._word)
        engine = build_engine(directory)
        names = {f"{seed:x}p": None, f"{seed:x}q": None, f"{seed:x}c": engine}
        self.producers = {name: ProducerSlot(directory / "run", directory, name, made) for name, made in names.items()}
        self.clients = [ClientSlot(directory / "run", kind, self.judge) for kind in ("tokens", "batches", "slow")]
        self.kills: Counter[str] = Counter()
        """Processes that were killed, by what they were."""
        self.strikes = self.effective = 0

    def _word(self, stream: str) -> Word:
        prefix, _, index = stream.rpartition("-")
        name, _, life = prefix.rpartition(".")
        return self.producers[name].word(int(life), int(index))

    @property
    def peers(self) -> list[ProducerSlot | ClientSlot]:
        return [*self.producers.values(), *self.clients]

    def run(self, seconds: float) -> None:
        with ExitStack() as stack:
            stack.callback(self.daemon.discard)
            self.daemon.start()
            for peer in self.peers:
                peer.start()
                stack.callback(self._end, peer)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self.pump(self.dice.expovariate(1 / PAUSE_S))
                self.strike()
                self.check()
            self.finish()
            self.daemon.stop()

    @staticmethod
    def _end(peer: ProducerSlot | ClientSlot) -> None:
        if peer.process.poll() is None:
            peer.kill()
        peer.reap()

    def check(self) -> None:
        assert not self.judge.complaints, "\n".join(self.judge.complaints[:20])
        for peer in self.peers:
            assert peer.process.poll() is None, f"{peer.process.args} ended with {peer.process.returncode}"

    # --- what goes on

    def pump(self, seconds: float) -> None:
        """Hear clients and send them on, so long."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            fresh = [name for producer in self.producers.values() for name in producer.fresh()]
            for client in self.clients:
                if client.is_slow:
                    next_slow(client, fresh)
                else:
                    for name in fresh:
                        client.follow(name)
                client.push()
                client.hear()
            if left <= 0:
                return
            select.select([client.fd for client in self.clients if client.alive], [], [], min(left, 0.02))

    # --- kills

    def choose(self) -> tuple[bool, list[ProducerSlot | ClientSlot]]:
        """Whether clawd is killed, and which peers with it."""
        what = self.dice.random()
        if what < 0.4:
            return True, []
        if what < 0.55:
            return False, [self.dice.choice(self.peers)]
        if what < 0.65:  # everything at once
            return True, self.peers
        return True, self.dice.sample(self.peers, self.dice.randrange(1, 4))

    def strike(self) -> None:
        daemon_too, victims = self.choose()
        pid = self.daemon.pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self.strikes += 1
        self.effective += self.is_effective()
        if daemon_too:
            os.kill(pid, signal.SIGKILL)
        for victim in victims:
            victim.kill()
        if daemon_too:
            self.daemon.kill()
            self.kills["clawd"] += 1
        else:
            os.kill(pid, signal.SIGCONT)
        self.dice.shuffle(victims)
        for victim in victims:
            victim.reap()
            self.kills["producers" if isinstance(victim, ProducerSlot) else "clients"] += 1
        first = [victim for victim in victims if self.dice.random() < 0.5]
        for victim in first:  # who finds no clawd waits for one
            victim.start()
        if daemon_too:
            self.restart()
        for victim in victims:
            if victim not in first:
                victim.start()

    def restart(self) -> None:
        """As a service manager does; a start may be killed too."""
        while self.dice.random() < 0.2:
            self.daemon.launch()
            self.pump(self.dice.uniform(0, START_S))
            self.daemon.kill()
            self.kills["starts"] += 1
        self.daemon.launch()
        assert self.daemon.await_ready(), f"clawd ended with {self.daemon.process.returncode}:\n{self.daemon.log}"

    def is_effective(self) -> bool:
        """clawd stands still: is something committed that was not sent, or in a ring and not committed?"""
        return any(self._uncommitted(name) for name in self.daemon.objects()) or self._unsent()

    def _uncommitted(self, name: str) -> bool:
        if not name.endswith("-data"):
            return False
        try:
            head = read_word(SHM / name, HEAD_AT)
            ack_pos = read_word(SHM / f"{name.removesuffix('-data')}-ctl", ffi.offsetof("struct claw_ctl", "ack_pos"))
        except (FileNotFoundError, ValueError):
            return False
        return head != ack_pos

    def _unsent(self) -> bool:
        (slow,) = [client for client in self.clients if client.is_slow]
        slow.hear()
        try:
            with Page(self.daemon.runtime_dir) as page:
                for row in page.streams():
                    if row.attachments and row.state == lib.CLAW_STREAM_LIVE and row.released_seq < row.next_seq:
                        return True  # its pacer holds them
                    name = bytes(ffi.buffer(row.name, row.name_len)).decode()
                    follow = slow.follows.get(name)
                    if follow and row.attachments and row.next_seq > follow.seen + SLOW_AHEAD:
                        return True
        except ControlError:
            pass  # only starting
        return False

    # --- the end

    def finish(self) -> None:
        """Producers end what they write; clients read all of it."""
        for producer in self.producers.values():
            assert producer.process.stdin
            producer.process.stdin.close()
        for client in self.clients:
            client.hurry()
        deadline = time.monotonic() + 3 * PATIENCE_S
        while self._is_due():
            self.pump(0.05)
            assert time.monotonic() < deadline, f"still due: {self._due()}"
            assert not self.judge.complaints, "\n".join(self.judge.complaints[:20])
        due = set().union(*(producer.written() for producer in self.producers.values()))
        for client in self.clients:
            assert client.is_slow or due <= client.over, f"{client.kind} never got {sorted(due - client.over)[:20]}"
            client.kill()
        totals = self.daemon.status()["totals"]
        assert (totals["quarantined"], totals["dropped"], totals["rescued"]) == (0, 0, 0), totals

    def _is_due(self) -> bool:
        producing = [producer for producer in self.producers.values() if producer.process.poll() is None]
        for producer in self.producers.values():
            assert producer.process.poll() in (None, 0), f"{producer.name} ended with {producer.process.returncode}"
        return bool(producing or self._due())

    def _due(self) -> dict[str, list[str]]:
        return {client.kind: sorted(client.follows)[:5] for client in self.clients if client.follows}

    def __str__(self) -> str:
        kills = ", ".join(f"{number} {what}" for what, number in sorted(self.kills.items()))
        return (
            f"{self.strikes} strikes, {self.effective} effective ({self.effective / max(1, self.strikes):.0%});"
            f" killed: {kills}; {self.judge.tokens} tokens came, each as it was written"
        )


def read_word(path: Path, at: int) -> int:
    with path.open("rb") as file:
        data = os.pread(file.fileno(), 8, at)
    if len(data) != 8:
        raise ValueError
    return int.from_bytes(data, "little")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/kills.py", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), metavar="N")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="clawd-kills-") as directory:
        keep_bytecode(Path(directory) / "bytecode")
        loop = KillLoop(Path(directory), options.seed)
        try:
            loop.run(options.seconds)
        finally:
            print(loop, flush=True)
        print(f"counted: {loop.effective} kills that counted\ncounted: {sum(loop.kills.values())} processes killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
