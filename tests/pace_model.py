# SPDX-License-Identifier: Apache-2.0
"""The pacer in plain Python, written from its description and not from its C: what csrc/pacer.c must do, to the
nanosecond. Slow, with lists, and without a bound on what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MS = 1_000_000
SECOND = 1000 * MS
NEVER = 2**64 - 1
SLOWER, HIGH_WATER, LOW_WATER, DELAY_JUMP = 1, 2, 4, 8


@dataclass(frozen=True)
class Pace:
    """Settings, with the defaults of clawd.conf: O2, O7, W7."""

    max_delay_ns: int = 200 * MS
    timeout_ns: int = 50 * MS
    prefetch: int = 3
    bucket: int = 50
    refill_rate: int = 30_000
    leak_rate: int = 45_000
    burst_rate: int = 80_000
    burst: int = 8


@dataclass(frozen=True)
class Network:
    loss_ppm: int = 0
    jitter_us: int = 0
    congested: int = 0


def follow(mean: int, value: int, weight: int) -> int:
    return mean + ((value - mean) * weight >> 8)


@dataclass
class Model:
    mode: str
    pace: Pace
    now_ns: int
    runs: list[list[int]] = field(default_factory=list)
    queued: int = 0
    flush: int = 0
    released_ns: int = 0
    held_three: bool = False
    # what was learnt
    run: tuple[int, int] | None = None
    gaps: int = 0
    gap_ns: int = 0
    pace_ns: int = 0
    error_ns: int = 0
    stray_ns: int = 0
    uneven_ns: int = 0
    long_gaps: int = 0
    delay_ns: int = 0
    least: list[int] = field(default_factory=lambda: [NEVER, NEVER])
    least_until_ns: int = 0
    # steady
    filling: bool = False
    share_ppm: int = 1_000_000
    shared_ns: int = 0

    def __post_init__(self) -> None:
        self.level = self.pace.bucket * 1_000_000
        self.filled_ns = self.leak_at_ns = self.next_ns = self.burst_next_ns = self.now_ns

    def arrive(self, now: int, count: int, urgent: bool = False) -> int:
        noticed = 0
        if self.run and now - self.run[0] < MS:
            self.run = (self.run[0], self.run[1] + count)
        else:
            if self.run:
                noticed = self.learn(min(now - self.run[0], 3600 * SECOND) // self.run[1], self.run[1])
            self.run = (now, count)
        if not self.queued and self.mode == "steady" and self.released_ns:
            self.filling = True
        if self.runs and (now - self.runs[-1][0] < MS or len(self.runs) == 16):
            self.runs[-1][1] += count
        else:
            self.runs.append([now, count])
        if self.queued < 5 <= self.queued + count:
            noticed |= HIGH_WATER
        self.queued += count
        self.held_three |= self.queued >= 3
        if urgent:
            self.flush = self.queued
        return noticed

    def learn(self, share: int, tokens: int) -> int:
        if not self.gaps:
            self.gaps, self.gap_ns, self.pace_ns, self.uneven_ns = 1, share, share, share
            return 0
        if 2 * share > 3 * self.gap_ns:
            self.long_gaps += 1
            if self.long_gaps == 3:
                self.long_gaps, self.gap_ns, self.pace_ns = 0, share, share
                return SLOWER
            share = min(share, 2 * self.gap_ns)
        else:
            self.long_gaps = 0
        error = share - self.gap_ns
        self.error_ns = follow(self.error_ns, error, 51)
        self.stray_ns = follow(self.stray_ns, abs(error), 51)
        odd = min(abs(error), 2 * self.uneven_ns + (self.gap_ns >> 6))
        self.uneven_ns = self.gap_ns if tokens > 1 else follow(self.uneven_ns, odd, 51)
        alpha = 26
        if self.stray_ns:
            alpha = min(max(77 * abs(self.error_ns) // self.stray_ns, 26), 77)
        if self.gaps < 10:
            self.gaps += 1
            alpha = max(alpha, 256 // self.gaps)
        self.gap_ns = follow(self.gap_ns, share, alpha)
        self.pace_ns += (self.gap_ns - self.pace_ns) >> (3 if self.gaps >= 8 else 1)
        return 0

    def due(self) -> int:
        if not self.queued:
            return NEVER
        arrived = self.runs[0][0]
        if self.mode == "off" or self.flush or not self.released_ns:
            return arrived
        if self.mode == "smooth":
            return max(arrived, min(self.released_ns + self.smooth_gap(), arrived + self.pace.max_delay_ns))
        due = self.burst_next_ns if self.queued >= 5 else self.next_ns
        if self.filling and self.queued < self.pace.prefetch:
            due = max(due, arrived + self.pace.timeout_ns)
        return max(due, arrived)

    def smooth_gap(self) -> int:
        pace = self.pace_ns if self.gaps else 20 * MS
        stray = min(self.stray_ns if self.gaps > 2 else 0, self.pace.max_delay_ns // 4)
        gap = pace
        least = min(self.least)
        if least != NEVER:
            if least > stray:
                gap -= min((least - stray) // 12, pace // 8)
            else:
                gap += min((stray - least) // 16, pace // 16)
        early = pace // 8 - 2 * self.uneven_ns
        if self.gaps and early > 0:
            gap = min(gap, max(gap - early, pace - pace // 8))
        tokens = 0
        for arrived, count in self.runs[: self.pace.prefetch]:
            tokens += count
            gap = min(gap, max(arrived + self.pace.max_delay_ns - self.released_ns, 0) // tokens)
        return gap

    def release(self, network: Network, now: int) -> tuple[int, int]:
        held = max(now - self.runs[0][0], 0)
        due = self.due()
        self.runs[0][1] -= 1
        if not self.runs[0][1]:
            del self.runs[0]
        self.queued -= 1
        self.flush = max(self.flush - 1, 0)
        noticed = 0
        if not self.queued and self.held_three:
            noticed, self.held_three = LOW_WATER, False
        self.filling = False
        self.released_ns = due if 0 <= now - due < 5 * MS else now
        if held - self.delay_ns >= 50 * MS:
            noticed |= DELAY_JUMP
        self.delay_ns = follow(self.delay_ns, held, 26)
        if now >= self.least_until_ns:
            self.least = [self.least[1], NEVER]
            self.least_until_ns = now + 250 * MS
        self.least[1] = min(self.least[1], held)
        if self.mode == "steady":
            self.spend(network, now)
        return noticed, held

    def spend(self, network: Network, now: int) -> None:
        pace = self.pace
        if now - self.shared_ns >= SECOND:
            less, more = self.share_ppm * 9 // 10, self.share_ppm + 50_000
            self.share_ppm = max(less, 500_000) if network.congested else min(more, 1_000_000)
            self.shared_ns = now
        share = (1_000_000 - min(network.loss_ppm, 1_000_000)) * 100_000 // (100_000 + network.jitter_us)
        share = share * self.share_ppm // 1_000_000

        def scaled(rate: int) -> int:
            return max(rate * share // 1_000_000, 1000)

        refill = scaled(pace.refill_rate)
        leak = max(scaled(pace.leak_rate), refill)
        burst = max(scaled(pace.burst_rate), leak)
        full = pace.bucket * 1_000_000
        self.level += min(now - self.filled_ns, 3600 * SECOND) // 1000 * refill // 1000
        self.level = min(self.level, full) - 1_000_000
        self.filled_ns = now
        low = full // 5
        rate = leak if self.level >= low else refill + (leak - refill) * max(self.level, 0) // low
        reserve = pace.burst * (10**12 // leak - 10**12 // burst)
        self.leak_at_ns = max(self.leak_at_ns, now) + 10**12 // rate
        self.next_ns = self.leak_at_ns
        self.burst_next_ns = max(now + 10**12 // burst, max(self.leak_at_ns - reserve, 0))
        if self.level < 1_000_000:
            wait = (1_000_000 - self.level) * 1_000_000 // refill
            self.next_ns = max(self.next_ns, now + wait)
            self.burst_next_ns = max(self.burst_next_ns, now + wait)
