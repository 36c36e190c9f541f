# SPDX-License-Identifier: Apache-2.0
"""The sysctls that may be tuned: one row each. What is no row here is neither read from a profile nor written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EXACT = "exact"
LEAST = "at least"
MOST = "at most"
BITS = "bits"
Look = Callable[[str], str]
"""The live value of a sysctl, empty where there is none."""


@dataclass(frozen=True)
class Knob:
    """`rule` says when a live value will do; numbers have bounds, words have none. `takes` is whom a new value reaches,
    `moot` why it does nothing here.
    """

    key: str
    rule: str
    takes: str
    low: int | None = None
    high: int = 0
    moot: Callable[[Look], str] = lambda look: ""

    def aim(self, live: str, wanted: str) -> str:
        """What it shall be, where it is `live`: the same when that will do."""
        if self.low is None:
            return wanted
        ours, theirs = int(wanted), int(live)
        aims = {EXACT: ours, LEAST: max(ours, theirs), MOST: min(ours, theirs), BITS: ours | theirs}
        return str(aims[self.rule])

    @property
    def allowed(self) -> str:
        return "the name of an algorithm" if self.low is None else f"{self.low} to {self.high}"

    def allows(self, value: str) -> bool:
        if self.low is None:
            return value.isascii() and value.replace("_", "").isalnum() and len(value) < 16
        try:
            return self.low <= int(value, 0) <= self.high
        except ValueError:
            return False


def _needs_timestamps(look: Look) -> str:
    off = look("net.ipv4.tcp_timestamps") == "0"
    return "net.ipv4.tcp_timestamps is 0, without which no port is used again" if off else ""


def _not_for_bbr(look: Look) -> str:
    paced = look("net.ipv4.tcp_congestion_control").startswith("bbr")
    return "connections under bbr do not heed it" if paced else ""


NEW, EXISTING, LISTENERS = "new sockets", "all sockets", "new listeners"
_ROWS = (
    Knob("net.ipv4.tcp_fastopen", BITS, NEW, 0, 0x7FF),
    Knob("net.ipv4.tcp_tw_reuse", EXACT, NEW, 0, 2, _needs_timestamps),
    Knob("net.ipv4.tcp_tw_reuse_delay", EXACT, NEW, 1, 60000, _needs_timestamps),
    Knob("net.ipv4.tcp_notsent_lowat", MOST, EXISTING, 1024, 2**32 - 1),
    Knob("net.ipv4.tcp_slow_start_after_idle", EXACT, EXISTING, 0, 1, _not_for_bbr),
    Knob("net.ipv4.tcp_autocorking", EXACT, EXISTING, 0, 1),
    Knob("net.ipv4.tcp_thin_linear_timeouts", EXACT, EXISTING, 0, 1),
    Knob("net.ipv4.tcp_keepalive_time", MOST, EXISTING, 1, 32767),
    Knob("net.ipv4.tcp_keepalive_intvl", MOST, EXISTING, 1, 32767),
    Knob("net.ipv4.tcp_keepalive_probes", MOST, EXISTING, 1, 127),
    Knob("net.ipv4.tcp_congestion_control", EXACT, NEW),
    Knob("net.core.somaxconn", LEAST, LISTENERS, 1, 65535),
)
KNOBS = {knob.key: knob for knob in _ROWS}
