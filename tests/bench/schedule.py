# SPDX-License-Identifier: Apache-2.0
"""When tokens are written: the same for every path in a run, from a seed."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator

TEXT = "0123456789abcdef"
"""A token of 16 bytes."""
PR_SET_TIMERSLACK = 29  # prctl(2)


def instants(rate: float, count: int, step: int, seed: int) -> Iterator[float]:
    """Seconds from the start at which the next `step` tokens are written: Poisson, `rate` tokens a second in all."""
    dice = random.Random(seed)
    at = 0.0
    for _ in range(0, count, step):
        at += dice.expovariate(rate / step)
        yield at


def sleep_exactly() -> None:
    """Let this thread's sleeps end when they should: the default slack of 50 us would be most of what is measured."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def paced(rate: float, count: int, step: int, seed: int) -> Iterator[int]:
    """The number of each step when its time has come; as fast as possible with rate 0. Late steps are not skipped."""
    if not rate:
        yield from range(0, count, step)
        return
    sleep_exactly()
    start = time.monotonic()
    for number, at in enumerate(instants(rate, count, step, seed)):
        while (left := start + at - time.monotonic()) > 0:
            time.sleep(left)
        yield number * step


def quantile(values: list[int], share: float) -> float:
    """In microseconds, of values in ns; sorts them."""
    if not values:
        return 0.0
    values.sort()
    return values[min(len(values) - 1, int(share * len(values)))] / 1000
