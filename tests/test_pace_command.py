# SPDX-License-Identifier: Apache-2.0
"""`clawctl pace` on a clawd that runs, and what pacing is for: even gaps on a host that is busy."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from clawd.consumer import Consumer, Reading
from clawd.producer import Producer
from tests.bench.pacing import Scene, heaps, measure
from tests.daemon import PATIENCE_S, Daemon, until
from tests.test_ctl import clawctl

pytestmark = pytest.mark.plain
MANY = 400
"""More than a steady stream lets through at once, and than it makes in the time a test takes."""


@pytest.fixture
def steady(start: Callable[..., Daemon]) -> Daemon:
    return start("--pace", "steady")


def told_pace(daemon: Daemon, stream: str) -> str:
    rows = json.loads(clawctl(daemon.runtime_dir, "streams", "--json").stdout)["streams"]
    return str(next(row["pace"] for row in rows if row["name"] == stream))


def in_effect(daemon: Daemon) -> tuple[str, str]:
    """The mode, and who set it."""
    rows = json.loads(clawctl(daemon.runtime_dir, "config", "show", "--json").stdout)["settings"]
    return next((row["value"], row["origin"]) for row in rows if row["key"] == "pace")


def all_of(reading: Reading) -> None:
    for _ in range(MANY):
        assert reading.read(PATIENCE_S)


def test_what_is_held_goes_at_once_when_a_stream_is_let_go(steady: Daemon) -> None:
    with Producer("p", steady.runtime_dir) as producer, Consumer(steady.runtime_dir) as consumer:
        one, other = producer.open("one"), producer.open("other")
        readings = consumer.attach("one"), consumer.attach("other")
        for stream in (one, other):
            for _ in range(MANY):
                stream.write("x")
        until(lambda: steady.total("tokens") == 2 * MANY, "all of it committed")
        assert steady.total("sent") < 2 * MANY, "it is steady"

        would = clawctl(steady.runtime_dir, "pace", "off", "one", "--dry-run")
        assert (would.returncode, would.stdout) == (0, "would pace off: stream one\n")
        assert told_pace(steady, "one") == "steady"

        done = clawctl(steady.runtime_dir, "pace", "off", "one")
        assert (done.returncode, done.stdout) == (0, "paced off: stream one\n")
        all_of(readings[0])
        assert steady.total("sent") < 2 * MANY, "the other one is steady still"
        assert (told_pace(steady, "one"), told_pace(steady, "other")) == ("off", "steady")

        done = clawctl(steady.runtime_dir, "pace", "off", "--json")
        assert json.loads(done.stdout) == {"version": 1, "mode": "off", "stream": None, "dry_run": False}
        all_of(readings[1])

        assert clawctl(steady.runtime_dir, "pace", "smooth").returncode == 0
        until(lambda: told_pace(steady, "other") == "smooth", "though nothing of it is held")
        assert in_effect(steady) == ("smooth", "clawctl pace")
        assert clawctl(steady.runtime_dir, "reload").returncode == 0
        assert in_effect(steady) == ("steady", "--pace")
        assert clawctl(steady.runtime_dir, "pace", "smooth").returncode == 0
        assert clawctl(steady.runtime_dir, "pace", "default", "one").returncode == 0
        one.write("y")
        until(lambda: told_pace(steady, "one") == "smooth", "what all have")


def test_a_stream_that_has_not_opened_cannot_be_paced(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer:
        consumer.attach("later")
        until(lambda: daemon.total("streams_awaited") == 1, "it is awaited")
        for words in (("off", "later"), ("off", "later", "--dry-run")):
            refused = clawctl(daemon.runtime_dir, "pace", *words)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert 'no stream "later" is open or kept' in refused.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("off", "nobody"), 1, "nobody"),
        (("off", "nobody", "--dry-run"), 1, "nobody"),
        (("fast",), 2, "fast"),
        (("default",), 1, "name it, or run clawctl reload"),
        (("off", ""), 1, "no name of a stream"),
        (("off", "x" * 300), 1, "no name of a stream"),
    ],
)
def test_what_cannot_be_paced_is_one_line(daemon: Daemon, words: tuple[str, ...], code: int, says: str) -> None:
    refused = clawctl(daemon.runtime_dir, "pace", *words)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


def test_gaps_are_even_beside_processes_that_take_all_the_cpu() -> None:
    """An engine that sends every tenth token, with a loop on each processor."""
    scene = Scene(lambda _luck, seconds: heaps(seconds, 10, 200), busy=True)
    sigma_ms = {}
    for mode in ("off", "smooth"):
        found = measure(scene, mode, 3, 1)
        assert found["lost"] == 0
        sigma_ms[mode] = found["gap_sigma_ms"]
    print(f"sigma of delivered gaps, ms: {sigma_ms}")
    assert sigma_ms["smooth"] < sigma_ms["off"] / 2
