# SPDX-License-Identifier: Apache-2.0
"""A real clawd and a real clawd-kernel: from an OPEN to a first token, a death of either. Slices are a directory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clawd.consumer import Consumer
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon, until
from tests.test_helper_boost import FIRST, REST, Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(tmp_path)
    monkeypatch.setenv("CLAWD_KERNEL_DIR", str(made.directory))
    yield made
    made.end()


def status(daemon: Daemon, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "clawd.ctl.main", *words, "--json", "--runtime-dir", str(daemon.runtime_dir)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode == 0, run.stderr
    value = json.loads(run.stdout.splitlines()[-1])
    assert isinstance(value, dict)
    return value


def test_from_open_to_first_token_and_shown(place: Place, start: Callable[..., Daemon]) -> None:
    place.start()
    daemon = start("--boost", "on")
    with Producer("engine", daemon.runtime_dir) as producer, Consumer(runtime_dir=daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        reading = consumer.attach("s")
        until(lambda: place.weights() == FIRST, "the boost")
        value = status(daemon, "status")
        boosting = value["kernel"]["boosting"]
        if boosting["state"] == "first":  # it is half a second, and this host may be slow
            assert (boosting["resting"], boosting["asked"][0][:3]) == (REST, [daemon.pid, 0, 2])
        assert value["totals"]["boosts"] == 1
        stream.write("Hello")
        assert reading.read(PATIENCE_S).text == "Hello"
        until(lambda: place.weights() == REST, "the end of the boost")
        stream.close("stop")
    value = status(daemon, "status")
    assert (value["urgency"]["level"], value["urgency"]["reason"]) == ("rest", None)
    assert value["slices"]["reason"] or value["slices"]["threads_by_ns"]
    writes = value["kernel"]["boosting"]["writes"]
    assert writes == 4
    top = status(daemon, "top", "--count", "1", "--interval", "0.2")
    assert (top["first_waiting"], top["boost"], top["boosts"]) == (0, "rest", 1)
    assert status(daemon, "status")["kernel"]["boosting"]["writes"] == writes, "nothing waits, nothing is written"


def test_a_clawd_that_is_killed_in_mid_boost(place: Place, start: Callable[..., Daemon]) -> None:
    place.start()
    daemon = start("--boost", "on")
    with Producer("engine", daemon.runtime_dir) as producer:
        producer.open("s")
        until(lambda: place.weights() == FIRST, "the boost")
        daemon.kill()
        until(lambda: place.weights() == REST, "the end of the boost")
        daemon.start()


def test_a_helper_that_is_killed_in_mid_boost_and_comes_again(place: Place, start: Callable[..., Daemon]) -> None:
    helper = place.start()
    daemon = start("--boost", "on")
    with Producer("engine", daemon.runtime_dir) as producer:
        producer.open("s")
        until(lambda: place.weights() == FIRST, "the boost")
        helper.kill()
        helper.wait(20)
        stream = producer.open("t")
        stream.write("the relay works on")
        place.start()
        opened = 0

        def boosted_again() -> bool:
            nonlocal opened
            if time.monotonic_ns() - opened > 400_000_000:  # one is waited for all the time
                opened = time.monotonic_ns()
                producer.open(f"again-{opened}")
            return place.weights() == FIRST

        until(boosted_again, "clawd to find the new one")
        until(lambda: place.weights() == REST, "the end of all boosts")


def test_without_a_helper_nothing_is_lost_and_it_says_why(place: Place, start: Callable[..., Daemon]) -> None:
    daemon = start("--boost", "on")
    with Producer("engine", daemon.runtime_dir) as producer, Consumer(runtime_dir=daemon.runtime_dir) as consumer:
        stream, reading = producer.open("s"), consumer.attach("s")
        # Before the first token is written: one that is sent in the turn of its open was not waited for
        until(lambda: status(daemon, "status")["urgency"]["reason"] == "clawd-kernel is not running", "the reason")
        stream.write("Hello")
        assert reading.read(PATIENCE_S).text == "Hello"
    assert place.weights() == REST
    run = subprocess.run(
        [sys.executable, "-m", "clawd.ctl.main", "status", "--runtime-dir", str(daemon.runtime_dir)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "weights are not flipped: clawd-kernel is not running" in " ".join(run.stdout.split())


def test_a_thousand_opens_are_few_writes(place: Place, start: Callable[..., Daemon]) -> None:
    place.start()
    daemon = start("--boost", "on")
    started = time.monotonic()
    with Producer("engine", daemon.runtime_dir) as producer:
        for number in range(1000):
            producer.open(f"s{number}").close("stop")
        until(lambda: daemon.total("opened") == 1000, "the streams")
        until(lambda: place.weights() == REST, "the end of the boosts")
    passed = time.monotonic() - started
    told = status(daemon, "status")["kernel"]["boosting"]
    assert told["writes"] <= 20 * (1 + passed)


def test_off_by_default(place: Place, start: Callable[..., Daemon]) -> None:
    place.start()
    daemon = start()
    with Producer("engine", daemon.runtime_dir) as producer:
        producer.open("s")
        until(lambda: daemon.total("opened") == 1, "the stream")
        value = status(daemon, "status")
    assert value["urgency"]["reason"] == "[kernel] boost = off"
    assert value["kernel"]["boosting"]["writes"] == 0
