# SPDX-License-Identifier: Apache-2.0
"""What clawd does about first tokens that wait and a host that is short of processor time: engines are told, and
clawd-kernel is asked for weights. The loop steps it once a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from clawd import log, protocol
from clawd.config import Config
from clawd.core import Core
from clawd.server import pressure
from clawd.server.boost import Boost
from clawd.server.boost_link import BoostLink
from clawd.server.pressure import Pressure, Sight

OFF = "[kernel] boost = off"


class Urgency:
    """`look` and `clock` are others in tests."""

    def __init__(
        self,
        core: Core,
        config: Config,
        *,
        directory: Path | None = None,
        look: Callable[[int], tuple[Sight, str]] = pressure.look,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._look = look
        self._clock = clock
        self._link = BoostLink(directory)
        self._boost = Boost()
        self._pressure = Pressure()
        self._told = 0
        """The pressure that engines know of."""
        self._wanted = (False, 0)
        """What the last step went by: without news and before it is due there is nothing to decide."""
        self._unseen = ""
        self._delay_ns = 0
        self._look_ns = 0
        self.apply(config)

    def apply(self, config: Config) -> None:
        """The settings as they count from now on."""
        self._boosts, self._looks = config.boost, config.pressure
        if not self._boosts:
            self._boost, self._wanted = Boost(), (False, 0)
            self._link.close()  # which ends what was asked for
            self._link.reason = OFF
            self._core.boost(0, self._delay_ns)
        elif self._link.reason == OFF:
            self._link.reason = ""

    def timeout_ns(self, longest_ns: int) -> int:
        """How long the loop may sleep."""
        due_ns = self._boost.due_ns
        return min(longest_ns, max(0, due_ns - self._clock())) if due_ns else longest_ns

    def step(self) -> None:
        """Once a pass, after what it sends was sent."""
        now_ns = self._clock()
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + pressure.LOOK_NS
            self._see(now_ns)
        first_until_ns = self._core.outcome.first_until_ns
        wanted = (now_ns < first_until_ns, self._told)
        if not self._boosts or (wanted == self._wanted and (now_ns < self._boost.due_ns or not self._boost.due_ns)):
            return
        self._wanted = wanted
        ask = self._boost.step(now_ns, first_until_ns, self._told)
        if ask:
            waiting = self._core.outcome.first_count
            lease_ms = ask.lease_ns // 1_000_000
            self._link.ask(protocol.SetBoost(ask.level, lease_ms, waiting, self._told), now_ns)
            self._core.boost(self._boost.level, self._delay_ns)

    def _see(self, now_ns: int) -> None:
        self._link.poll(now_ns)
        sight, self._unseen = self._look(now_ns) if self._looks else (Sight(now_ns, None, None, None), "")
        self._delay_ns = sight.delay_ns or 0
        self._core.boost(self._boost.level, self._delay_ns)
        level = self._pressure.step(sight)
        if level != self._told:
            self._told = level
            self._core.pressure(level)
            log.event("pressure", pressure=level, some_permille=self._pressure.some_permille,
                      wait_us=self._pressure.wait_us)  # fmt: skip

    def told(self) -> protocol.Urgency:
        """For `clawctl status`."""
        return protocol.Urgency(
            self._boost.level,
            self._core.outcome.first_count,
            self._told,
            self._link.reason or None,
            self._pressure.some_permille,
            self._pressure.wait_us,
            self._unseen or (None if self._looks else "[kernel] pressure = off"),
        )

    def close(self) -> None:
        self._link.close()
