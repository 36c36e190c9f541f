# SPDX-License-Identifier: Apache-2.0
"""`clawctl top`: on a terminal, into a pipe, as JSON; what it shows, and that it gives the terminal back."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawd.consumer import Consumer
from clawd.ctl import top
from clawd.page import Page
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon, until
from tests.test_ctl import busy, clawctl, command, hostile_producer

pytestmark = pytest.mark.plain

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


def test_rates_are_those_of_the_interval(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("busy")
        producer.open("calm")
        for _ in range(1000):  # before the first look: in no rate
            stream.write("x")
        until(lambda: daemon.total("tokens") == 1000, "the tokens")
        # A look takes its figures one after another: the last one comes when nothing changes any more
        run = subprocess.Popen(
            command(daemon.runtime_dir, "top", "--json", "--interval", "0.5", "--count", "5"), stdout=subprocess.PIPE
        )
        assert run.stdout
        first = json.loads(run.stdout.readline())
        assert (first["tokens_in_per_second"], first["tokens_out_per_second"]) == (0, 0)
        assert first["latency"]["written_to_sent"] == {"count": 0, "p50_ns": None, "p99_ns": None}
        reading = consumer.attach("busy", wait=PATIENCE_S)
        for _ in range(50):
            stream.write("y")
        for _ in range(1050):
            reading.read(PATIENCE_S)
        values = [json.loads(line) for line in run.stdout]
        run.stdout.close()
        assert (run.wait(PATIENCE_S), len(values)) == (0, 4)
        came = sum(value["tokens_in_per_second"] * value["interval_ns"] for value in values) / 1e9
        went = sum(value["tokens_out_per_second"] * value["interval_ns"] for value in values) / 1e9
        assert (round(came), round(went)) == (50, 1050)
        assert sum(value["latency"]["written_to_committed"]["count"] for value in values) == 50
        assert values[-1]["streams_live"] == 2
        rates = [row for value in values for row in value["streams"] if row["name"] == "busy"]
        assert max(row["tokens_per_second"] for row in rates) > 0
        assert rates[-1]["readers"] == 1
        [row] = values[-1]["producers"]
        assert (row["name"], row["streams"], row["used_bytes"]) == ("p", 2, 0)
        [row] = values[-1]["consumers"]
        assert row["pid"] == os.getpid()
        assert {value["version"] for value in values} == {1}


def test_the_busiest_stream_is_first_and_rows_are_limited(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        streams = [producer.open(name) for name in ("a", "b", "c")]
        run = subprocess.Popen(
            command(daemon.runtime_dir, "top", "--json", "--interval", "0.5", "--rows", "2"), stdout=subprocess.PIPE
        )
        assert run.stdout
        run.stdout.readline()
        for number, stream in enumerate(streams):
            for _ in range(10 * number):
                stream.write("x")
        while not (value := json.loads(run.stdout.readline()))["tokens_in_per_second"]:
            pass
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 0
        rates = [row["tokens_per_second"] for row in value["streams"]]
        assert len(rates) == 2
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("columns", [80, 20])
def test_a_snapshot_is_no_wider_than_the_terminal(daemon: Daemon, columns: int) -> None:
    with busy(daemon):
        run = clawctl(daemon.runtime_dir, "top", "--count", "2", "--interval", "0.1", columns=columns)
        assert (run.returncode, run.stderr) == (0, "")
        assert "\x1b" not in run.stdout, "a pipe is no terminal"
        assert run.stdout.count("clawd 0.") == 2
        assert [line for line in run.stdout.splitlines() if len(line) > columns] == []
        if columns == 80:
            assert {"STREAM", "PRODUCER", "CLIENT"} <= {line.partition(" ")[0] for line in run.stdout.splitlines()}


def test_a_stopped_daemon_is_told_and_degraded(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        run = clawctl(daemon.runtime_dir, "top", "--count", "1", "--interval", "0.1")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert run.returncode == 4
    assert "DOES NOT ANSWER" in run.stdout
    assert run.stderr.count("\n") == 1


def test_without_a_daemon_it_is_one_line_and_exit_3(tmp_path: Path) -> None:
    run = clawctl(tmp_path / "nowhere", "top")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (3, "", 1)


def test_a_daemon_that_goes_ends_it(victim: Daemon) -> None:
    run = subprocess.Popen(
        command(victim.runtime_dir, "top", "--interval", "0.1", "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout
    run.stdout.readline()
    victim.kill()
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, errors.count("\n")) == (3, 1)


def test_a_closed_pipe_is_no_traceback(daemon: Daemon) -> None:
    run = subprocess.Popen(
        command(daemon.runtime_dir, "top", "--interval", "0.1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout
    assert run.stderr
    run.stdout.readline()
    run.stdout.close()
    assert (run.wait(PATIENCE_S), run.stderr.read()) == (1, b"")
    run.stderr.close()


@pytest.mark.parametrize("flag", [("--interval", "0"), ("--interval", "nan"), ("--interval", "x"), ("--count", "0"), ("--rows", "-1")])  # fmt: skip # noqa: E501
def test_a_bad_figure_is_one_line_and_exit_2(tmp_path: Path, flag: tuple[str, str]) -> None:
    run = clawctl(tmp_path, "top", "=".join(flag))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)


def test_it_asks_the_daemon_nothing(daemon: Daemon) -> None:
    with busy(daemon):
        (daemon.runtime_dir / "control.sock").rename(daemon.runtime_dir / "aside")
        try:
            assert clawctl(daemon.runtime_dir, "top", "--count", "2", "--interval", "0.1").returncode == 0
        finally:
            (daemon.runtime_dir / "aside").rename(daemon.runtime_dir / "control.sock")


def test_another_clawd_in_between_gives_no_rates(daemon: Daemon) -> None:
    with Page(daemon.runtime_dir) as page:
        before = top.look(page, page.life())
        now = top.look(page, page.life())
    assert top.between(before, now, 1)["tokens_in_per_second"] == 0
    now.status["pid"] += 1
    value = top.between(before, now, 1)
    assert (value["tokens_in_per_second"], value["interval_ns"]) == (None, None)


# --- on a terminal ---


class Screen:
    """`clawctl top` on a terminal of its own."""

    def __init__(self, daemon: Daemon, *words: str, rows: int = 24, columns: int = 80) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (rows, columns))
        self.modes = termios.tcgetattr(self.slave)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command(daemon.runtime_dir, "top", "--interval", "0.1", *words),
            stdin=self.slave, stdout=self.slave, stderr=subprocess.PIPE, process_group=0,
            env={**environment, "TERM": "xterm"},
        )  # fmt: skip
        self.shown = b""

    def read(self) -> bool:
        if not select.select([self.master], [], [], 0.05)[0]:
            return False
        self.shown += os.read(self.master, 1 << 16)
        return True

    def await_text(self, text: bytes) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            self.read()

    def end(self) -> tuple[int, bytes]:
        """Exit code and stderr; the terminal must be as it was."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it did not end"
            self.read()
        while self.read():
            pass
        assert self.shown.rindex(LEAVE) > self.shown.rindex(ENTER)
        assert b"\x1b[?25h" in self.shown, "the cursor is back"
        assert termios.tcgetattr(self.slave) == self.modes
        assert self.process.stderr
        return self.process.returncode, self.process.stderr.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr
        self.process.stderr.close()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screen(daemon: Daemon) -> Iterator[Any]:
    made: list[Screen] = []

    def make(*words: str, **size: int) -> Screen:
        made.append(Screen(daemon, *words, **size))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x04"])
