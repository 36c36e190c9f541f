# SPDX-License-Identifier: Apache-2.0
"""Which streams' first token is waited for, as the core counts them."""

from __future__ import annotations

import random
import time

from clawd.core import lib
from rig import CREDIT, Rig, RingWriter

WAIT_NS = lib.CLAW_FIRST_WAIT_MS * 1_000_000


def waiting(rig: Rig) -> tuple[int, int]:
    """How many, and until when."""
    outcome = rig.core.outcome
    assert int(rig.core.refresh_totals().first_count) == outcome.first_count
    return outcome.first_count, outcome.first_until_ns


def reader(rig: Rig, *names: str) -> int:
    number = rig.core.connect()
    for id, name in enumerate(names, 1):
        assert rig.core.attach(number, id, name.encode(), credit=CREDIT, deadline_ns=time.monotonic_ns() + 10**12) >= 0
    return number


def send(rig: Rig, now_ns: int) -> None:
    for number, _ in enumerate(rig.frames):
        rig.core.sent_frame(number, now_ns)


def opened(rig: Rig, ring: RingWriter, *names: str, at: int) -> None:
    for handle, name in enumerate(names):
        ring.open(handle, name)
    rig.turn(at)


def test_from_its_open_until_its_first_token_is_sent() -> None:
    with Rig() as rig:
        ring = rig.ring()
        reader(rig, "s")
        assert waiting(rig) == (0, 0)
        opened(rig, ring, "s", at=1000)
        assert waiting(rig) == (1, 1000 + WAIT_NS)
        ring.write(0, b"a")
        rig.turn(2000)
        assert waiting(rig) == (1, 1000 + WAIT_NS), "built, and not sent"
        send(rig, 3000)
        assert waiting(rig) == (0, 0), "without another turn"
        ring.write(0, b"b")
        rig.turn(4000)
        send(rig, 4000)
        assert waiting(rig) == (0, 0)


def test_half_a_second_each_at_most() -> None:
    with Rig() as rig:
        ring = rig.ring()
        opened(rig, ring, "s", "t", at=1000)
        ring.open(2, "u")
        rig.turn(5000)
        assert waiting(rig) == (3, 5000 + WAIT_NS)
        rig.turn(1000 + WAIT_NS - 1)
        assert waiting(rig)[0] == 3
        rig.turn(1000 + WAIT_NS)
        assert waiting(rig) == (1, 5000 + WAIT_NS)
        rig.turn(5000 + WAIT_NS)
        assert waiting(rig) == (0, 0)


def test_one_that_ends_without_a_token_is_waited_for_no_more_and_one_with_is() -> None:
    with Rig() as rig:
        ring = rig.ring()
        reader(rig, "short")
        opened(rig, ring, "empty", "short", at=1000)
        ring.close(0)
        ring.write(1, b"yes")
        ring.close(1)
        rig.turn(2000)
        assert waiting(rig)[0] == 1
        send(rig, 3000)
        assert waiting(rig)[0] == 0


def test_a_cancelled_one_is_not_waited_for() -> None:
    with Rig() as rig:
        opened(rig, rig.ring(), "s", at=1000)
        assert rig.core.cancel_stream(b"s") == 0
        rig.turn(2000)
        assert waiting(rig) == (0, 0)


def test_any_order_of_opens_and_ends_in_few_slots() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Rig({"max_streams": 8, "keep_ns": 1}) as rig:
        ring, now, live = rig.ring(), 10**9, dict[int, int]()
        for step in range(3000):
            now += rng.randrange(WAIT_NS // 4)
            handle = rng.randrange(6)
            if handle not in live:
                ring.open(handle, f"s{step}")
                live[handle] = now
            else:
                del live[handle]
                ring.close(handle)
            rig.turn(now)
            due = [at + WAIT_NS for at in live.values() if at + WAIT_NS > now]
            assert waiting(rig) == (len(due), max(due, default=0))
            assert ring.stopped(handle)[1] == 0


def test_a_slot_that_is_another_streams_by_now_waits_for_that_one() -> None:
    with Rig({"max_streams": 2, "keep_ns": 1}) as rig:
        ring, now = rig.ring(), 10**9
        for number in range(50):
            now += 10**6
            ring.open(0, f"s{number}")
            ring.write(0, b"never sent")
            ring.close(0)
            rig.turn(now)
            assert ring.stopped(0)[1] == 0
            assert 1 <= waiting(rig)[0] <= 2
        rig.turn(now + WAIT_NS)
        assert waiting(rig) == (0, 0)
