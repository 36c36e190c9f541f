# SPDX-License-Identifier: Apache-2.0
"""Streams that are not for everybody: before and after they open, over a restart, and what others cannot do to them."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd.consumer import Consumer
from clawd.core import lib
from clawd.errors import AttachError
from clawd.producer import Producer
from rig import Rig
from tests.daemon import PATIENCE_S, Daemon, until
from tests.test_access import Site
from tests.test_ctl import let_in
from tests.test_roles import CONSUME, GROUP, as_user


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, "--pace", "off")
    made.other = made.key("other")
    with made.daemon:
        yield made


def denied(reading: object) -> None:
    with pytest.raises(AttachError, match="not for this client") as caught:
        reading.read(PATIENCE_S)
    assert caught.value.code == "denied"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stream_reaches_those_it_is_for_and_nobody_else(site: Site, when: str) -> None:
    with (
        site.consumer(site.right) as consumer,
        site.consumer(site.other) as other,
        Producer("p", site.daemon.runtime_dir) as producer,
    ):
        if when == "before":
            readings = [each.attach("s") for each in (consumer, other)]
            site.daemon.await_total("attachments", 2)
        stream = producer.open("s", readers=["key:right", "nosuchuser"], meta={"model": "m"})
        stream.write("secret")
        if when == "after":
            readings = [each.attach("s") for each in (consumer, other)]
        token = readings[0].read(PATIENCE_S)
        assert token is not None
        assert (token.data, readings[0].meta) == (b"secret", {"model": "m"})
        denied(readings[1])
        assert not readings[1]._inbox.pending
        site.daemon.await_total("attachments", 1)
        with Consumer(site.daemon.runtime_dir) as own:  # clawd's own user
            assert own.attach("s").read(PATIENCE_S)
        stream.close()
        denied(other.attach("s"))


def test_who_may_not_read_it_cannot_have_it_cancelled(site: Site) -> None:
    """Not by a cancel before it opened, not by leaving, not by a grace that began before it opened."""
    with site.consumer(site.other) as other, Producer("p", site.daemon.runtime_dir) as producer:
        left = other.attach("s", on_gone="cancel", grace=0.01)
        site.daemon.await_total("attachments", 1)
        left.close()
        site.daemon.await_total("attachments", 0)
        waits = other.attach("s", on_gone="cancel", grace=0.01)
        cancels = other.attach("s")
        cancels.cancel()
        site.daemon.await_total("attachments", 2)
        stream = producer.open("s", readers=["key:right"])
        for reading in (waits, cancels):
            denied(reading)
        with site.consumer(site.right) as consumer:
            reading = consumer.attach("s")
            for number in range(20):
                stream.write(f"{number} ")
                assert reading.read(PATIENCE_S)
            assert not stream.cancelled
            reading.cancel()
            until(lambda: stream.cancelled, "the cancel of one whom it is for")


def test_a_grace_that_runs_as_it_opens_ends_with_that(site: Site) -> None:
    with site.consumer(site.other) as other, Producer("p", site.daemon.runtime_dir) as producer:
        left = other.attach("s", on_gone="cancel", grace=0.5)
        site.daemon.await_total("attachments", 1)
        left.close()
        site.daemon.await_total("attachments", 0)
        stream = producer.open("s", readers=["key:right"])
        over = time.monotonic() + 1
        until(lambda: time.monotonic() > over, "a time in which it would have been cancelled")
        stream.write("x")
        site.daemon.await_total("tokens", 1)
        assert not stream.cancelled


def test_the_core_takes_no_cancel_before_there_is_a_verdict() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        assert rig.core.attach(client, 1, b"s", credit=1 << 20, deadline_ns=1 << 62) == 1
        name, readers = b"s", b"key:right"
        ring.put(
            lib.CLAW_OPEN, 1, struct.pack("<QHHBBH", 0, len(name), 0, 0, len(readers), 0) + name + readers, count=0
        )
        ring.write(1, b"secret")
        assert rig.turn() == []
        assert rig.core.unproven() == [(client, 1, "key:right")]
        rig.core.cancel(client, 1)
        assert ring.stopped(1)[1] == 0
        assert rig.core.attach(client, 2, b"s", credit=1 << 20) < 0, "nobody found it to be a reader"
        rig.core.admit(client, 1, True)
        assert ring.stopped(1)[1] == lib.CLAW_STOPPED_CANCELLED, "it counts now"


def test_a_cancel_before_the_opening_counts_when_it_comes_from_a_reader(site: Site) -> None:
    with site.consumer(site.right) as consumer, Producer("p", site.daemon.runtime_dir) as producer:
        reading = consumer.attach("s")
        reading.cancel()
        site.daemon.await_total("attachments", 1)
        stream = producer.open("s", readers="key:right")
        until(lambda: stream.cancelled, "the cancel")


def test_a_restart_forgets_nobody(site: Site) -> None:
    with Producer("p", site.daemon.runtime_dir) as producer:
        stream = producer.open("s", readers=["key:right"])
        stream.write("secret")
        site.daemon.await_total("tokens", 1)
        site.daemon.kill()
        site.daemon.start()
        with site.consumer(site.right) as consumer, site.consumer(site.other) as other:
            token = consumer.attach("s").read(PATIENCE_S)
            assert token is not None
            assert token.data == b"secret"
            denied(other.attach("s"))
        stream.close(block=PATIENCE_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_group_of_this_host_may_be_meant(tmp_path: Path) -> None:
    with Daemon(tmp_path / "run", "--pace", "off") as daemon, Producer("p", daemon.runtime_dir) as producer:
        let_in(daemon)
        for name in ("control.sock", "relay.sock"):
            (daemon.runtime_dir / name).chmod(0o666)
        stream = producer.open("s", readers=[f"@{GROUP}", "key:right"])
        stream.write("secret")
        daemon.await_total("tokens", 1)
        assert "not for this client" in as_user(CONSUME, daemon.runtime_dir)
        assert as_user(CONSUME, daemon.runtime_dir, GROUP) == "yes"
        nobody = producer.open("t", readers=[])
        nobody.write("secret")
        daemon.await_total("tokens", 2)
        code = CONSUME.replace("'s'", "'t'")
        assert "not for this client" in as_user(code, daemon.runtime_dir, GROUP)


@pytest.mark.parametrize("readers", [["a b"], ["key:"], [""], ["@"], [7], ["x" * 70], [f"user{n}" for n in range(60)]])
def test_what_is_no_reader_is_refused_at_once(site: Site, readers: list[str]) -> None:
    with Producer("p", site.daemon.runtime_dir) as producer, pytest.raises(ValueError, match="readers"):
        producer.open("s", readers=readers)
