# SPDX-License-Identifier: Apache-2.0
"""As test_core_stateful.py, and clawd is killed at any moment, also between a commit and its ack; clocks jump, paces
change, readers leave for good. Who comes again gets exactly the rest, or a GAP.
"""

from __future__ import annotations

import os
import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from clawd.core import Pace
from rig import CREDIT, SECOND
from test_core_stateful import NAMES, CoreMachine, Got

PACE = Pace(200_000_000, 5 * SECOND, 4, 64, 1_000_000, 1_000_000, 2_000_000, 8)
JUMPS_NS = (1_000_000, 250_000_000, 30 * SECOND, 3600 * SECOND)


class KilledMachine(CoreMachine):
    ahead_ns = 0
    stride_ns = 0

    def now_ns(self) -> int:
        self.ahead_ns += self.stride_ns
        return time.monotonic_ns() + self.ahead_ns

    @rule(jump_ns=st.sampled_from(JUMPS_NS))
    def jump(self, jump_ns: int) -> None:
        """Ends are not kept so long in this machine that this would take any away."""
        self.ahead_ns += jump_ns
        self.turn()

    @rule(name=st.sampled_from(NAMES), mode=st.sampled_from(["default", "off", "smooth", "steady"]))
    def pace(self, name: bytes, mode: str) -> None:
        if mode == "default":
            self.rig.core.pace("smooth", PACE)
        self.rig.core.pace_stream(name, mode)

    @rule(again=st.booleans(), resumes=st.booleans())
    def kill(self, again: bool, resumes: bool) -> None:
        """`again`: it had not given the ring back what it had committed last."""
        before = int(self.ring.ctl.ack_pos)
        self.turn()
        if again:
            self.ring.ctl.ack_pos = before
        found = self.rig.restart()
        assert not found.damaged
        self.rig.core.limit(stream_bytes=self.rig.limits["stream_bytes"], keep_ns=10**15)
        self.client = self.rig.core.connect()
        readings, self.readings = self.readings, {}
        self.turn()
        for id, got in readings.items() if resumes else ():
            if got.end is None:
                self.resume(id, got)

    def resume(self, id: int, got: Got) -> None:
        name = next(name for name, stream in self.streams.items() if stream is got.stream)
        got.cost = 0
        after, incarnation = (got.expected - 1, got.incarnation) if got.expected else (-1, None)
        result = self.rig.core.attach(self.client, id, name, after=after, incarnation=incarnation, credit=500)
        if result == 0:
            self.readings[id] = got
        else:
            assert got.stream.end is not None, "a live stream is not let go"

    @rule(name=st.sampled_from(NAMES), killed=st.booleans(), luck=st.integers(0, 3))
    def abandon(self, name: bytes, killed: bool, luck: int) -> None:
        """A stream whose last reader left for good ends, whoever clawd is by then."""
        self.turn()
        stream = self.streams.get(name)
        if (
            luck
            or stream is None
            or stream.end is not None
            or any(got.stream is stream for got in self.readings.values())
        ):
            return
        id, self.next_id = self.next_id, self.next_id + 1
        assert self.rig.core.attach(self.client, id, name, credit=CREDIT, grace_ms=1000) == 0
        if killed:
            self.turn()
            self.kill(False, True)
        else:
            self.rig.core.detach(self.client, id)
        self.ahead_ns += 3 * SECOND
        self.turn()
        assert self.ring.stopped(stream.handle)[1], "nobody reads it"
        stream.end = b"cancelled"
        self.ring.close(stream.handle)

    @rule()
    def settle(self) -> None:
        self.stride_ns = 10 * SECOND  # whatever is held back is due by the next turn
        super().settle()
        self.stride_ns = 0


KilledMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("CLAWD_TEST_EXAMPLES", "60")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
test_readers_get_everything_whoever_is_killed = KilledMachine.TestCase
