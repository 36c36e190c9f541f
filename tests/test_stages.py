# SPDX-License-Identifier: Apache-2.0
"""A delay in each of the stages within clawd, one after the other: that stage shows it, and no other does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from clawd.consumer import Consumer
from clawd.ctl.trace_stages import Trace
from clawd.page import process_state
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon, until
from tests.test_trace import no_tracer, rows

pytestmark = pytest.mark.plain
DELAY_S = 0.2
SLOW_US = DELAY_S / 2 * 1e6


def in_the_engine(_daemon: Daemon, producer: Producer, consumer: Consumer) -> None:
    stream = producer.open("s", requested_ns=time.monotonic_ns() - int(DELAY_S * 1e9), pace="off")
    reading = consumer.attach("s")
    stream.write("x")
    assert reading.read(PATIENCE_S)


def before_the_commit(daemon: Daemon, producer: Producer, consumer: Consumer) -> None:
    stream, reading = producer.open("s", pace="off"), consumer.attach("s")
    stream.write("x")
    assert reading.read(PATIENCE_S)
    until(lambda: daemon.total("sent") == 1, "it is accounted")
    os.kill(daemon.pid, signal.SIGSTOP)
    until(lambda: process_state(daemon.pid) == "T", "it stands still")
    stream.write("y")
    time.sleep(DELAY_S)
    os.kill(daemon.pid, signal.SIGCONT)
    assert reading.read(PATIENCE_S)


def at_the_pacer(_daemon: Daemon, producer: Producer, consumer: Consumer) -> None:
    stream, reading = producer.open("s", pace="steady"), consumer.attach("s")
    for _ in range(25):  # of which eight go at once and the others 45 a second, or 80
        stream.write("x")
    for _ in range(25):
        assert reading.read(PATIENCE_S)


def at_a_reader_without_credit(_daemon: Daemon, producer: Producer, consumer: Consumer) -> None:
    stream, reading = producer.open("s", pace="off"), consumer.attach("s", credit=1)
    stream.write("x")
    assert reading.read(PATIENCE_S)
    stream.write("y")  # what was read is paid for when more is asked for
    time.sleep(DELAY_S)
    assert reading.read(PATIENCE_S)


@pytest.mark.parametrize(
    ("delay", "stage", "klass"),
    [
        (in_the_engine, "written", "first"),
        (before_the_commit, "committed", "rest"),
        (at_the_pacer, "released", "rest"),
        (at_a_reader_without_credit, "sent", "rest"),
    ],
)
def test_a_delay_shows_in_its_stage_alone(
    daemon: Daemon, delay: Callable[[Daemon, Producer, Consumer], None], stage: str, klass: str
) -> None:
    with (
        Producer("p", daemon.runtime_dir) as producer,
        Consumer(daemon.runtime_dir) as consumer,
        Trace(daemon.runtime_dir, ("writes",), no_tracer) as trace,
    ):
        delay(daemon, producer, consumer)
        until(lambda: daemon.total("sent") == daemon.total("tokens"), "all are accounted")
        found = rows(trace.collect())
    slow = {place for place, row in found.items() if row["count"] and row["max_us"] >= SLOW_US}
    in_all = {("relay", klass)} if stage != "written" else set()
    assert slow == {(stage, klass)} | in_all
