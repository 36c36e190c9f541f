# SPDX-License-Identifier: Apache-2.0
"""Rings that an earlier core left: drained again without taking anything twice, their streams, handles and wake-ups."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from clawd.core import lib
from rig import CREDIT, SECOND, Rig, read, rewind, row, told, write_some


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


# --- a ring drained again ---


def test_records_that_come_again_are_not_taken_again(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    write_some(ring, 0, 0, 5)
    ring.put(lib.CLAW_GAP, 0, b"overflow", count=3)
    write_some(ring, 0, 5, 2)
    rig.turn()
    before = told(read(rig, "s"))
    rewind(ring)
    rig.restart()
    assert told(read(rig, "s")) == before
    ring.write(0, b"new")
    assert told(read(rig, "s")) == [*before, (10, b"new")]
    assert int(ring.ctl.ack_pos) == ring.head


def test_only_the_tail_that_was_not_committed_is_taken(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    ring.write(0, b"a")
    rig.turn()
    rewind(ring)
    ring.write(0, b"b")
    ring.close(0)
    rig.restart()
    rig.turns()
    assert told(read(rig, "s"))[1:] == [(0, b"a"), (1, b"b"), (2, b"close:stop")]
    rewind(ring)
    rig.restart()
    rig.turns()
    assert told(read(rig, "s"))[1:] == [(0, b"a"), (1, b"b"), (2, b"close:stop")]
    assert rig.core.ring_row(ring.index).violation == 0


def test_a_handle_that_was_used_again_is_each_stream_in_its_turn(rig: Rig) -> None:
    ring = rig.ring()
    for name in "abc":
        ring.open(0, name)
        ring.write(0, name.encode() * 3)
        if name != "c":
            ring.close(0, b"end of " + name.encode())
    rig.turn()
    before = {name: told(read(rig, name)) for name in "abc"}
    rewind(ring)
    rig.restart()
    ring.write(0, b"more")
    rig.turns()
    after = {name: told(read(rig, name)) for name in "abc"}
    assert after == before | {"c": [*before["c"], (1, b"more")]}
    assert rig.core.refresh_totals().opened == 0
    assert rig.core.ring_row(ring.index).violation == 0


def test_a_stream_that_was_let_go_meanwhile_does_not_come_back(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "a")
    ring.close(0)
    ring.open(1, "b")
    rig.turn()
    index = next(i for i in range(4) if rig.block(i).committed and rig.block(i).open_seq == 1)
    memoryview(rig.spool)[index * 4096 : index * 4096 + 8] = bytes(8)  # evicted, and then killed before the ack
    rewind(ring)
    rig.restart()
    rig.turns()
    assert rig.core.attach(rig.core.connect(), 1, b"a", credit=CREDIT) < 0
    assert row(rig, "b").state == lib.CLAW_STREAM_LIVE
    assert rig.core.ring_row(ring.index).violation == 0


def test_a_refusal_stays_one(rig: Rig) -> None:
    ring, other = rig.ring(), rig.ring()
    other.open(0, "s")
    rig.turn()
    refused = ring.open(4, "s")
    ring.write(4, b"never")
    rig.turn()
    assert ring.stopped(4) == (refused, lib.CLAW_STOPPED_EXISTS)
    other.close(0)
    rig.turn()
    rewind(ring)
    rig.restart(keep_ns=0)  # the name is free now
    rig.turns()
    assert ring.stopped(4) == (refused, lib.CLAW_STOPPED_EXISTS)
    assert rig.core.refresh_totals().opened == 0
    ring.close(4)
    ring.open(4, "s")
    ring.write(4, b"new")
    assert told(read(rig, "s"))[1:] == [(0, b"new")]


def test_a_cancel_stays_one_whatever_it_had_come_to(rig: Rig) -> None:
    ring = rig.ring()
    seqs = [ring.open(handle, name) for handle, name in enumerate("ab")]
    rig.turn()
    assert rig.core.cancel_stream(b"a") == 0
    ring.ctl.stopped[1] = seqs[1] << 8 | lib.CLAW_STOPPED_CANCELLED  # killed right after
    rewind(ring)
    rig.restart()
    rig.turns()
    for handle, name in enumerate("ab"):
        assert told(read(rig, name)) == [(0, b"open:"), (0, b"close:cancelled")]
        ring.write(handle, b"late")
        ring.close(handle)
    rig.turns()
    assert rig.core.refresh_totals().discarded == 2
    ring.open(0, "c")
    ring.write(0, b"x")
    assert told(read(rig, "c"))[1:] == [(0, b"x")]


def test_a_close_that_comes_again_after_its_stream_was_let_go_is_no_violation(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    rig.turn()
    open_end = int(ring.ctl.ack_pos)
    ring.close(0)
    rig.turn()
    rewind(ring, open_end)
    rig.restart(keep_ns=0)
    rig.turns()
    row = rig.core.ring_row(ring.index)
    assert (row.violation, row.state) == (0, lib.CLAW_RING_LIVE)


def test_an_order_that_is_broken_after_the_first_record_is_a_violation(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    rig.turn()
    rig.restart()
    ring.write(0, b"a")
    rig.turn()
    ring.seq += 1
    ring.write(0, b"b")
    rig.turn()
    assert rig.core.ring_row(ring.index).violation == lib.CLAW_BAD_SEQ
    assert told(read(rig, "s"))[-1] == (1, b"close:error:quarantined")


# --- rings ---


def test_a_ring_that_never_comes_back_ends_its_streams(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    ring.write(0, b"a")
    rig.turn()
    assert rig.restart(adopt=False).live == 1
    assert rig.core.end_orphans(8, "error:layout") == 0
    assert rig.core.end_orphans(0, "producer_lost") == 1
    assert told(read(rig, "s"))[1:] == [(0, b"a"), (1, b"close:producer_lost")]


def test_a_dead_owners_ring_is_drained_and_its_streams_end_once(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    ring.write(0, b"a")
    rig.turn()
    ring.write(0, b"b")
    for _ in range(2):
        rig.restart()
        rig.core.leave_ring(ring.index)
        rig.turns()
        assert rig.core.ring_row(ring.index).state == lib.CLAW_RING_DONE
        assert told(read(rig, "s"))[1:] == [(0, b"a"), (1, b"b"), (2, b"close:producer_lost")]


def test_a_core_that_goes_leaves_its_rings_open_and_one_that_drops_a_ring_closes_it(rig: Rig) -> None:
    ring = rig.ring()
    rig.restart()
    assert ring.ctl.state == lib.CLAW_STATE_OPEN
    assert ring.ctl.daemon_epoch == 10
    rig.core.drop_ring(ring.index)
    assert ring.ctl.state == lib.CLAW_STATE_CLOSED


STRANGE = {
    "state": lib.CLAW_STATE_CLOSED,
    "layout": 2,
    "incompatible": 1,
    "magic": 0,
    "size": 4096,
    "ring_id": 0,
    "ring_bytes": 4096,
    "ack_pos": 1,
    "record_max": 9,
}


@pytest.mark.parametrize("field", STRANGE)
def test_a_ring_is_not_taken_over_with_a_strange(rig: Rig, field: str) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    rig.turn()
    rig.restart(adopt=False)
    setattr(ring.ctl, field, STRANGE[field])
    with pytest.raises(Exception, match="EBADMSG"):
        ring.adopt()
    assert ring.ctl.daemon_epoch == 9
    assert rig.core.end_orphans(7, "error:layout") == 1
    assert told(read(rig, "s"))[-1] == (0, b"close:error:layout")


def test_a_generation_of_the_handshake_is_not_used_twice(rig: Rig) -> None:
    ring = rig.ring()
    with rig.asleep(ring):
        asleep = int(ring.ctl.need_wake)
    ring.ctl.need_wake = asleep  # killed in its sleep
    rig.restart()
    assert int(ring.ctl.need_wake) == asleep + 1
    ring.hear()
    rig.core.wait(0)
    rig.turn()
    with rig.asleep(ring):
        assert int(ring.ctl.need_wake) == asleep + 2


def waited_ns(rig: Rig) -> int:
    began_ns = time.monotonic_ns()
    assert rig.core.wait(10 * SECOND) == []
    return time.monotonic_ns() - began_ns


def test_a_ring_whose_producer_does_not_come_is_looked_at_ever_more_seldom(rig: Rig) -> None:
    ring = rig.ring()
    ring.open(0, "s")
    rig.restart()
    rig.turn()
    waits = [waited_ns(rig) for _ in range(8)]
    assert min(waits[:2]) < 60_000_000 < min(waits[6:]), "as soon as it may come, then rarely"
    ring.write(0, b"x")
    assert rig.core.wait(10 * SECOND) == []
    rig.turn()
    assert rig.core.refresh_totals().tokens == 1
    for _ in range(6):  # while it writes it is looked at often
        ring.write(0, b"x")
        assert rig.core.wait(10 * SECOND) == []
        rig.turn()
    assert min(waited_ns(rig) for _ in range(2)) < 60_000_000


def test_a_ring_is_polled_until_its_producer_signals(rig: Rig) -> None:
    ring = rig.ring()
    rig.restart()
    rig.turn()
    before = int(ring.ctl.need_wake)
    for _ in range(3):
        assert rig.core.wait(10 * SECOND) == []  # which returns by itself, and soon
    assert int(ring.ctl.need_wake) == before, "its producer has nothing to signal to"
    ring.open(0, "s")
    assert rig.core.wait(10 * SECOND) == []
    rig.turn()
    assert rig.core.refresh_totals().rescued == 0
    ring.hear()
    assert rig.core.wait(10 * SECOND) == []
    rig.turn()
    with rig.asleep(ring):
        assert int(ring.ctl.need_wake) & 1
    with pytest.raises(Exception, match="EEXIST"):
        rig.core.hear_ring(ring.index, ring.event_fd)
