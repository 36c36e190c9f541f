# SPDX-License-Identifier: Apache-2.0
"""Boosts by request to a real clawd-kernel, and what either's death leaves. The slices are a directory."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd import protocol
from clawd.kernel.boost import WRITES_PER_S
from tests.daemon import until

pytestmark = pytest.mark.plain
RELAY, BACKGROUND = "clawd.slice", "clawd_background.slice"
REST = {RELAY: 400, BACKGROUND: 25}
FIRST = {RELAY: 3200, BACKGROUND: 1}


class Place:
    """Slices, a state directory, and clawd-kernels that work there."""

    def __init__(self, directory: Path) -> None:
        self.mount, self.state, self.directory = directory / "mount", directory / "state", directory / "kernel"
        for name, weight in REST.items():
            (self.mount / name).mkdir(parents=True)
            (self.mount / name / "cpu.weight").write_text(f"{weight}\n")
        self.started: list[subprocess.Popen[str]] = []

    def command(self, *more: str) -> list[str]:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return [sys.executable, "-m", "clawd.kernel", "--dir", str(self.directory), "--user", user, "--cgroup",
                str(self.mount / RELAY), "--state-dir", str(self.state), "--config", os.devnull, *more]  # fmt: skip

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self.command(), stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        assert process.stderr
        for line in process.stderr:
            if " ready " in line:
                return process
        raise AssertionError("it did not start")

    def dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(str(self.directory / protocol.KERNEL_SOCKET))
        return connection

    def weights(self) -> dict[str, int]:
        # a file that is written anew is empty for a moment, which the kernel's are not
        return {name: int((self.mount / name / "cpu.weight").read_text() or 0) for name in REST}

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(20)
            assert process.stderr
            assert "Traceback" not in process.stderr.read()
            process.stderr.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.end()


def ask(connection: socket.socket, request: protocol.Message) -> protocol.Boosting:
    connection.send(protocol.encode(request))
    return protocol.decode(connection.recv(protocol.ANSWER_MAX), (protocol.Boosting,), protocol.ANSWER_MAX)


def test_a_boost_by_request_and_its_end_by_request(place: Place) -> None:
    process = place.start()
    with place.dial() as connection, place.dial() as other:
        told = ask(connection, protocol.SetBoost(2, 2000, waiting=7))
        assert (told.state, told.weights, told.resting) == ("first", FIRST, REST)
        assert told.asked == [[os.getpid(), os.geteuid(), 2, 7, 0]]
        assert ask(other, protocol.Boosts()).state == "first"
        assert ask(connection, protocol.SetBoost(0, 0)).state == "rest"
        assert place.weights() == REST
    process.terminate()
    assert process.wait(20) == 0
    assert sorted(path.name for path in place.state.iterdir()) == ["boost.lock"]


def test_who_goes_silent_or_away_holds_nothing_up(place: Place) -> None:
    place.start()
    with place.dial() as connection:
        started = time.monotonic()
        ask(connection, protocol.SetBoost(2, 300))
        until(lambda: place.weights() == REST, "the lease's end")
        assert time.monotonic() - started >= 0.3
        ask(connection, protocol.SetBoost(2, 2000))
        assert place.weights() == FIRST
    until(lambda: place.weights() == REST, "the end of a connection")


def test_a_helper_that_is_told_to_stop_puts_back(place: Place) -> None:
    process = place.start()
    with place.dial() as connection:
        ask(connection, protocol.SetBoost(2, 2000))
        process.terminate()
        assert process.wait(20) == 0
    assert place.weights() == REST


@pytest.mark.parametrize("by", ["the next start", "--relax"])
def test_a_helper_that_was_killed(place: Place, by: str) -> None:
    process = place.start()
    with place.dial() as connection:
        ask(connection, protocol.SetBoost(2, 2000))
        process.kill()
        process.wait(20)
    assert place.weights() == FIRST
    (place.mount / BACKGROUND / "cpu.weight").write_text("50\n")
    if by == "--relax":
        run = subprocess.run(place.command("--relax"), capture_output=True, text=True, timeout=30, check=False)
        assert (run.returncode, "weight put back" in run.stderr) == (0, True), run.stderr
    else:
        place.start()
    assert place.weights() == {RELAY: 400, BACKGROUND: 50}, "never over another's change"


def test_a_relax_beside_a_helper_at_work_leaves_it_alone(place: Place) -> None:
    place.start()
    with place.dial() as connection:
        ask(connection, protocol.SetBoost(2, 2000))
        run = subprocess.run(place.command("--relax"), capture_output=True, text=True, timeout=30, check=False)
        assert "another clawd-kernel flips weights" in run.stderr
        assert place.weights() == FIRST


def test_a_thousand_asks_are_few_writes(place: Place) -> None:
    place.start()
    with place.dial() as connection:
        started = time.monotonic()
        for number in range(1000):
            told = ask(connection, protocol.SetBoost(2 * (number % 2), 2000, waiting=number))
        passed = time.monotonic() - started
        assert told.writes <= WRITES_PER_S * (1 + passed), f"{told.writes} in {passed:.1f} s"
        assert told.limited > 0
        ask(connection, protocol.SetBoost(0, 0))
        assert place.weights() == REST


@pytest.mark.parametrize(
    "packet",
    [
        b'{"op":"set_boost","level":3,"lease_ms":1}',
        b'{"op":"set_boost","level":-1,"lease_ms":1}',
        b'{"op":"set_boost","level":2,"lease_ms":2001}',
        b'{"op":"set_boost","level":2,"lease_ms":true}',
        b'{"op":"set_boost","level":2,"lease_ms":1,"slice":"system.slice"}',
        b'{"op":"set_boost","level":2,"lease_ms":1,"pressure":4}',
    ],
)
def test_what_is_out_of_bounds_is_refused_and_changes_nothing(place: Place, packet: bytes) -> None:
    place.start()
    with place.dial() as connection:
        connection.send(packet)
        answer = protocol.decode(connection.recv(4096), (protocol.Failure,))
        assert answer.code == "bad_request"
    assert place.weights() == REST
