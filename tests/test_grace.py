# SPDX-License-Identifier: Apache-2.0
"""Streams that nobody reads any more: kept, or cancelled when their grace is over. The clock is the test's."""

from __future__ import annotations

import random

import pytest

from clawd.core import ffi, lib
from rig import Rig, RingWriter

MS = 10**6
DOOMED_MS = 30_000
"""How long a name whose time was over before it opened is remembered."""


class Timed(Rig):
    """A core whose time the test says, in ms."""

    now_ms = 1000

    def at(self, ms: int) -> list[int]:
        """Turn at that time. Returns the events' kinds."""
        self.now_ms = ms
        lib.claw_turn(self.core._core, ms * MS)
        return [kind for kind, _, _, _ in self.core.events()]

    def read(self, client: int, id: int, name: bytes, grace_ms: int, *, observes: bool = False) -> int:
        buffer = ffi.from_buffer(name)
        attach = {"name": buffer, "name_len": len(name), "id": id, "after": -1, "credit": 1 << 20,
                  "observes": observes, "grace_ms": grace_ms, "deadline_ns": 1 << 62}  # fmt: skip
        made = ffi.new("struct claw_attach *", attach)
        return int(lib.claw_attach_stream(self.core._core, client, made, self.now_ms * MS))

    def detach(self, client: int, id: int) -> None:
        assert lib.claw_detach(self.core._core, client, id, self.now_ms * MS) == 1

    def disconnect(self, client: int) -> None:
        assert lib.claw_disconnect(self.core._core, client, self.now_ms * MS) == 0

    def awaited(self) -> int:
        return int(self.core.refresh_totals().streams_awaited)


def opened(rig: Timed, name: str = "s", handle: int = 0) -> RingWriter:
    ring = rig.writers[0] if rig.writers else rig.ring()
    ring.open(handle, name)
    rig.at(rig.now_ms)
    return ring


def is_cancelled(ring: RingWriter, handle: int = 0) -> bool:
    return ring.stopped(handle)[1] == int(lib.CLAW_STOPPED_CANCELLED)


@pytest.mark.parametrize("how", ["detach", "disconnect"])
def test_a_stream_is_cancelled_when_its_last_reader_stayed_away_for_its_grace(how: str) -> None:
    with Timed() as rig:
        ring, client = opened(rig), rig.core.connect()
        assert rig.read(client, 1, b"s", 500) == 0
        rig.at(2000)
        rig.detach(client, 1) if how == "detach" else rig.disconnect(client)
        assert rig.at(2499) == []
        assert not is_cancelled(ring)
        assert lib.CLAW_EVENT_UNREAD in rig.at(2500)
        assert is_cancelled(ring)
        assert bytes(rig.core.stream_row(0).reason)[:9] == b"cancelled"


def test_the_core_wakes_up_for_it_by_itself() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        rig.turn()
        rig.core.attach(client, 1, b"s", credit=1000, grace_ms=50)
        rig.core.detach(client, 1)
        while not is_cancelled(ring):
            assert rig.core.next(30 * 10**9) == ()


def test_who_keeps_keeps() -> None:
    with Timed() as rig:
        ring, client = opened(rig), rig.core.connect()
        rig.read(client, 1, b"s", 0)
        rig.detach(client, 1)
        rig.at(10**9)
        assert not is_cancelled(ring)


def test_a_reader_that_comes_in_time_stops_it_and_the_last_to_leave_decides() -> None:
    with Timed() as rig:
        ring, client = opened(rig), rig.core.connect()
        rig.read(client, 1, b"s", 500)
        rig.detach(client, 1)
        rig.at(1400)
        rig.read(client, 2, b"s", 0)
        rig.read(client, 3, b"s", 700)
        rig.at(9000)
        assert not is_cancelled(ring)
        rig.detach(client, 3)
        rig.at(9800)
        rig.detach(client, 2)  # it said keep
        rig.at(100_000)
        assert not is_cancelled(ring)
        rig.read(client, 4, b"s", 100)
        rig.detach(client, 4)
        rig.at(100_100)
        assert is_cancelled(ring)


def test_observers_do_not_count() -> None:
    with Timed() as rig:
        ring, client, watcher = opened(rig), rig.core.connect(), rig.core.connect()
        rig.read(watcher, 1, b"s", 0, observes=True)
        rig.read(client, 1, b"s", 500)
        rig.detach(client, 1)
        rig.read(watcher, 2, b"s", 0, observes=True)
        rig.at(1499)
        assert not is_cancelled(ring)
        rig.disconnect(watcher)  # nor does their leaving
        rig.at(1500)
        assert is_cancelled(ring)


