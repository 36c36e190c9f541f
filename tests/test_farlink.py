# SPDX-License-Identifier: Apache-2.0
"""Two lanes become one: whatever express brings, and whenever, each reading gets what bulk alone would have brought."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import wire
from clawd import protocol
from clawd.core import lib
from clawd.farlink import HELD_MAX, Door, FarLink
from clawd.inbox import Inbox
from tests import ports

CONNECTION = 9


class Lanes:
    """A link that is connected to nothing, and what comes to it."""

    def __init__(self) -> None:
        self.link = FarLink(Door(f"tcp://127.0.0.1:{ports.pair()}"))
        self.link._connected(protocol.Connected(protocol.VERSION, CONNECTION, 0))

    def attach(self, *, opened: bool = False) -> Inbox:
        """A reading; `opened`: of which the OPEN has come."""
        inbox = self.link.attach("s", None, 30.0, 1 << 20, "keep", 30.0)
        if opened:
            inbox.incarnation = 7
        return inbox

    def bulk(self, frame: bytes) -> None:
        self.link._take(frame)

    def express(self, frame: bytes) -> None:
        self.link._on_express = True
        self.link._take(frame)
        self.link._on_express = False


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    made.link.close()


def numbered(number: int, *segments: wire.Segment, connection: int = CONNECTION) -> bytes:
    frame = bytearray(wire.frame(connection, segments))
    frame[14:16] = (number & 0xFFFF).to_bytes(2, "little")
    return bytes(frame)


def tokens(inbox: Inbox, first: int, count: int) -> wire.Segment:
    return wire.Segment(inbox.id, 7, first, tuple(wire.token(b"%d," % (first + n)) for n in range(count)))


def text(inbox: Inbox) -> bytes:
    return b"".join(record.data for page in inbox.pending for record in wire.records(page[0]))


def test_the_first_copy_counts_and_the_second_is_dropped(lanes: Lanes) -> None:
    inbox = lanes.attach(opened=True)
    frames = [numbered(n + 1, tokens(inbox, 2 * n, 2)) for n in range(3)]
    lanes.express(frames[0])
    lanes.bulk(frames[0])
    lanes.bulk(frames[1])
    lanes.express(frames[1])
    lanes.bulk(frames[2])
    assert text(inbox) == b"0,1,2,3,4,5,"
    assert lanes.link.duplicates == 2
    assert inbox.received == sum(len(page[0]) for page in inbox.pending)


def test_what_comes_too_early_is_held_until_the_rest_is_there(lanes: Lanes) -> None:
    inbox, other = lanes.attach(opened=True), lanes.attach(opened=True)
    first, second = numbered(1, tokens(inbox, 0, 2)), numbered(2, tokens(inbox, 2, 1), tokens(other, 0, 1))
    lanes.express(second)
    assert (text(inbox), text(other)) == (b"", b"0,")
    lanes.bulk(first)
    assert text(inbox) == b"0,1,2,"
    lanes.bulk(second)
    assert text(inbox) == b"0,1,2,"
    assert not lanes.link._held


def test_a_first_token_waits_for_what_was_said_at_open(lanes: Lanes) -> None:
    inbox = lanes.attach()
    lanes.express(numbered(2, tokens(inbox, 0, 1)))
    assert not inbox.pending
    lanes.bulk(numbered(1, wire.Segment(inbox.id, 7, 0, (wire.opened(b"{}"),))))
    assert [record.kind for page in inbox.pending for record in wire.records(page[0])] == [
        lib.CLAW_OPEN,
        lib.CLAW_TOKEN,
    ]


def test_an_end_that_comes_early_is_held_too(lanes: Lanes) -> None:
    inbox = lanes.attach(opened=True)
    lanes.express(numbered(2, wire.Segment(inbox.id, 7, 2, (wire.closed("stop"),))))
    assert not inbox.done
    lanes.bulk(numbered(1, tokens(inbox, 0, 2)))
    assert inbox.done
    assert inbox.error is None


def test_no_more_is_held_than_so_much_and_nothing_is_lost_by_that(lanes: Lanes) -> None:
    inbox = lanes.attach(opened=True)
    count = 3 * HELD_MAX
    frames = [numbered(n + 1, tokens(inbox, n, 1)) for n in range(count)]
    for frame in frames[1:]:
        lanes.express(frame)
    assert lanes.link._held_count == HELD_MAX
    for frame in frames:
        lanes.bulk(frame)
    assert text(inbox) == b"".join(b"%d," % n for n in range(count))
    assert lanes.link._held_count == 0
    assert not lanes.link._ahead


def test_frames_of_an_earlier_connection_are_taken_from_bulk_alone(lanes: Lanes) -> None:
    inbox = lanes.attach(opened=True)
    old = numbered(1, tokens(inbox, 0, 1), connection=CONNECTION - 1)
    lanes.express(old)
    assert text(inbox) == b""
    lanes.bulk(old)
    assert text(inbox) == b"0,"
    assert lanes.link._acked == lanes.link._express_acked == 0


def test_a_lane_that_is_new_ends_the_connection_until_both_have_joined(lanes: Lanes) -> None:
    inbox = lanes.attach(opened=True)
    lanes.express(numbered(2, tokens(inbox, 1, 1)))
    lanes.link._connected(protocol.Connected(protocol.VERSION, 0))
    assert lanes.link._connection is None
    assert not lanes.link._held
    lanes.bulk(numbered(1, tokens(inbox, 0, 1)))
    lanes.bulk(numbered(2, tokens(inbox, 1, 1)))
    assert text(inbox) == b"0,1,", "what was on its way still counts"


@pytest.mark.parametrize("start", [0, 65_500], ids=["from the start", "where numbers begin again"])
def test_any_order_of_the_lanes_gives_the_text_of_bulk(seed: int, start: int) -> None:
    dice = random.Random(seed)
    for _ in range(30):
        lanes = Lanes()
        try:
            inboxes = [lanes.attach(opened=True) for _ in range(4)]
            nexts, frames = dict.fromkeys(range(4), 0), []
            for number in range(200):
                which = dice.sample(range(4), dice.randrange(1, 4))
                segments = []
                for each in which:
                    count = dice.randrange(1, 4)
                    segments.append(tokens(inboxes[each], nexts[each], count))
                    nexts[each] += count
                frames.append(numbered(start + number + 1, *segments))
            lanes.link._bulk_number = start & 0xFFFF
            copies = [number for number in range(200) if dice.random() < 0.6]
            bulk = 0
            while bulk < len(frames) or copies:
                # express may be ahead of bulk or behind it, each in order
                if copies and (bulk == len(frames) or dice.random() < 0.5):
                    lanes.express(frames[copies.pop(0)])
                else:
                    lanes.bulk(frames[bulk])
                    bulk += 1
            for each, inbox in enumerate(inboxes):
                assert text(inbox) == b"".join(b"%d," % n for n in range(nexts[each]))
                paid = sum(len(page[0]) for page in inbox.pending)
                assert (inbox.received, inbox.offset) == (paid, inbox.credit), "credit counts every token once"
            assert not lanes.link._held
            charges = sum(len(frame) + lib.CLAW_FRAME_CHARGE for frame in frames)
            assert lanes.link._acked == charges
        finally:
            lanes.link.close()
