# SPDX-License-Identifier: Apache-2.0
"""The heap of timers against a dict."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd.core import ffi, lib

MAX = 40
NONE = 2**32 - 1


class Timers:
    def __init__(self, max: int) -> None:
        self.raw = ffi.new("struct claw_timers *")
        assert lib.claw_timers_init(self.raw, max) == 0

    def __enter__(self) -> Timers:
        return self

    def __exit__(self, *exception: object) -> None:
        lib.claw_timers_deinit(self.raw)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(0, MAX - 1), st.integers(0, 60)),
            st.tuples(st.just("take"), st.just(0), st.integers(0, 60)),
        ),
        max_size=200,
    )
)
@settings(max_examples=200, deadline=None)
def test_what_is_due_next(steps: list[tuple[str, int, int]]) -> None:
    model: dict[int, int] = {}
    with Timers(MAX) as timers:
        for what, stream, value in steps:
            if what == "set":
                lib.claw_timers_set(timers.raw, stream, value)
                model.pop(stream, None)
                if value:
                    model[stream] = value
            else:
                while (due := lib.claw_timers_due(timers.raw, value)) != NONE:
                    assert model.pop(due) <= value
                    lib.claw_timers_set(timers.raw, due, 0)
                assert all(at > value for at in model.values())
            assert lib.claw_timers_next(timers.raw) == min(model.values(), default=0)
            assert timers.raw.count == len(model)


@pytest.mark.parametrize("seed", range(3))
def test_many_come_in_order(seed: int) -> None:
    luck = random.Random(seed)
    count = 50_000
    with Timers(count) as timers:
        for stream in range(count):
            lib.claw_timers_set(timers.raw, stream, luck.randint(1, 10**12))
        for stream in luck.sample(range(count), count // 2):
            lib.claw_timers_set(timers.raw, stream, luck.choice([0, luck.randint(1, 10**12)]))
        latest, seen = 0, 0
        while (due := lib.claw_timers_due(timers.raw, 10**12)) != NONE:
            assert timers.raw.due_ns[due] >= latest
            latest = timers.raw.due_ns[due]
            lib.claw_timers_set(timers.raw, due, 0)
            seen += 1
        assert count // 2 < seen < count
