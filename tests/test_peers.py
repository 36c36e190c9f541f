# SPDX-License-Identifier: Apache-2.0
"""Producers and clients as they live and die: killed, forked, stopped, at exit, in storms and floods, each while other
streams complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from clawd import protocol
from clawd.consumer import Consumer
from clawd.errors import AttachError, HostError, RingFull, StreamRefused
from clawd.producer import Producer, Stream
from clawd.server import memory
from tests.daemon import SHM, Daemon, until
from tests.history import History
from tests.rogue.producer import Rogue, dial

Start = Callable[..., Daemon]
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user or to unshare")

# A producer process that a test commands by stdin: one line a step, one answer a step
PRODUCER = """
import os, signal, sys, threading
from clawd.producer import Producer, Stream
from clawd.errors import ForkedError
producer = Producer("peer", sys.argv[1])
stream = producer.open(sys.argv[2])
stream.write("one"); stream.write("two")
"""


def peer(daemon: Daemon, name: str, code: str, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", PRODUCER + code, str(daemon.runtime_dir), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_lost_after(consumer: Consumer, name: str, tokens: list[bytes]) -> None:
    reading = consumer.attach(name)
    assert [token.data for token in reading] == tokens
    assert reading.end_reason == "producer_lost"


WAIT = "print('there', flush=True); sys.stdin.readline()\n"


def test_a_killed_producer_that_nobody_reaps_is_noticed(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, peer(daemon, "s", WAIT) as process:
        assert process.stdout
        process.stdout.readline()
        process.kill()  # a zombie until this block ends
        is_lost_after(consumer, "s", [b"one", b"two"])


FORKED = """
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    for call in (lambda: stream.write("x"), lambda: producer.open("y"), lambda: stream.close()):
        try:
            call()
        except ForkedError:
            print("refused", flush=True)
    print(f"child {os.getpid()}", flush=True)
    os.read(read, 1)  # lives on, with all that a fork inherits, until its parent's end closes the pipe
    signal.pause()
