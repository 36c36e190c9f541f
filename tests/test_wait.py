# SPDX-License-Identifier: Apache-2.0
"""Sleeping: woken by data and by watched descriptors, on time for timers, and not kept awake for nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from rig import Rig

SECOND = 1_000_000_000


def test_a_signal_wakes_and_its_ring_has_no_tag() -> None:
    with Rig() as rig:
        ring = rig.ring()
        os.eventfd_write(ring.event_fd, 1)
        assert rig.core.wait(30 * SECOND) == []
        assert rig.core.refresh_totals().sleeps == 1


def test_data_that_came_before_the_sleep_is_seen_without_a_signal() -> None:
    with Rig() as rig:
        ring = rig.ring()
        ring.open(0, "s")
        before = time.monotonic()
        rig.core.wait(30 * SECOND)
        assert time.monotonic() - before < 10
        totals = rig.core.refresh_totals()
        assert (totals.sleeps, totals.rescued) == (0, 0)


def test_need_wake_is_odd_only_while_asleep_and_never_the_same_twice() -> None:
    with Rig() as rig:
        ring = rig.ring()
        seen = [int(ring.ctl.need_wake)]
        for _ in range(3):
            os.eventfd_write(ring.event_fd, 1)
            rig.core.wait(SECOND)
            seen.append(int(ring.ctl.need_wake))
        assert seen == [0, 2, 4, 6]


def test_a_watched_descriptor_is_told_by_its_tag_until_it_is_read() -> None:
    with Rig() as rig:
        fd = os.eventfd(1, os.EFD_NONBLOCK)
        rig.core.watch(fd, 77)
        assert rig.core.wait(SECOND) == [77]
        assert rig.core.wait(SECOND) == [77]
        os.eventfd_read(fd)
        assert rig.core.wait(0) == []
        rig.core.unwatch(fd)
        os.close(fd)


def test_data_that_nobody_signals_is_counted_as_a_lost_wake_up() -> None:
    with Rig() as rig:
        ring = rig.ring()
        # published between the last look and the sleep, as a broken producer would: the timeout finds it
        with rig.asleep(ring):
            ring.open(0, "s")
        assert rig.core.refresh_totals().rescued == 1


def test_a_ring_that_wakes_for_nothing_is_not_listened_to_for_a_while() -> None:
    with Rig() as rig:
        ring, other = rig.ring(), rig.ring()
        wakes = 0
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            os.eventfd_write(ring.event_fd, 1)
            before = time.monotonic_ns()
            rig.core.wait(1_000_000)
            wakes += time.monotonic_ns() - before < 900_000
        totals = rig.core.refresh_totals()
        assert totals.storms >= 3
        assert wakes < 60, "a storm of 0.3 s woke us more often than its pauses allow"
        # what it brings now is still found, and its neighbour is heard at once
        os.eventfd_write(other.event_fd, 1)
        before = time.monotonic()
        rig.core.wait(30 * SECOND)
        assert time.monotonic() - before < 5
        ring.open(0, "s")
        rig.turn()
        assert rig.core.refresh_totals().opened == 1
        assert rig.core.refresh_totals().rescued == 0


def test_a_producer_that_brings_data_with_each_signal_is_never_muted() -> None:
    with Rig() as rig:
        ring = rig.ring()
        ring.open(0, "s")
        for _ in range(100):
            ring.write(0, b"x")
            rig.turn()  # taken before the signal comes, as after another ring's wake-up
            os.eventfd_write(ring.event_fd, 1)
            rig.core.wait(SECOND)
        assert rig.core.refresh_totals().storms == 0


@pytest.mark.parametrize("wait_ns", [1, 20_000_000])
def test_an_attach_that_waits_in_vain_wakes_in_time(wait_ns: int) -> None:
    with Rig() as rig:
        client = rig.core.connect()
        deadline = time.monotonic_ns() + wait_ns
        rig.core.attach(client, 1, b"s", credit=1, deadline_ns=deadline)
        rig.turn()
        rig.core.wait(30 * SECOND)
        rig.turn()
        assert rig.core.unmet() == [(client, 1)]
        assert time.monotonic_ns() - deadline < 5 * SECOND


def test_a_stream_past_its_time_wakes_within_the_next_second() -> None:
    with Rig({"keep_ns": 1000}) as rig:
        ring = rig.ring()
        ring.open(0, "s")
        ring.close(0)
        rig.turn()
        before = time.monotonic()
        rig.core.wait(30 * SECOND)
        assert time.monotonic() - before < 10
        rig.turn()
        assert rig.core.refresh_totals().streams_ended == 0


def test_a_tag_is_never_taken_for_a_ring() -> None:
    with Rig() as rig:
        rig.ring()
        fd = os.eventfd(1, os.EFD_NONBLOCK)
        rig.core.watch(fd, 0xFFFF_FFFF)
        assert rig.core.wait(0) == [0xFFFF_FFFF]
        os.close(fd)


def test_next_turns_at_once_when_no_descriptor_is_readable() -> None:
    with Rig() as rig:
        ring, fd = rig.ring(), os.eventfd(1, os.EFD_NONBLOCK)
        rig.core.watch(fd, 7)
        ring.open(0, "s")
        assert list(rig.core.next(SECOND)) == [7]
        assert rig.core.refresh_totals().opened == 0, "the descriptor's news come first"
        os.eventfd_read(fd)
        assert list(rig.core.next(SECOND)) == []
        assert rig.core.refresh_totals().opened == 1
        os.close(fd)


def test_a_signal_in_the_sleep_leaves_nothing_to_send_again() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        rig.turn()
        rig.core.attach(client, 1, b"s", credit=1000)
        rig.core.next(0)
        assert rig.core.outcome.frame_count == 1
        earlier = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            rig.core.next(30 * SECOND)
        finally:
            signal.signal(signal.SIGALRM, earlier)
        assert rig.core.outcome.frame_count == 0
