# SPDX-License-Identifier: Apache-2.0
"""The control socket with real processes: producers and clients come and go, limits hold, names stay names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from clawd import protocol
from clawd.consumer import Consumer
from clawd.core import ffi
from clawd.errors import AttachRefused, ControlError, RingLost
from clawd.producer import Producer
from tests.daemon import SHM, Daemon, until
from tests.load import Writer
from tests.rogue.producer import Rogue, dial
from tests.test_ctl import told

Start = Callable[..., Daemon]


def clawctl(daemon_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clawd.ctl.main", *arguments, "--runtime-dir", str(daemon_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_limit_of_producers_refuses_the_next_until_one_leaves(start: Start) -> None:
    daemon = start("--max-producers", "2", "--spool-bytes", "4M")
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(f"p{number}", daemon.runtime_dir)) for number in range(2)]
        with pytest.raises(AttachRefused, match="2 producers are attached already") as caught:
            Producer("p2", daemon.runtime_dir)
        assert caught.value.code == "limit"
        producers[0].close()
        daemon.log.wait("producer detached", "producer=p0")
        with Producer("p2", daemon.runtime_dir) as third, Consumer(daemon.runtime_dir) as consumer:
            third.open("s").write("x")
            assert consumer.attach("s").read().data == b"x"


def test_a_ring_has_the_bytes_its_producer_asked_for_or_the_settings(start: Start) -> None:
    daemon = start("--buffer-size", "32k", "--spool-bytes", "4M")
    with Producer("a", daemon.runtime_dir) as default, Producer("b", daemon.runtime_dir, 1 << 20) as asked:
        assert (default.buffer_size, asked.buffer_size) == (32768, 1 << 20)
        sizes = sorted((SHM / name).stat().st_size for name in daemon.objects())
        ctl = ffi.sizeof("struct claw_ctl")
        assert sizes == sorted([4 << 20, ctl, ctl, 4096 + 32768, 4096 + (1 << 20)])


def test_a_killed_producers_ring_is_drained_and_its_memory_goes(daemon: Daemon) -> None:
    with Writer(daemon.runtime_dir) as writer:
        daemon.log.wait("producer attached")
        assert (daemon.status()["producers"], len(daemon.objects())) == (1, 3)
        writer.kill()
        daemon.log.wait("producer detached", "reason=left")
        assert (daemon.status()["producers"], len(daemon.objects())) == (0, 1)


def test_more_connections_than_clients_and_producers_may_have_are_refused(start: Start) -> None:
    daemon = start("--max-clients", "2", "--max-producers", "1", "--spool-bytes", "4M")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(dial(daemon.runtime_dir))
        over = stack.enter_context(dial(daemon.runtime_dir))
        over.send(protocol.encode(protocol.Hello(protocol.VERSION, "consumer")))
        assert json.loads(over.recv(4096))["code"] == "limit"
        assert over.recv(4096) == b""
        for _ in range(200):  # silent ones beyond that are closed without a word
            stack.enter_context(dial(daemon.runtime_dir))

    def is_answered() -> bool:
        with contextlib.suppress(ControlError):
            return bool(daemon.status())
        return False

    until(is_answered, "a connection to ask on")


def test_a_producer_beyond_the_connections_is_refused_by_name(start: Start) -> None:
    daemon = start("--max-clients", "1", "--max-producers", "1", "--spool-bytes", "4M")
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(dial(daemon.runtime_dir))
        with pytest.raises(AttachRefused, match="too many connections") as caught:
            Producer("late", daemon.runtime_dir)
        assert caught.value.code == "limit"


def test_connections_that_come_and_go_leave_nothing(daemon: Daemon) -> None:
    fds = Path(f"/proc/{daemon.pid}/fd")
    assert daemon.status()["clients"] == 0
    before = len(list(fds.iterdir()))
    for number in range(2000):
        with dial(daemon.runtime_dir) as control:
            if number % 2:
                control.send(protocol.encode(protocol.Hello(protocol.VERSION, "observer")))
        if number % 100 == 0:
            daemon.status()  # answered after those before it were accepted: never more at once than may be
    until(lambda: daemon.status()["clients"] == 0, "all clients to be gone")
    until(lambda: len(list(fds.iterdir())) <= before + 1, "their descriptors to be closed")


def test_rings_that_come_and_go_leave_nothing(daemon: Daemon) -> None:
    fds = Path(f"/proc/{daemon.pid}/fd")
    assert daemon.status()["producers"] == 0
    before, maps = len(list(fds.iterdir())), len(Path(f"/proc/{daemon.pid}/maps").read_text().splitlines())
    for number in range(100):
        with Producer("p", daemon.runtime_dir, 4096) as producer:
            producer.open(f"s{number}").close()
    for _ in range(20):
        with Rogue(daemon.runtime_dir) as rogue:
            rogue.publish(8)
            rogue.await_end()
    until(lambda: daemon.status()["producers"] == 0, "all rings to be gone")
    assert len(daemon.objects()) == 1
    until(lambda: len(list(fds.iterdir())) <= before + 1, "their descriptors to be closed")
    assert len(Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()) <= maps + 10


def test_a_producer_whose_ring_was_quarantined_may_attach_anew(daemon: Daemon) -> None:
    with Rogue(daemon.runtime_dir) as rogue:
        rogue.publish(8)
        rogue.await_end()
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        producer.open("s").write("x")
        assert consumer.attach("s").read().data == b"x"


def test_a_producer_learns_that_its_ring_was_let_go(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        assert told(daemon.runtime_dir, "stop", "--discard")["stopped"]
        assert daemon.process.wait(10) == 0
        daemon.start()
        with pytest.raises(RingLost, match="let go"):
            stream.write("x")


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31mred", 'quo"te', "名字🦞", "x" * 63, "a=b c"])
def test_a_name_stays_one_field_of_one_line(daemon: Daemon, name: str) -> None:
    # The SDK refuses control characters; a program of its own may send them
    with patch("clawd.ring.encoded", lambda _what, value, _longest: value.encode()):
        producer = Producer(name, daemon.runtime_dir)
    with producer:
        line = daemon.log.wait("producer attached")
        assert line.isprintable()
        assert line.endswith(f" pid={os.getpid()} uid={os.getuid()} ring_bytes=131072")
    daemon.log.wait("producer detached")
    assert len(daemon.log.find("producer attached")) == 1


def test_clawctl_shows_what_is_carried(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("answer")
        stream.write("one")
        reading = consumer.attach("answer")
        assert reading.read() is not None
        run = clawctl(daemon.runtime_dir, "status", "--json")
        assert (run.returncode, run.stderr) == (0, "")
        status = json.loads(run.stdout)
        assert (status["pid"], status["producers"], status["clients"]) == (daemon.pid, 1, 1)
        assert {name: status["totals"][name] for name in ("tokens", "sent", "streams_live", "attachments")} == {
            "tokens": 1,
            "sent": 1,
            "streams_live": 1,
            "attachments": 1,
        }
        rows = json.loads(clawctl(daemon.runtime_dir, "streams", "--json").stdout)["streams"]
        assert [(row["name"], row["state"], row["tokens"]) for row in rows] == [("answer", "live", 1)]
        assert "answer" in clawctl(daemon.runtime_dir, "streams").stdout
        assert f"pid {daemon.pid}" in clawctl(daemon.runtime_dir).stdout


def test_many_streams_with_the_longest_names_are_all_listed(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        for number in range(170):
            producer.open(f"{number}-{'n' * 250}"[:255])
        daemon.await_total("streams_live", 170)
        assert len(daemon.streams()) == 170


def test_clawctl_without_a_daemon_ends_with_3(tmp_path: Path) -> None:
    run = clawctl(tmp_path, "status")
    assert (run.returncode, run.stdout) == (3, "")
    assert run.stderr.count("\n") == 1
    assert "cannot find clawd" in run.stderr
