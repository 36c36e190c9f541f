# SPDX-License-Identifier: Apache-2.0
"""The pacer against its model over any arrivals, what each mode promises, and traces that look like life."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd.core import ffi, lib
from counts import count
from tests.pace_model import MS, NEVER, SECOND, Model, Network, Pace

MODES = {"off": lib.CLAW_PACE_OFF, "smooth": lib.CLAW_PACE_SMOOTH, "steady": lib.CLAW_PACE_STEADY}
START = 10**12
QUIET = Network()


class Pacer:
    """The C pacer with the model's interface."""

    def __init__(self, mode: str, pace: Pace, now: int) -> None:
        self.raw = ffi.new("struct claw_pacer *")
        self.pace = ffi.new("struct claw_pace *", asdict(pace))
        self.held = ffi.new("uint64_t *")
        lib.claw_pacer_init(self.raw, MODES[mode], self.pace, now)

    def arrive(self, now: int, count: int, urgent: bool = False) -> int:
        return int(lib.claw_pacer_arrive(self.raw, now, count, urgent))

    def due(self) -> int:
        return int(lib.claw_pacer_due(self.raw, self.pace))

    def release(self, network: Network, now: int) -> tuple[int, int]:
        row = ffi.new("struct claw_network *", asdict(network))
        noticed = lib.claw_pacer_release(self.raw, self.pace, row, now, self.held)
        return int(noticed), int(self.held[0])

    @property
    def queued(self) -> int:
        return int(self.raw.queued)


def play(
    arrivals: Iterable[int], mode: str = "smooth", pace: Pace | None = None, network: Network = QUIET, late_ns: int = 0
) -> tuple[list[int], list[int], list[int]]:
    """Let tokens arrive and go on time, at most late_ns late. Returns when they went, how long they were held, and
    what was noticed.
    """
    pacer = Pacer(mode, pace or Pace(), START)
    lag = random.Random(1)
    todo = sorted(START + at for at in arrivals)
    went, held, noticed = [], [], []
    at, now = 0, START
    while at < len(todo) or pacer.queued:
        due = pacer.due()
        if at < len(todo) and todo[at] <= max(due, now):
            now = max(now, todo[at])
            noticed.append(pacer.arrive(now, 1))
            at += 1
            continue
        now = max(due, now) + lag.randint(0, late_ns)
        bits, wait = pacer.release(network, now)
        noticed.append(bits)
        went.append(now)
        held.append(wait)
    return went, held, noticed


def gaps(went: list[int], skip: int = 0) -> list[float]:
    return [(b - a) / MS for a, b in pairwise(went)][skip:]


def quantile(values: list[int], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] / MS


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 400 * MS)),
        st.tuples(st.just("wait"), st.integers(0, 3 * MS)),
        st.tuples(st.just("arrive"), st.integers(1, 12)),
        st.tuples(st.just("urgent"), st.integers(1, 3)),
        st.tuples(st.just("sleep"), st.integers(0, 7200 * SECOND)),
    ),
    max_size=120,
)
PACES = st.builds(
    Pace,
    max_delay_ns=st.integers(MS, 2 * SECOND),
    timeout_ns=st.integers(MS, SECOND),
    prefetch=st.integers(1, 8),
    bucket=st.integers(5, 1000),
    refill_rate=st.integers(1000, 10**7),
    leak_rate=st.integers(1000, 10**7),
    burst_rate=st.integers(1000, 10**7),
    burst=st.integers(1, 100),
)
NETWORKS = st.builds(
    Network, loss_ppm=st.integers(0, 2**32 - 1), jitter_us=st.integers(0, 2**32 - 1), congested=st.integers(0, 1)
)


@pytest.mark.parametrize("mode", MODES)
@given(steps=STEPS, pace=PACES, network=NETWORKS, late=st.integers(0, 5 * MS))
@settings(max_examples=150, deadline=None)
def test_the_step_does_what_the_model_says(
    mode: str, steps: list[tuple[str, int]], pace: Pace, network: Network, late: int
) -> None:
    now = START
    real, model = Pacer(mode, pace, now), Model(mode, pace, now)
    arrived: list[int] = []
    released = 0
    for what, value in steps:
        if what in ("arrive", "urgent"):
            assert real.arrive(now, value, what == "urgent") == model.arrive(now, value, what == "urgent")
            arrived += [now] * value
        until = now + (value if what in ("wait", "sleep") else 0)
        for _ in range(1000):
            due = real.due()
            assert due == model.due()
            assert (due == NEVER) == (real.queued == 0)
            if due > until:
                break
            now = max(due, now) + late
            went = real.release(network, now)
            assert went == model.release(network, now)
            if len(model.runs) < 15:
                assert went[1] >= now - arrived[released] or now < arrived[released] + MS
            released += 1
        now = max(now, until)
    assert released + real.queued == len(arrived)
    count(1, "pacer traces")