stream.write("three")
sys.stdin.readline()
"""


def test_a_forked_child_is_refused_and_hides_neither_its_parents_death_nor_its_lock(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, peer(daemon, "s", FORKED) as process:
        assert process.stdout
        lines = [process.stdout.readline().strip() for _ in range(4)]
        assert lines[:3] == ["refused"] * 3
        child = int(lines[3].split()[1])
        try:
            largest = max((SHM / name for name in daemon.objects()), key=lambda path: path.stat().st_size)
            data = [path for path in map(SHM.joinpath, daemon.objects()) if path != largest]
            with open(max(data, key=lambda path: path.stat().st_size), "rb") as file:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                process.kill()
                process.wait()
                is_lost_after(consumer, "s", [b"one", b"two", b"three"])
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel dropped it, though the child lives
            assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, signal.SIGKILL)


@root
def test_a_producer_that_is_process_1_of_its_namespace_is_noticed_when_it_dies(daemon: Daemon) -> None:
    unshare = ("unshare", "--pid", "--fork", "--kill-child")
    code = "assert os.getpid() == 1\n" + WAIT
    with Consumer(daemon.runtime_dir) as consumer, peer(daemon, "s", code, *unshare) as process:
        assert process.stdout
        assert process.stdout.readline() == "there\n"
        process.kill()
        is_lost_after(consumer, "s", [b"one", b"two"])


@pytest.mark.parametrize("how", ["exit", "exception", "thread", "collected"])
def test_an_interpreter_that_ends_with_open_streams_ends_quietly(daemon: Daemon, how: str) -> None:
    code = {
        "exit": "sys.exit(0)\n",
        "exception": "sys.excepthook = lambda *_: None\nraise RuntimeError\n",
        # waits for room in a full ring while the interpreter goes away
        "thread": "os.kill(int(sys.stdin.readline()), signal.SIGSTOP)\n"
        "def fill():\n    while True: stream.write('x' * 1000, block=60)\n"
        "threading.Thread(target=fill, daemon=True).start()\nsys.stdin.readline()\n",
        "collected": "del stream, producer\n",
    }[how]
    with Consumer(daemon.runtime_dir) as consumer, peer(daemon, "s", code) as process:
        reading = consumer.attach("s")
        if how == "thread":
            assert process.stdin
            process.stdin.write(f"{daemon.pid}\n\n")
            process.stdin.flush()
        _, errors = process.communicate(timeout=40)
        os.kill(daemon.pid, signal.SIGCONT)
        assert errors == ""
        assert process.returncode == (1 if how == "exception" else 0)
        assert [token.data for token in reading][:2] == [b"one", b"two"]
        assert reading.end_reason == "producer_lost"


def fill(stream: Stream, text: Callable[[int], bytes]) -> list[bytes]:
    """Write until the ring is full; what went in."""
    written: list[bytes] = []
    while True:
        try:
            stream.write(text(len(written)))
        except RingFull:
            return written
        written.append(text(len(written)))


def test_a_full_ring_blocks_no_longer_than_asked_and_a_gap_covers_what_was_dropped(
    daemon: Daemon, history: History
) -> None:
    with ExitStack() as stack:
        consumer = stack.enter_context(Consumer(daemon.runtime_dir))
        producer = stack.enter_context(Producer("p", daemon.runtime_dir, 4096, overflow_bytes=4096))
        stream = producer.open("s")
        reading = consumer.attach("s")
        stream.write(b"first")
        history.put("s", b"first")
        assert reading.read() is not None
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            written = fill(stream, lambda number: b"%d" % number)
            history.put("s", *written, b"dropped by fill", b"more")
            before = time.monotonic()
            with pytest.raises(RingFull, match="is clawd running"):
                stream.write(b"more", block=0.2)
            assert 0.2 <= time.monotonic() - before < 10
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        stream.write(b"after", block=30)
        history.put("s", b"after")
        stream.close(block=30)
        history.end("s", "stop")
        got = history.reading("s").follow(consumer.attach("s"))
        history.check(gaps=True)
        assert [(gap.last - gap.first + 1, gap.reason) for gap in got.gaps()] == [(2, "ring_full")]
        assert len(written) > 100


def test_a_writer_that_waits_for_room_is_let_go_when_clawd_dies(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir, 4096, overflow_bytes=0) as producer:
        stream = producer.open("s")
        os.kill(daemon.pid, signal.SIGSTOP)
        fill(stream, lambda _: bytes(500))
        killer = threading.Timer(0.1, daemon.kill)
        killer.start()
        before = time.monotonic()
        with pytest.raises(RingFull):
            stream.write(bytes(500), block=0.5)
        assert time.monotonic() - before < 10
        killer.join()
    daemon.start()


def test_threads_share_a_producer_and_every_stream_stays_whole(daemon: Daemon, history: History) -> None:
    texts = {f"t{number}": [b"%d:%d" % (number, i) for i in range(2000)] for number in range(8)}
    for name, puts in texts.items():
        history.put(name, *puts)
        history.end(name, "stop")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir, 16384) as producer:

        def write(name: str) -> None:
            stream = producer.open(name, block=30)
            for text in texts[name]:
                stream.write(text, block=30)
            stream.close(block=30)

        threads = [threading.Thread(target=write, args=(name,)) for name in texts]
        for thread in threads:
            thread.start()
        for name in texts:
            history.reading(name).follow(consumer.attach(name), batches=True)
        for thread in threads:
            thread.join()
    history.check()


def test_a_storm_of_wake_ups_is_muted_and_slows_nobody(daemon: Daemon, history: History, dice: random.Random) -> None:
    history.put("s", *[b"%d" % number for number in range(3000)])
    history.end("s", "stop")
    with (
        Rogue(daemon.runtime_dir) as rogue,
        Consumer(daemon.runtime_dir) as consumer,
        Producer("p", daemon.runtime_dir) as producer,
    ):
        over = threading.Event()

        def storm() -> None:
            while not over.is_set():
                os.eventfd_write(rogue.event_fd, 1)

        thread = threading.Thread(target=storm)
        thread.start()
        try:
            until(lambda: daemon.total("storms") > 0, "the storm to be noticed")
            stream = producer.open("s")
            for put in history.written["s"].puts:
                stream.write(put.data, block=30)
            stream.close(block=30)
            history.reading("s").follow(consumer.attach("s"))
        finally:
            over.set()
            thread.join()
        rogue.open(b"late")  # what it brings after all is found
        rogue.publish()
        until(lambda: daemon.total("opened") == 2, "the stormer's own stream")
    history.check()


def test_a_flood_of_opens_is_refused_by_name_and_costs_nobody_else(start: Start, history: History) -> None:
    daemon = start("--max-streams", "100", "--spool-bytes", "4M")
    history.put("honest", b"a", b"b")
    history.end("honest", "stop")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as honest:
        stream = honest.open("honest")
        with Producer("flood", daemon.runtime_dir) as flood:
            streams = [flood.open(f"f{number}", block=30) for number in range(3000)]
            until(lambda: daemon.total("refused") == 3000 - 99, "all but 99 to be refused")
            refused = [each.refused for each in streams]
            assert refused.count("limit") == 3000 - 99
            with pytest.raises(StreamRefused, match="too many streams"):
                streams[-1].write("x")
            stream.write(b"a")
            stream.write(b"b")
            stream.close()
            history.reading("honest").follow(consumer.attach("honest"))
    history.check()


def test_a_flood_of_attaches_is_refused_by_name_and_costs_nobody_else(start: Start, history: History) -> None:
    daemon = start("--max-attachments", "50", "--max-streams", "60", "--spool-bytes", "4M")
    history.put("honest", b"a")
    history.end("honest", "stop")
    with (
        Consumer(daemon.runtime_dir) as flood,
        Consumer(daemon.runtime_dir) as consumer,
        Producer("p", daemon.runtime_dir) as producer,
    ):
        reading = consumer.attach("honest")
        until(lambda: daemon.total("attachments") == 1, "the honest attach")
        readings = [flood.attach(f"nobody-{number}", wait=60) for number in range(2000)]
        codes = []
        for each in readings[60:]:
            with pytest.raises(AttachError) as caught:
                each.read(timeout=30)
            codes.append(caught.value.code)
        assert set(codes) == {"limit"}
        stream = producer.open("honest")
        stream.write(b"a")
        stream.close()
        history.reading("honest").follow(reading)
    history.check()


def test_a_name_that_is_too_long_is_refused_everywhere(daemon: Daemon) -> None:
    name = "é" * 128  # 256 bytes
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        with pytest.raises(ValueError, match="1 to 255 bytes"):
            producer.open(name)
        with pytest.raises(Exception, match='bad value for "stream"'):
            consumer.attach(name)
        producer.open(name[:-1] + "x").write("fits")
        assert consumer.attach(name[:-1] + "x").read().text == "fits"  # type: ignore[union-attr]
    with dial(daemon.runtime_dir) as control:
        control.send(protocol.encode(protocol.Hello(protocol.VERSION, "consumer", "x" * 65)))
        assert json.loads(control.recv(4096))["code"] == "bad_request"


@root
def test_another_user_cannot_reach_the_sockets(daemon: Daemon) -> None:
    for path in (daemon.runtime_dir.parent, *daemon.runtime_dir.parent.parents):
        if path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)  # pytest's directories: let them not be what refuses
    daemon.runtime_dir.chmod(0o755)
    code = (
        "import os, socket, sys\nnobody = (65534,) * 3\n"
        "os.setresgid(*nobody); os.setgroups([]); os.setresuid(*nobody)\n"
        "for name, kind in (('control.sock', socket.SOCK_SEQPACKET), ('relay.sock', socket.SOCK_STREAM)):\n"
        "    try: socket.socket(socket.AF_UNIX, kind).connect(sys.argv[1] + '/' + name); print('in')\n"
        "    except PermissionError: print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(daemon.runtime_dir)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["refused", "refused"]


@pytest.mark.parametrize("kind", ["file", "symlink", "hardlink", "fifo"])
def test_a_squatted_name_is_refused_and_its_target_untouched(kind: str, tmp_path: Path) -> None:
    instance = f"test{os.getpid():x}"
    place = SHM / f"clawd-{instance}-squatted"
    target = tmp_path / "target" if kind != "hardlink" else SHM / f"{instance}-target"
    target.write_text("mine")
    try:
        if kind == "file":
            place.write_text("mine")
        elif kind == "symlink":
            place.symlink_to(target)
        elif kind == "hardlink":
            place.hardlink_to(target)
        else:
            os.mkfifo(place)
        with pytest.raises(HostError, match="cannot make shared memory"):
            memory.create(f"/{memory.prefix(instance)}squatted", 4096)
        assert target.read_text() == "mine"
        assert place.is_fifo() if kind == "fifo" else place.read_text() == "mine"
    finally:
        place.unlink(missing_ok=True)
        target.unlink(missing_ok=True)


@pytest.mark.parametrize("case", ["lock is a link", "everybody may write", "of another user"])
def test_a_runtime_directory_that_others_decide_on_is_refused(tmp_path: Path, case: str) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    target = tmp_path / "target"
    if case == "lock is a link":
        target.write_text("mine")
        (directory / "lock").symlink_to(target)
    elif case == "everybody may write":
        directory.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(directory, 65534, 65534)
    else:
        pytest.skip("needs root to give a directory away")
    line = Daemon(directory).refused()
    assert "runtime directory" in line
    assert not target.exists() or target.read_text() == "mine"
