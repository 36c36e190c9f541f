# SPDX-License-Identifier: Apache-2.0
"""The core's limits that change while it runs: what a stream may hold, how long ended ones are kept."""

from __future__ import annotations

import time

import pytest

from clawd.core import lib
from clawd.errors import CoreError
from rig import Rig, RingWriter

HOUR_NS = 3600 * 10**9


def fill(rig: Rig, ring: RingWriter, blocks: int) -> None:
    for _ in range(blocks):
        for _ in range(4):
            ring.write(0, bytes(900))
        rig.turn()


def held(rig: Rig) -> int:
    totals = rig.core.refresh_totals()
    return int(totals.spool_blocks - totals.spool_free)


def test_a_lower_limit_is_met_as_the_stream_writes_on_and_its_reader_gets_one_gap() -> None:
    with Rig({"spool_bytes": 256 * 4096, "stream_bytes": 200 * 4096}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        fill(rig, ring, 150)
        assert held(rig) > 140
        rig.core.limit(stream_bytes=4 * 4096, keep_ns=HOUR_NS)
        assert held(rig) > 140
        fill(rig, ring, 4)
        assert held(rig) <= 4
        ring.close(0)
        rig.core.attach(client, 1, b"s", credit=1 << 20)
        items = rig.turns()
        kinds = [item.kind for item in items if item.kind != lib.CLAW_TOKEN]
        assert kinds == [lib.CLAW_OPEN, lib.CLAW_GAP, lib.CLAW_CLOSE]
        seqs = [seq for item in items if item.kind != lib.CLAW_CLOSE for seq in range(item.seq, item.seq + item.count)]
        assert seqs == list(range(154 * 4))


def test_a_higher_limit_holds_for_the_streams_that_are_there() -> None:
    with Rig({"spool_bytes": 256 * 4096, "stream_bytes": 4 * 4096}) as rig:
        ring = rig.ring()
        ring.open(0, "s")
        fill(rig, ring, 8)
        assert held(rig) == 4
        rig.core.limit(stream_bytes=16 * 4096, keep_ns=HOUR_NS)
        fill(rig, ring, 8)
        assert held(rig) == 12


def test_a_shorter_keep_ends_what_was_kept_before() -> None:
    with Rig({"keep_ns": HOUR_NS}) as rig:
        ring = rig.ring()
        for handle in range(3):
            ring.open(handle, f"s{handle}")
            ring.close(handle)
        rig.turn()
        rig.turn()
        assert rig.core.refresh_totals().streams_ended == 3
        rig.core.limit(stream_bytes=16384, keep_ns=1)
        begun = time.monotonic()
        rig.core.next(30 * 10**9)  # the turn is made at once, not when the old time is over
        assert time.monotonic() - begun < 10
        rig.turn()
        totals = rig.core.refresh_totals()
        assert (totals.streams_ended, held(rig)) == (0, 0)


def test_a_longer_keep_holds_what_ended_before() -> None:
    with Rig({"keep_ns": 50_000_000}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        ring.close(0)
        rig.turn()
        rig.core.limit(stream_bytes=16384, keep_ns=HOUR_NS)
        over = time.monotonic() + 0.1
        while time.monotonic() < over:
            rig.turn()
        assert rig.core.refresh_totals().streams_ended == 1
        assert rig.core.attach(client, 1, b"s", credit=1 << 20) == 0


def test_a_limit_without_room_for_two_blocks_is_refused_and_changes_nothing() -> None:
    with Rig({"keep_ns": HOUR_NS}) as rig:
        ring = rig.ring()
        ring.open(0, "s")
        ring.close(0)
        rig.turn()
        with pytest.raises(CoreError):
            rig.core.limit(stream_bytes=4096, keep_ns=1)
        rig.turn()
        assert rig.core.refresh_totals().streams_ended == 1