@given(
    arrivals=st.lists(st.integers(0, 60 * MS), min_size=1, max_size=300),
    pace=st.builds(Pace, max_delay_ns=st.integers(MS, SECOND), prefetch=st.integers(1, 8)),
)
@settings(max_examples=100, deadline=None)
def test_smooth_holds_nothing_longer_than_it_may(arrivals: list[int], pace: Pace) -> None:
    at, times = 0, []
    for gap in arrivals:
        at += gap
        times.append(at)
    went, held, _ = play(times, "smooth", pace)
    assert went == sorted(went), "reordered"
    assert went[0] - START == times[0], "the first token waited"
    assert max(held) <= pace.max_delay_ns
    assert all(a - START >= b for a, b in zip(went, times, strict=True)), "before it arrived"


@given(
    arrivals=st.lists(st.integers(0, 100 * MS), min_size=1, max_size=400),
    pace=st.builds(
        Pace,
        bucket=st.integers(5, 100),
        refill_rate=st.integers(5000, 60_000),
        leak_rate=st.integers(60_000, 80_000),
        burst_rate=st.integers(80_000, 200_000),
        burst=st.integers(1, 20),
    ),
)
@settings(max_examples=60, deadline=None)
def test_steady_never_exceeds_its_buckets(arrivals: list[int], pace: Pace) -> None:
    at, times = 0, []
    for gap in arrivals:
        at += gap
        times.append(at)
    went, _, _ = play(times, "steady", pace)
    assert went[0] - START == times[0], "the first token waited"
    for first in range(0, len(went), 7):
        for last in range(first + 1, len(went)):
            seconds = (went[last] - went[first]) / SECOND
            tokens = last - first
            assert tokens <= pace.bucket + pace.refill_rate / 1000 * seconds + 1.01
            assert tokens <= pace.burst_rate / 1000 * seconds + 1.01
            burst = pace.burst * (1 - pace.leak_rate / pace.burst_rate)
            assert tokens <= pace.leak_rate / 1000 * seconds + burst + 2.01


# --- what life looks like ---


def even(rate: float, tokens: int = 1000) -> list[int]:
    return [int(i * SECOND / rate) for i in range(tokens)]


@pytest.mark.parametrize("rate", [1, 10, 30, 50, 120, 400])
def test_even_input_is_not_held(rate: float) -> None:
    went, held, _ = play(even(rate), late_ns=20_000)
    assert quantile(held, 0.99) <= 1
    assert went[-1] - START <= even(rate)[-1] + MS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("one_in", "late_ms", "p99_ms"), [(50, 2, 1), (200, 8, 5)])
def test_an_even_stream_that_its_host_disturbs_is_hardly_held(
    seed: int, one_in: int, late_ms: int, p99_ms: int
) -> None:
    luck = random.Random(seed)
    times = [at + 50 * MS + int(luck.gauss(0, 0.1) * MS) for at in even(50, 2000)]
    times = [at + int(luck.uniform(0.5, 1) * late_ms * MS) * (luck.randrange(one_in) == 0) for at in times]
    went, held, _ = play(times, late_ns=100_000)
    assert quantile(held[50:], 0.5) <= 0.2
    assert quantile(held[50:], 0.99) <= p99_ms
    delivered = gaps(went, skip=50)
    assert min(delivered) >= 17
    assert sum(gap <= 23 for gap in delivered) / len(delivered) >= 0.99, "the rest were late already"


@pytest.mark.parametrize("seed", range(4))
def test_jitter_of_8_ms_is_taken_out(seed: int) -> None:
    luck = random.Random(seed)
    times, latest = [], 0
    for i in range(3000):
        latest = max(latest, int(50 * MS + i * 20 * MS + luck.gauss(0, 8) * MS))
        times.append(latest)
    went, held, _ = play(times)
    delivered = gaps(went, skip=50)
    mean = statistics.mean(delivered)
    assert abs(mean - 20) < 0.1
    assert statistics.pstdev(delivered) <= 0.95, "ms"
    assert sum(abs(gap - mean) <= 0.15 * mean for gap in delivered) / len(delivered) >= 0.99
    assert quantile(held, 0.5) <= 30
    assert quantile(held, 0.99) <= 200


