# SPDX-License-Identifier: Apache-2.0
"""What goes first where more waits than fits: CRITICAL before HIGH before NORMAL, and no class waits for ever."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from clawd.core import lib
from rig import Item, Rig, RingWriter, parse

BULK, TALK, URGENT = 1, 2, 3


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig({"spool_bytes": 1 << 22, "stream_bytes": 1 << 20}) as rig:
        yield rig


@pytest.fixture
def client(rig: Rig) -> int:
    return rig.core.connect()


@pytest.fixture
def ring(rig: Rig, client: int) -> RingWriter:
    """Streams whose first tokens are read already; handles and attachments are the constants above."""
    ring = rig.ring(1 << 18)
    for handle, name in ((BULK, b"bulk"), (TALK, b"talk"), (URGENT, b"urgent")):
        ring.open(handle, name)
        ring.write(handle, b"One")
        rig.turn()
        assert rig.core.attach(client, handle, name, credit=1 << 30) == 0
    rig.turns()
    return ring


def backlog(ring: RingWriter, handle: int, tokens: int = 60, *, urgent: bool = False) -> None:
    for _ in range(tokens):
        ring.write(handle, bytes(900), urgent=urgent)


def first(items: list[Item]) -> list[int]:
    """Attachments in the order of their first items."""
    return list(dict.fromkeys(item.attachment for item in items))


def leaders(rig: Rig) -> list[int]:
    """Whose records the frames of the last turn start with."""
    return [parse(frame)[0].attachment for frame in rig.frames]


def test_the_token_after_a_sentence_goes_before_the_backlog_of_other_streams(rig: Rig, ring: RingWriter) -> None:
    ring.write(TALK, b".")
    rig.turns()
    backlog(ring, BULK)
    ring.write(TALK, b" Two")
    ring.write(TALK, b" words")
    items = rig.turns()
    assert [(item.attachment, item.data, item.klass) for item in items[:3]] == [
        (TALK, b" Two", lib.CLAW_HIGH),
        (TALK, b" words", lib.CLAW_NORMAL),
        (BULK, bytes(900), lib.CLAW_NORMAL),
    ]
    assert len(items) == 62


def test_a_token_within_a_sentence_waits_its_turn(rig: Rig, ring: RingWriter) -> None:
    backlog(ring, BULK)
    ring.write(TALK, b" and")
    assert first(rig.turns()) == [BULK, TALK]


def test_critical_goes_before_high_and_high_before_normal_whatever_came_first(rig: Rig, ring: RingWriter) -> None:
    ring.write(TALK, b".")
    rig.turns()
    backlog(ring, BULK)
    ring.write(TALK, b" Two")
    ring.write(URGENT, b"now", urgent=True)
    assert first(rig.turns()) == [URGENT, TALK, BULK]


def test_an_attachment_that_waits_moves_up_when_a_sentence_ends(rig: Rig, ring: RingWriter, client: int) -> None:
    rig.core.block(client, True)
    backlog(ring, BULK)
    ring.write(TALK, b" end.")
    rig.turn()
    ring.write(TALK, b" Two")
    rig.turn()
    rig.core.block(client, False)
    items = rig.turns()
    assert [item.data for item in items[:2]] == [b" end.", b" Two"]


def test_what_follows_the_high_token_has_no_more_of_its_place(rig: Rig, ring: RingWriter) -> None:
    """A long sentence after the short one takes turns with the others again, frame by frame."""
    ring.write(TALK, b".")
    rig.turns()
    backlog(ring, BULK)
    ring.write(TALK, b" Two")
    backlog(ring, TALK)
    rig.turn()
    assert leaders(rig)[:3] == [TALK, BULK, TALK]


def test_streams_within_a_sentence_get_every_fourth_frame_while_others_end_theirs(rig: Rig, ring: RingWriter) -> None:
    backlog(ring, BULK)
    seen: list[int] = []
    while len(seen) < 12:
        backlog(ring, TALK, 75)  # more than goes out until the next round
        ring.write(TALK, b".")
        ring.write(TALK, b" Two")
        rig.turn()
        seen += leaders(rig)
        for number, total in rig.charged.items():
            rig.ack(number, total)
    assert seen[:12] == [TALK, TALK, TALK, BULK] * 3


def test_an_urgent_token_goes_before_those_whose_turn_it_is_among_the_others(
    rig: Rig, ring: RingWriter, client: int
) -> None:
    rig.core.block(client, True)
    for _ in range(6):
        backlog(ring, BULK, 100)
        rig.turn()
    rig.core.block(client, False)
    rig.turn()
    full = lib.CLAW_WINDOW - lib.CLAW_FRAME_MAX - lib.CLAW_FRAME_CHARGE
    followers = []
    for step in range(24):  # NORMAL has its turn in each fourth frame, and an urgent token comes with each fifth
        backlog(ring, TALK, 20)
        ring.write(TALK, b".")
        ring.write(TALK, b" Two")
        is_urgent = step % 5 == 4
        if is_urgent:
            ring.write(URGENT, b"now", urgent=True)
        rig.ack(client, rig.charged[client] - full)
        rig.turn()
        [frame] = rig.frames
        order = first(parse(frame))
        if is_urgent:
            assert order[0] == URGENT
            followers.append(order[1])
    assert set(followers) == {BULK, TALK}, "whoever's turn it was"


@pytest.mark.parametrize("laned", [False, True])
def test_an_engine_all_of_whose_tokens_are_urgent_leaves_its_neighbours_their_share(
    rig: Rig, ring: RingWriter, client: int, laned: bool
) -> None:
    if laned:
        rig.core.open_lanes(client)
    express = 0

    def size(number: int) -> int:
        return int(rig.core.frames()[number][2]) + int(lib.CLAW_FRAME_CHARGE)

    rig.core.block(client, True)
    for handle in (BULK, TALK):
        backlog(ring, handle, 120)
        rig.turn()
    ring.write(TALK, b".")
    ring.write(TALK, b" Two")
    rig.turn()
    rig.core.block(client, False)
    seen: list[int] = []
    while len(seen) < 16:
        backlog(ring, URGENT, 75, urgent=True)  # more than goes out until the next round
        rig.turn()
        seen += leaders(rig)
        for number, total in rig.charged.items():
            rig.ack(number, total)
        if laned:
            express += sum(size(n) for n in range(len(rig.frames)) if rig.core.lanes(n) & lib.CLAW_LANE_EXPRESS)
            flow = struct.pack("<BBHIQ", lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, 0, client, express)
            assert rig.core.express_flow(client, flow)
            for number, items in enumerate(map(parse, rig.frames)):
                is_on_both = bool(rig.core.lanes(number) & lib.CLAW_LANE_EXPRESS)
                assert is_on_both == any(item.klass == lib.CLAW_CRITICAL for item in items)
    assert seen[:4] == [URGENT, URGENT, URGENT, BULK]
    longest = 8 if laned else 5  # where the bulk lane is full, the express lane goes on
    for other in (BULK, TALK):
        at = [number for number, who in enumerate(seen) if who == other]
        assert max(b - a for a, b in zip([-1, *at], at, strict=False)) <= longest, f"{other} waits: {seen}"
        assert len(at) >= 2
    assert seen.count(URGENT) >= 7


def test_clients_whose_news_is_of_a_better_class_are_served_first_in_a_turn(rig: Rig) -> None:
    ring = rig.ring(1 << 18)
    clients: dict[int, str] = {}
    for handle, name in enumerate(("a", "b", "high", "first"), 1):
        number = rig.core.connect()
        clients[number] = name
        until = time.monotonic_ns() + 10**10
        assert rig.core.attach(number, 1, name.encode(), credit=1 << 30, deadline_ns=until) >= 0
        if name != "first":
            ring.open(handle, name)
            ring.write(handle, b"One.")
            ring.write(handle, b" Two")
            rig.turns()
    for handle in (1, 2):
        ring.write(handle, b" more")
    ring.write(3, b".")
    ring.write(3, b" New")
    ring.open(4, "first")
    ring.write(4, b"One")
    rig.turn()
    assert [clients[parse(frame)[0].connection] for frame in rig.frames] == ["first", "high", "a", "b"]