def test_an_attach_said_again_is_no_leaving() -> None:
    with Timed() as rig:
        ring, client = opened(rig), rig.core.connect()
        for _ in range(3):
            rig.read(client, 1, b"s", 500)
        rig.at(60_000)
        assert not is_cancelled(ring)


def test_a_reader_that_got_the_end_starts_nothing() -> None:
    with Timed() as rig:
        ring, client = opened(rig), rig.core.connect()
        rig.read(client, 1, b"s", 500)
        ring.close(0)
        rig.at(1100)
        rig.at(1200)
        assert lib.CLAW_EVENT_UNREAD not in rig.at(50_000)
        assert bytes(rig.core.stream_row(0).reason)[:4] == b"stop"


def test_a_stream_that_opens_within_the_grace_has_the_rest_of_it() -> None:
    with Timed() as rig:
        client = rig.core.connect()
        assert rig.read(client, 1, b"s", 500) == 1
        rig.detach(client, 1)
        rig.at(1300)
        ring = opened(rig)
        rig.at(1499)
        assert not is_cancelled(ring)
        rig.at(1500)
        assert is_cancelled(ring)


def test_a_stream_that_opens_after_the_grace_is_cancelled_at_once() -> None:
    with Timed() as rig:
        client = rig.core.connect()
        rig.read(client, 1, b"s", 500)
        rig.detach(client, 1)
        rig.at(1500)
        rig.at(1500 + DOOMED_MS - 1)
        ring = opened(rig)
        assert is_cancelled(ring)


def test_a_name_that_nobody_came_for_is_free_again() -> None:
    with Timed() as rig:
        client = rig.core.connect()
        rig.read(client, 1, b"s", 500)
        rig.detach(client, 1)
        rig.at(1500)
        assert rig.awaited() == 1
        rig.at(1500 + DOOMED_MS)
        assert rig.awaited() == 0
        ring = opened(rig)
        assert not is_cancelled(ring)


def test_a_reader_that_comes_back_saves_a_stream_that_has_not_opened() -> None:
    with Timed() as rig:
        client = rig.core.connect()
        rig.read(client, 1, b"s", 500)
        rig.detach(client, 1)
        rig.at(2000)
        rig.read(client, 2, b"s", 500)
        ring = opened(rig)
        rig.at(100_000)
        assert not is_cancelled(ring)


def test_a_wait_in_vain_is_a_leaving() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        rig.core.attach(client, 1, b"s", credit=1000, grace_ms=1, deadline_ns=1)
        while not rig.core.unmet():
            rig.core.next(30 * 10**9)
        rig.core.next(30 * 10**9)  # at the end of its grace
        ring.open(0, "s")
        rig.turn()
        assert is_cancelled(ring)


def test_names_left_behind_take_a_share_of_the_table_at_most() -> None:
    with Timed({"max_streams": 64}) as rig:
        for number in range(500):
            client = rig.core.connect()
            assert rig.read(client, 1, b"name-%d" % number, 3_600_000) == 1
            rig.disconnect(client)
        assert rig.awaited() == 64 // 8
        client = rig.core.connect()
        assert rig.read(client, 1, b"honest", 0) == 1


def test_many_timers_end_each_at_its_time(dice: random.Random) -> None:
    """Against a list: readers come, leave and come back, streams end and open, in random order."""
    names = [b"s%d" % number for number in range(40)]
    with Timed({"max_streams": 64, "max_attachments": 64, "keep_ns": 10**18}) as rig:
        client, ring = rig.core.connect(), rig.ring()
        for handle, name in enumerate(names):
            ring.open(handle, name)
        rig.at(rig.now_ms)
        due: dict[int, int] = {}
        read: dict[int, int] = {}
        over: set[int] = set()
        for _ in range(3000):
            number = dice.randrange(len(names))
            if number in over:
                continue
            if number in read:
                rig.detach(client, number + 1)
                due[number] = rig.now_ms + read.pop(number)
            elif dice.random() < 0.9:
                read[number] = dice.randrange(1, 4000)
                rig.read(client, number + 1, names[number], read[number])
                due.pop(number, None)
            elif dice.random() < 0.1:
                ring.close(number)
                over.add(number)
                due.pop(number, None)
            rig.at(rig.now_ms + dice.randrange(60))
            for each in [each for each, at in due.items() if at <= rig.now_ms]:
                over.add(each)
                assert is_cancelled(ring, each)
                del due[each]
            assert not any(is_cancelled(ring, each) for each in due)
            assert not any(is_cancelled(ring, each) for each in read)
        assert over
