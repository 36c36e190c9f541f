# SPDX-License-Identifier: Apache-2.0
"""The daemon's life with real processes: start, stop, being killed, being one of several, doing nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from clawd.consumer import Consumer
from clawd.errors import AttachRefused
from clawd.page import Page
from clawd.producer import Producer
from tests import load
from tests.daemon import SANITIZED, SHM, Daemon
from tests.history import History, Put

SMALL = ("--spool-bytes", "4M")
TINY_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=6m tmpfs /dev/shm && exec "$@"', "sh")


def can_mount() -> bool:
    return subprocess.run([*TINY_SHM, "true"], capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small /dev/shm (root, unshare)")


def test_sigterm_ends_it_within_two_seconds_and_delivers_what_is_in_flight(
    daemon: Daemon, history: History, seed: int
) -> None:
    names, count = load.names(4), 100
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        streams = {name: producer.open(name) for name in names}
        readings = {name: consumer.attach(name) for name in names}
        daemon.await_total("attachments", 4)
        status = daemon.status()
        # It can do nothing before all of it is in the ring and the signal is there
        daemon.process.send_signal(signal.SIGSTOP)
        load.write_all(producer, streams, count, seed)
        daemon.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        daemon.process.send_signal(signal.SIGCONT)
        daemon.await_stop(status)
        assert time.monotonic() - begun < 2
        for name, reading in readings.items():
            history.put(name, *(Put(item.data, item.urgent, item.count) for item in load.tokens(seed, name, count)))
            history.reading(name).follow(reading, limit=count)
    history.check()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_sleeps_ends_it(daemon: Daemon, number: signal.Signals) -> None:
    status = daemon.status()
    daemon.process.send_signal(number)
    daemon.await_stop(status)
    assert daemon.log.find("stopped")


def test_a_second_one_is_refused_and_the_first_goes_on(daemon: Daemon) -> None:
    second = Daemon(daemon.runtime_dir, *SMALL)
    line = second.refused()
    assert line == (
        f'clawd: another clawd (pid {daemon.pid}) serves "{daemon.runtime_dir}"; stop it, or use --runtime-dir'
    )
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").write("x")
        assert consumer.attach("s").read().data == b"x"


def test_of_many_started_at_once_exactly_one_serves(tmp_path: Path) -> None:
    daemons = [Daemon(tmp_path / "run", *SMALL) for _ in range(6 if SANITIZED else 20)]
    try:
        for daemon in daemons:
            daemon.launch()
        served = [daemon for daemon in daemons if daemon.await_ready()]
        assert len(served) == 1
        for daemon in daemons:
            if daemon is not served[0]:
                assert "another clawd" in daemon.await_refusal()
        served[0].stop()
    finally:
        for daemon in daemons:
            daemon.discard()


def test_a_client_goes_on_with_new_streams_when_it_was_killed_and_started_again(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer:
        with Producer("p", daemon.runtime_dir) as producer:
            producer.open("s").write("x")
            assert consumer.attach("s").read().data == b"x"
        daemon.kill()
        waiting = consumer.attach("t")
        daemon.start()
        with Producer("p", daemon.runtime_dir) as producer:
            producer.open("t").write("y")
            assert waiting.read().data == b"y"


REFUSALS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "is too long": (lambda base: base / ("x" * 120), "is too long; use one of at most 94 bytes"),
    "is a file": (lambda base: touch(base / "file"), "cannot use runtime directory"),
    "cannot be made": (lambda base: Path("/proc/clawd"), "cannot use runtime directory"),
    "has a lock that is a link": (lambda base: link(base / "linked"), "cannot use runtime directory"),
}


def touch(path: Path) -> Path:
    path.touch()
    return path


def link(directory: Path) -> Path:
    directory.mkdir()
    (directory / "lock").symlink_to(directory / "elsewhere")
    return directory


@pytest.mark.parametrize("case", REFUSALS)
def test_a_runtime_directory_is_refused_that(tmp_path: Path, case: str) -> None:
    make, expected = REFUSALS[case]
    directory = make(tmp_path)
    line = Daemon(directory, *SMALL).refused()
    assert line.startswith("clawd: ")
    assert expected in line
    assert str(directory) in line


@needs_mount
def test_a_spool_that_is_too_much_for_the_host_is_refused(tmp_path: Path) -> None:
    line = Daemon(tmp_path / "run", *SMALL, prefix=TINY_SHM).refused()
    assert "a spool of 4M is more than a quarter of the shared memory that is free, 6M" in line


@needs_mount
def test_a_ring_that_is_too_much_for_the_host_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    sizes = ("--spool-bytes", "1M", "--stream-bytes", "1M", "--max-streams", "64")  # their rows take memory too
    daemon = Daemon(tmp_path / "run", *sizes, prefix=TINY_SHM)
    try:
        daemon.start()
        shm = Path(f"/proc/{daemon.pid}/root{SHM}")
        with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
            for _ in range(3):
                with pytest.raises(AttachRefused) as caught:
                    Producer("large", daemon.runtime_dir, 1 << 26)
                assert caught.value.code == "no_space"
            producer.open("s").write("x")
            assert consumer.attach("s").read().data == b"x"
            assert len(list(shm.iterdir())) == 4, "figures, spool, DATA and CTL"
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(10) == 0
    finally:
        daemon.discard()
    daemon.check_log()


def switches(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        rows = dict(row.split(":\t", 1) for row in (task / "status").read_text().splitlines())
        total += int(rows["voluntary_ctxt_switches"])
    return total


def test_an_idle_daemon_sleeps(daemon: Daemon) -> None:
    with ExitStack() as stack:
        producer = stack.enter_context(Producer("p", daemon.runtime_dir))
        consumer = stack.enter_context(Consumer(daemon.runtime_dir))
        stream = producer.open("s")
        stream.write("x")
        reading = consumer.attach("s")
        assert reading.read().data == b"x"
        daemon.await_total("attachments", 1)
        page = stack.enter_context(Page(daemon.runtime_dir))  # which asks the daemon nothing
        before, sleeps = switches(daemon.pid), page.totals().sleeps
        time.sleep(3)
        assert switches(daemon.pid) - before <= 3 + 2, "more than a wake-up a second"
        assert page.totals().sleeps - sleeps <= 3 + 2


def test_python_m_clawd_says_that_it_is_ready_on_stderr_alone(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "run", *SMALL)
    with daemon:
        daemon.log.wait(f"ready runtime_dir={daemon.runtime_dir} instance={daemon.instance} pid={daemon.pid}")
        mode = (daemon.runtime_dir.stat().st_mode & 0o777, (daemon.runtime_dir / "control.sock").stat().st_mode & 0o777)
        assert mode == (0o750, 0o660)
    assert sys.executable in daemon.command


def test_an_end_that_is_no_engines_wish_is_logged_with_stream_producer_and_reason(daemon: Daemon) -> None:
    with Producer("llama-0", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        for name in ("well", "ill", "lost", "unwanted"):
            stream = producer.open(name)
            stream.write(b"x")
            if name == "unwanted":
                reading = consumer.attach(name)
                reading.cancel()
                list(reading)
                assert reading.end_reason == "cancelled"
            elif name != "lost":
                stream.close("error:no memory" if name == "ill" else "stop")
                assert len(list(consumer.attach(name))) == 1
    daemon.log.wait("stream ended", "stream=ill", "producer=llama-0", 'reason="error:no memory"')
    # a cancel comes between two turns
    daemon.log.wait("stream ended", "stream=unwanted", "producer=llama-0", "reason=cancelled")
    daemon.log.wait("stream ended", "stream=lost", "producer=llama-0", "reason=producer_lost")
    assert not [line for line in daemon.log.lines if "stream=well" in line], "nobody's trouble"