def test_a_key_ends_it_and_the_terminal_is_as_before(screen: Any, key: bytes) -> None:
    shown = screen()
    shown.await_text(b"tokens/s   0 in, 0 out")
    os.write(shown.master, b"x" + key)
    assert shown.end() == (0, b"")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_and_the_terminal_is_as_before(screen: Any, number: int, code: int) -> None:
    shown = screen()
    shown.await_text(b"tokens/s   0 in")
    shown.process.send_signal(number)
    assert shown.end() == (code, b"")


def test_it_repaints_within_the_screen(daemon: Daemon, screen: Any) -> None:
    with hostile_producer(daemon.runtime_dir) as producer:
        for number in range(40):
            producer.open(f"stream-{number:02}")
        until(lambda: len(daemon.streams()) == 40, "the streams")
        shown = screen("--count", "3", rows=17, columns=60)
        assert shown.end() == (0, b"")
    paints = shown.shown.split(b"\x1b[H")[2:]
    assert len(paints) == 4
    for paint in paints:
        lines = paint.replace(LEAVE, b"").replace(b"\x1b[?25h", b"").split(b"\x1b[K")[:-1]
        assert len(lines) <= 17
        assert [line for line in lines if len(line.strip()) > 60] == []
        assert b"vil" in paint, "the producer has its line beside so many streams"


def test_a_stop_gives_the_terminal_back_until_it_goes_on(screen: Any) -> None:
    shown = screen()
    shown.await_text(b"tokens/s   0 in")
    shown.process.send_signal(signal.SIGTSTP)
    shown.await_text(LEAVE)
    until(lambda: Path(f"/proc/{shown.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "the stop")
    shown.shown = b""
    shown.process.send_signal(signal.SIGCONT)
    shown.await_text(b"tokens/s   0 in")
    os.write(shown.master, b"q")
    assert shown.end() == (0, b"")
