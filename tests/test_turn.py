# SPDX-License-Identifier: Apache-2.0
"""What a turn does before what else."""

from __future__ import annotations

import time

from clawd.core import lib
from rig import Rig

OPEN, TOKEN, CLOSE = lib.CLAW_OPEN, lib.CLAW_TOKEN, lib.CLAW_CLOSE


def test_a_stream_that_is_not_kept_at_all_still_reaches_who_reads_it() -> None:
    with Rig({"keep_ns": 0}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        rig.core.attach(client, 1, b"s", credit=1000, deadline_ns=time.monotonic_ns() + 10**10)
        ring.open(0, "s")
        ring.write(0, b"a")
        ring.close(0)
        assert [item.kind for item in rig.turn()] == [OPEN, TOKEN, CLOSE]


def test_the_place_of_a_finished_reading_is_free_in_the_next_turn() -> None:
    with Rig({"max_streams": 1}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "first")
        rig.turn()
        rig.core.attach(client, 1, b"first", credit=1000)
        ring.close(0)
        rig.turn()
        ring.open(1, "second")
        rig.turn()
        assert ring.stopped(1) == (0, 0)
