# SPDX-License-Identifier: Apache-2.0
"""Floods against what libzmq cannot bound: connections up to the descriptors' end, messages of 100,000s of frames."""

from __future__ import annotations

import itertools
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from clawd import protocol
from clawd.consumer import Consumer
from clawd.descriptors import RELAY_AHEAD, RELAY_SLACK, files_needed
from clawd.producer import Producer
from clawd.server.door import Door
from tests.daemon import PATIENCE_S, SANITIZED, Daemon, until
from tests.history import History
from tests.rogue.producer import dial
from tests.test_rogue import honest

Start = Callable[..., Daemon]
CLIENTS, PRODUCERS, SHARE = 40, 4, 10

FLOOD = """
import os, resource, socket, sys
path, count, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 64), hard))
if uid: os.setgroups([0]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
held = []
for number in range(count):
    each = socket.socket(socket.AF_UNIX)
    each.connect(path)
    held.append(each)
    if number % 2:
        try: each.send(b"\\xff")
        except OSError: pass  # it was shut already
print("connected", flush=True)
sys.stdin.read()
"""


@contextmanager
def flood(path: Path, count: int, uid: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Connects, and holds what it has until the block ends."""
    command = [sys.executable, "-c", FLOOD, str(path), str(count), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def opened(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


@pytest.fixture
def small() -> Iterator[Daemon]:
    need = files_needed(PRODUCERS, CLIENTS)
    flags = ("--max-clients", CLIENTS, "--max-producers", PRODUCERS, "--user-clients", SHARE)
    prefix = ("prlimit", f"--nofile={need}:{need}")
    # Not in pytest's directory, which every pytest that starts shuts to others
    with tempfile.TemporaryDirectory(prefix="clawd-door-") as directory:
        Path(directory).chmod(0o711)
        yield Daemon(Path(directory) / "run", "--spool-bytes", "4M", *map(str, flags), prefix=prefix)


@pytest.mark.parametrize("uid", [0, 65534], ids=["its own user", "another user"])
def test_a_flood_of_connections_neither_ends_the_daemon_nor_keeps_others_out(small: Daemon, uid: int) -> None:
    with small as daemon:
        daemon.runtime_dir.chmod(0o711)
        before = opened(daemon)
        path = daemon.runtime_dir / protocol.RELAY_SOCKET
        with ExitStack() as stack:
            count = 2 * files_needed(PRODUCERS, CLIENTS)
            for process in [stack.enter_context(flood(path, count, uid)) for _ in range(2)]:
                assert process.stdout
                assert process.stdout.readline() == "connected\n"
            most = before + SHARE + RELAY_SLACK
            until(lambda: opened(daemon) <= most, f"{opened(daemon)} descriptors to be {most} at most")
            if uid:  # the other user's share is all there
                with honest(daemon, tokens=20):
                    pass
            daemon.log.wait("relay connections refused", "limit=user_clients", f"uid={uid}")
        until(lambda: opened(daemon) <= before, "the descriptors to be free again")
        with honest(daemon, tokens=20):
            pass


def test_libzmq_waits_for_a_daemon_that_does_not_look(tmp_path: Path) -> None:
    """Without that, a flood during one long turn could end clawd: EMFILE on accept aborts."""
    script = """
import resource, socket, sys, time
from pathlib import Path
import zmq
from clawd.server.door import Door
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
context = zmq.Context()
router = context.socket(zmq.ROUTER)
door = Door(context, router, 10, 10)
path = Path(sys.argv[1])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
listener.bind(str(path)); listener.listen(128)
router.setsockopt(zmq.USE_FD, listener.fileno())
door.listen(path)
router.bind("ipc://" + str(path))
listener.detach()
print("ready", flush=True)
sys.stdin.readline()
before = len(list(Path("/proc/self/fd").iterdir()))
print(before, flush=True)
if sys.stdin.readline() == "look\\n":
    while door.look() or len(list(Path("/proc/self/fd").iterdir())) > before:
        pass
thread = door.close()
router.close(0)
context.term()
thread.join()
print("over", flush=True)
"""
    for word in ("look", "close"):
        path = tmp_path / word
        command = [sys.executable, "-c", script, str(path)]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            fds, seen = Path(f"/proc/{process.pid}/fd"), 0
            with flood(path, min(3000, hard - 64)):
                while (now := len(list(fds.iterdir()))) > seen or now < 900:  # it grows until libzmq waits
                    seen = now
                    select.select([], [], [], 0.2)
                assert now < RELAY_AHEAD + 40, f"{now} descriptors"
                process.stdin.write(f"go\n{word}\n")
                process.stdin.flush()
                process.stdout.readline()
                if word == "close":
                    assert process.stdout.readline() == "over\n"
            if word == "look":
                assert process.stdout.readline() == "over\n"


def test_a_number_that_is_another_file_by_now_is_not_touched(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        door = Door(context, router, 1, 1)
        door.listen(tmp_path / "relay.sock")
        left, right = socket.socketpair()
        with left, right, open("/dev/null", "rb") as file, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "relay.sock"))
            listener.listen(1)
            for fd in (left.fileno(), file.fileno(), listener.fileno(), 1 << 20):
                door.shut(fd)
            left.send(b"x")
            assert right.recv(1) == b"x"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "relay.sock"))
        thread = door.close()
        router.close()
        context.term()
        thread.join()


def test_a_bomb_of_frames_is_survived_beside_an_honest_stream(start: Start, history: History) -> None:
    daemon = start("--spool-bytes", "4M")
    frames = 300_000
    before = daemon.private_bytes()
    history.put("s", *[b"%d" % number for number in range(200)])
    history.end("s", "stop")
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as bomber,
        Consumer(daemon.runtime_dir) as consumer,
        Producer("p", daemon.runtime_dir) as producer,
    ):
        for option, value in ((zmq.LINGER, 0), (zmq.PROBE_ROUTER, 1), (zmq.IMMEDIATE, 1), (zmq.RCVTIMEO, 60_000)):
            bomber.setsockopt(option, value)
        bomber.connect(f"ipc://{daemon.runtime_dir / protocol.RELAY_SOCKET}")
        assert json.loads(bomber.recv())["op"] == "connected"
        reading, stream = consumer.attach("s"), producer.open("s")
        stream.write(b"0")
        got = history.reading("s").follow(reading, limit=1)
        for _ in itertools.repeat(None, frames):
            bomber.send(b"", zmq.SNDMORE)
        bomber.send(b"")
        for put in history.written["s"].puts[1:]:
            stream.write(put.data, block=PATIENCE_S)
        stream.close(block=PATIENCE_S)
        got.follow(reading)
        daemon.log.wait("too many frames")
        grown = daemon.private_bytes() - before
        print(f"{frames} frames: {grown >> 10} KiB more")
        assert json.loads(bomber.recv())["op"] == "connected"  # hung up on, and come again
    history.check()
    assert SANITIZED or grown < frames * 200


def test_a_share_of_connections_is_free_again_when_they_end(small: Daemon) -> None:
    with small as daemon:
        for _ in range(5):
            held = [dial(daemon.runtime_dir, protocol.RELAY_SOCKET) for _ in range(SHARE)]
            for each in held:
                each.close()
        with honest(daemon, tokens=20):
            pass
        assert not daemon.log.find("relay connections refused")


def test_an_end_by_want_of_descriptors_loses_nothing(tmp_path: Path, history: History) -> None:
    """With less descriptors than asked for, which is logged at the start, a flood can still end clawd in libzmq."""
    history.put("s", *[b"%d" % number for number in range(100)])
    daemon = Daemon(tmp_path / "run", "--spool-bytes", "4M", prefix=("prlimit", "--nofile=64"))
    try:
        daemon.start()
        assert daemon.log.find("too few descriptors")
        with Producer("p", daemon.runtime_dir) as producer:
            stream = producer.open("s")
            for put in history.written["s"].puts:
                stream.write(put.data)
            until(lambda: daemon.streams()["s"]["tokens"] == 100, "all to be committed")
            pidfd = os.pidfd_open(daemon.pid)
            with flood(daemon.runtime_dir / protocol.RELAY_SOCKET, 200):
                ended, _, _ = select.select([pidfd], [], [], 2)
            os.close(pidfd)
            print("it ended" if ended else "it lives")
            if ended:
                daemon.kill()  # only to bury it
                daemon.start()
            with Consumer(daemon.runtime_dir) as consumer:
                history.reading("s").follow(consumer.attach("s", wait=0), limit=100)
        history.check()
    finally:
        daemon.discard()