def test_ten_at_once_leave_one_by_one() -> None:
    for spread in (0, 50_000):
        went, held, _ = play([i // 10 * 200 * MS + i % 10 * spread for i in range(1000)])
        assert statistics.pstdev(gaps(went, skip=30)) < 4, "ms"
        assert max(held) <= 200 * MS


def test_a_burst_is_worked_off_unseen() -> None:
    calm = even(50, 300)
    burst = [calm[-1] + 1] * 8
    after = [burst[-1] + at for at in even(50, 300)[1:]]
    went, held, _ = play(calm + burst + after)
    assert min(gaps(went, skip=10)) >= 16, "a visible burst"
    late = [wait for at, wait in zip(went, held, strict=True) if at >= START + burst[-1] + 2 * SECOND]
    assert max(late) <= MS, "back to its floor within 2 s"


def test_three_times_the_rate_for_a_second() -> None:
    calm = even(50, 200)
    surge = [calm[-1] + at for at in even(150, 151)[1:]]
    after = [surge[-1] + at for at in even(50, 300)[1:]]
    went, held, noticed = play(calm + surge + after)
    assert len(went) == len(calm) + len(surge) + len(after)
    late = [wait for at, wait in zip(went, held, strict=True) if at >= START + surge[-1] + 3 * SECOND]
    assert max(late) < 50 * MS
    assert max(held) <= 200 * MS
    assert any(bits & lib.CLAW_PACED_HIGH_WATER for bits in noticed)


def test_a_pause_is_no_new_pace() -> None:
    luck = random.Random(5)
    times, at = [], 0
    for _ in range(2000):
        at += 20 * MS
        if luck.random() < 0.01:
            at += luck.randint(300 * MS, 2 * SECOND)
        times.append(at)
    _, held, _ = play(times)
    assert quantile(held, 0.5) <= 5
    assert max(held) <= 100 * MS


def test_speculation_is_spread() -> None:
    luck = random.Random(6)
    times: list[int] = []
    while len(times) < 2000:
        times += [(len(times) and times[-1] // (60 * MS) + 1) * 60 * MS] * luck.randint(1, 6)
    went, held, _ = play(times)
    raw, paced = statistics.pstdev(gaps(times, 50)), statistics.pstdev(gaps(went, 50))
    assert paced < raw / 4
    assert max(held) <= 200 * MS


def test_a_slower_pace_is_believed_after_three_gaps() -> None:
    fast = even(50, 100)
    slow = [fast[-1] + at for at in even(10, 50)[1:]]
    _, held, noticed = play(fast + slow)
    assert any(bits & lib.CLAW_PACED_SLOWER for bits in noticed)
    assert max(held[-20:]) <= MS


def test_an_urgent_token_takes_all_before_it_along() -> None:
    pacer = Pacer("smooth", Pace(), START)
    pacer.arrive(START, 5)
    pacer.release(QUIET, START)
    assert pacer.due() > START
    pacer.arrive(START + MS, 1, urgent=True)
    for _ in range(5):
        assert pacer.due() <= START + MS
        pacer.release(QUIET, START + MS)
    assert pacer.due() == NEVER


def test_steady_spends_its_bucket_then_lands_on_its_refill() -> None:
    went, held, _ = play(even(80, 1200), "steady")
    first = [at for at in went if at < START + SECOND]
    assert 40 <= len(first) <= 54, "the leaky bucket's rate"
    late = [at for at in went if START + 10 * SECOND <= at < START + 11 * SECOND]
    assert 29 <= len(late) <= 31, "the token bucket's refill"
    assert held[-1] > SECOND, "the lag is there to be seen"


def test_steady_slows_down_with_the_network() -> None:
    """rate = base · (1 − loss) / (1 + jitter / 100 ms), O2."""
    for network, rate in ((Network(loss_ppm=100_000), 27.0), (Network(jitter_us=50_000), 20.0)):
        went, _, _ = play(even(80, 1200), "steady", network=network)
        late = [at for at in went if START + 10 * SECOND <= at < START + 20 * SECOND]
        assert abs(len(late) / 10 - rate) <= 1


def test_congestion_takes_a_tenth_a_second_and_gives_it_back() -> None:
    pacer = Pacer("steady", Pace(), START)
    pacer.arrive(START, 10_000)
    now = START

    def rate(network: Network, seconds: int) -> float:
        nonlocal now
        end, sent = now + seconds * SECOND, 0
        while True:
            due = max(pacer.due(), now)
            if due >= end:
                now = end
                return sent / seconds
            now = due
            pacer.release(network, now)
            sent += 1

    rate(QUIET, 10)
    assert 29 <= rate(QUIET, 4) <= 31
    rate(Network(congested=1), 10)
    assert 14 <= rate(Network(congested=1), 4) <= 16, "half is the least"
    rate(QUIET, 12)
    assert 29 <= rate(QUIET, 4) <= 31


@pytest.mark.parametrize("mode", MODES)
def test_a_clock_that_stands_or_leaps_does_no_harm(mode: str) -> None:
    pacer = Pacer(mode, Pace(), START)
    for now in (START, START, START + 2**50, START + 2**50, START + 2**62):
        pacer.arrive(now, 3)
        for _ in range(2):
            pacer.release(Network(2**32 - 1, 2**32 - 1, 1), now)
        assert pacer.due() < now + 3600 * SECOND
