# SPDX-License-Identifier: Apache-2.0
"""The tracer when there is more to follow than its tables have room for: it is counted."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clawd.kernel import tracer
from clawd.kernel.tracer import Tracer
from tests.cgroups import alone
from tests.test_bpf_shaper import until
from tests.test_bpf_tracer import lane, settle

pytestmark = [pytest.mark.root, pytest.mark.plain, pytest.mark.usefixtures("tracer")]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone():
        yield


SLEEPY = """
import threading, time
def sleep():
    while True: time.sleep(0.001)
for _ in range(20): threading.Thread(target=sleep, daemon=True).start()
sleep()
"""
THREADS = """
import sys, threading
others = []
for line in sys.stdin:
    while len(others) < int(line) - 1:
        end = threading.Event()
        others.append((threading.Thread(target=end.wait, daemon=True), end))
        others[-1][0].start()
    while len(others) > int(line) - 1:
        thread, end = others.pop()
        end.set()
        thread.join()
    print("done", flush=True)
"""


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the programs' tables hold so many."""
    load = tracer.bpf.load

    def limit(**most: int) -> None:
        knobs = [f"-D{name}={value}" for name, value in most.items()]
        monkeypatch.setattr(tracer.bpf, "load", lambda source, programs, flags, *rest: load(
            source, programs, [*flags, *knobs], *rest))  # fmt: skip

    return limit


def test_writes_of_sockets_without_room_are_counted_and_a_closed_one_leaves_its_own(room: Callable[..., None]) -> None:
    room(CLAW_SOCKETS_MAX=1)
    with lane() as (ours, peer, lanes), Tracer(os.getpid(), lanes, ("writes",), is_stamped=False) as traced:
        settle(ours, peer)  # the peer is ours too, and finds no room
        before = traced.look().counters
        assert before["full_sockets"] == 2
        peer.send(b"x")
        peer.send(b"y")
        assert traced.look().counters["full_sockets"] == 4
        ours.send(b"has its room")
        peer.recv(100)
        assert traced.look().counters["writes"] == before["writes"] + 1
        for each in (ours, peer):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()
        with lane() as (late, other, _):
            settle(late, other)
            assert traced.look().counters["full_sockets"] == 6
            assert traced.look().counters["writes"] == before["writes"] + 3


def test_a_write_that_fails_takes_no_room(room: Callable[..., None]) -> None:
    room(CLAW_SOCKETS_MAX=1)
    send = ctypes.CDLL(None, use_errno=True).send
    with lane() as (ours, peer, _), Tracer(os.getpid(), {}, ("writes",), is_stamped=False) as traced:
        assert send(ours.fileno(), None, ctypes.c_size_t(100), 0) == -1
        assert ctypes.get_errno() == errno.EFAULT
        peer.send(b"x")
        assert (traced.look().counters["full_sockets"], traced.look().counters["writes"]) == (0, 1)


def test_waits_and_takers_without_room_are_counted(room: Callable[..., None]) -> None:
    room(CLAW_WAITS_MAX=1, CLAW_TAKERS_MAX=1)
    victim = subprocess.Popen([sys.executable, "-c", SLEEPY])
    hogs = [subprocess.Popen(["bash", "-c", f"printf claw-{n} >/proc/$$/comm; while :; do :; done"]) for n in range(4)]
    try:
        threads = Path(f"/proc/{victim.pid}/task")
        until(lambda: len([*threads.iterdir()]) == 21, "its threads")
        with Tracer(victim.pid, parts=("sched",)) as traced:
            until(lambda: traced.look().counters["full_waits"], "waits at once")
            until(lambda: traced.look().counters["full_takers"], "takers of other names")
            assert len(traced.look().takers) == 1
    finally:
        for process in (victim, *hogs):
            process.kill()
            process.wait()


def test_threads_without_room_are_counted_and_those_that_ended_leave_theirs(room: Callable[..., None]) -> None:
    room(CLAW_THREADS_MAX=2)
    victim = subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:

        def have(amount: int) -> None:
            assert victim.stdin
            assert victim.stdout
            victim.stdin.write(f"{amount}\n")
            victim.stdin.flush()
            assert victim.stdout.readline() == "done\n"

        def full(traced: Tracer) -> int:
            traced.refresh()
            return traced.look().counters["full_threads"]

        with Tracer(victim.pid, parts=("sched",)) as traced:
            assert traced.look().counters["full_threads"] == 0
            have(4)
            until(lambda: full(traced) == 2, "two of four without room")
            have(1)
            have(2)
            until(lambda: full(traced) == 0, "their room")
    finally:
        victim.kill()
        victim.communicate()
