# SPDX-License-Identifier: Apache-2.0
"""Which lanes the core puts a frame on, and what a lane that is stuck holds up."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest

import rig
from clawd.core import lib
from rig import CREDIT, Item, Rig, RingWriter

BULK, BOTH = lib.CLAW_LANE_BULK, lib.CLAW_LANE_BULK | lib.CLAW_LANE_EXPRESS


class Lanes:
    """A core with one client that has both lanes, and keeps its acks apart."""

    def __init__(self) -> None:
        self.rig = Rig({"spool_bytes": 4 << 20, "stream_bytes": 2 << 20})
        self.ring: RingWriter = self.rig.ring(1 << 20)
        self.client = self.rig.core.connect()
        self.rig.core.open_lanes(self.client)
        self.express = 0

    def attach(self, id: int, name: str) -> None:
        assert self.rig.core.attach(self.client, id, name.encode(), credit=CREDIT, deadline_ns=1 << 62) >= 0

    def turn(self) -> list[tuple[int, list[Item]]]:
        """The frames of one turn: their lanes and what they hold."""
        self.rig.turn()
        frames = [(self.rig.core.lanes(i), rig.parse(frame)) for i, frame in enumerate(self.rig.frames)]
        sizes = [length for _, _, length in self.rig.core.frames()]
        self.express += sum(
            size + lib.CLAW_FRAME_CHARGE for size, (lanes, _) in zip(sizes, frames, strict=True) if lanes == BOTH
        )
        return frames

    def ack_bulk(self) -> None:
        assert self.rig.ack(self.client, self.rig.charged.get(self.client, 0))

    def ack_express(self) -> bool:
        flow = struct.pack("<BBHIQ", lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, 0, self.client, self.express)
        return self.rig.core.express_flow(self.client, flow)

    def backlog(self) -> list[tuple[int, list[Item]]]:
        """Fill the bulk window with one stream's tokens, and leave more."""
        self.attach(1, "long")
        self.ring.open(1, "long")
        for _ in range(40):
            rig.write_some(self.ring, 1, 0, 8, 500)
        frames = [frame for _ in range(3) for frame in self.turn()]
        assert self.rig.core.outcome.frame_count == 0, "the window is full"
        return frames


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    made.rig.close()


def tokens(frames: list[tuple[int, list[Item]]]) -> list[tuple[int, list[int]]]:
    return [(lanes, [item.seq for item in items if item.kind == lib.CLAW_TOKEN]) for lanes, items in frames]


def test_a_first_token_goes_on_both_lanes_and_alone(lanes: Lanes) -> None:
    lanes.attach(1, "s")
    lanes.ring.open(1, "s")
    rig.write_some(lanes.ring, 1, 0, 5)
    assert tokens(lanes.turn()) == [(BOTH, [0]), (BULK, [1, 2, 3, 4])]
    lanes.ring.write(1, b"more")
    assert tokens(lanes.turn()) == [(BULK, [5])]
    lanes.ring.write(1, b"urgent", urgent=True)
    assert tokens(lanes.turn()) == [(BOTH, [6])]
    assert lanes.rig.core.refresh_totals().copied_frames == 2


def test_what_was_said_at_open_goes_ahead_on_both_lanes(lanes: Lanes) -> None:
    lanes.attach(1, "s")
    lanes.ring.open(1, "s")
    assert tokens(lanes.turn()) == [(BOTH, [])]


def test_a_first_token_passes_a_backlog_that_fills_the_bulk_lane(lanes: Lanes) -> None:
    lanes.backlog()
    lanes.attach(2, "new")
    lanes.ring.open(2, "new")
    rig.write_some(lanes.ring, 2, 0, 3)
    assert tokens(lanes.turn()) == [(BOTH, [0])], "the rest waits with the backlog"
    assert lanes.turn() == []
    lanes.ack_bulk()
    assert (BULK, [1, 2]) in [(lane, seqs[:2]) for lane, seqs in tokens(lanes.turn())]


def test_a_lane_that_takes_nothing_is_left_behind_so_far_and_no_further(lanes: Lanes) -> None:
    lanes.rig.core.double(lanes.client, True)
    lanes.backlog()
    sent = 0
    for _ in range(100):  # express gets through, bulk is stuck
        assert lanes.ack_express()
        found = lanes.turn()
        sent += sum(lane == BOTH for lane, _ in found)
        rig.write_some(lanes.ring, 1, 0, 8, 500)
    charged = lanes.rig.charged[lanes.client]
    assert sent > 0
    assert lib.CLAW_WINDOW < charged <= lib.CLAW_LANE_BEHIND * lib.CLAW_WINDOW
    assert lanes.turn() == []
    lanes.ack_bulk()
    assert lanes.turn() != []


def test_an_express_lane_that_takes_nothing_is_left_behind_so_far_and_bulk_goes_on(lanes: Lanes) -> None:
    lanes.rig.core.double(lanes.client, True)
    lanes.backlog()
    alone = 0
    for _ in range(100):
        lanes.ack_bulk()
        alone += sum(lane == BULK for lane, _ in lanes.turn())
        rig.write_some(lanes.ring, 1, 0, 8, 500)
    assert alone > 0
    assert lib.CLAW_WINDOW < lanes.express <= lib.CLAW_LANE_BEHIND * lib.CLAW_WINDOW
    assert lanes.ack_express()
    assert [lane for lane, _ in lanes.turn()] == [BOTH]


def test_all_frames_are_doubled_while_the_way_loses_much(lanes: Lanes) -> None:
    lanes.attach(1, "s")
    lanes.ring.open(1, "s")
    rig.write_some(lanes.ring, 1, 0, 2)
    lanes.turn()
    for on, want in ((True, BOTH), (False, BULK)):
        lanes.rig.core.double(lanes.client, on)
        lanes.ring.write(1, b"x")
        assert [lane for lane, _ in lanes.turn()] == [want]


def test_bulk_alone_is_complete(lanes: Lanes, seed: int) -> None:

    dice = random.Random(seed)
    for handle in range(1, 6):
        lanes.attach(handle, f"s{handle}")
        lanes.ring.open(handle, f"s{handle}")
    got: dict[int, list[int]] = {handle: [] for handle in range(1, 6)}
    for _ in range(300):
        handle = dice.randrange(1, 6)
        lanes.ring.write(handle, b"x" * dice.randrange(1, 400), urgent=dice.random() < 0.1)
        lanes.rig.core.double(lanes.client, dice.random() < 0.5)
        if dice.random() < 0.3:
            for _, items in lanes.turn():
                for item in items:
                    if item.kind == lib.CLAW_TOKEN:
                        got[item.attachment].append(item.seq)
        if dice.random() < 0.2:
            lanes.ack_bulk()
        if dice.random() < 0.2:
            assert lanes.ack_express()
    for _ in range(50):
        lanes.ack_bulk()
        lanes.ack_express()
        for _, items in lanes.turn():
            for item in items:
                if item.kind == lib.CLAW_TOKEN:
                    got[item.attachment].append(item.seq)
    for seqs in got.values():
        assert seqs == list(range(len(seqs)))
    assert sum(map(len, got.values())) == 300


def test_flow_of_the_express_lane_is_checked(lanes: Lanes) -> None:
    flow = struct.pack("<BBHIQ", lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, 0, lanes.client, 1)
    assert not lanes.rig.core.express_flow(lanes.client, flow), "acks what was not sent"
    assert not lanes.rig.core.express_flow(lanes.client, flow + b"x")
    assert not lanes.rig.core.express_flow(lanes.rig.core.connect(), flow), "it has no express lane"
