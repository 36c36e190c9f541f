# SPDX-License-Identifier: Apache-2.0
"""Signals are called and readable, and afterwards all is as it was."""

from __future__ import annotations

import os
import select
import signal

import pytest

from clawd.signals import caught

pytestmark = pytest.mark.plain


def test_a_signal_is_called_and_readable_and_then_all_is_as_it_was() -> None:
    earlier = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(earlier[1])
    seen = []
    with caught({signal.SIGUSR1: lambda: seen.append(1)}) as woken:
        assert select.select([woken], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([woken], [], [], 10)[0] == [woken]
        assert woken.numbers() == bytes([signal.SIGUSR1])
        assert seen == [1]
        assert select.select([woken], [], [], 0)[0] == []
    assert signal.getsignal(signal.SIGUSR1) == earlier[0]
    assert signal.set_wakeup_fd(-1) == earlier[1]
    signal.set_wakeup_fd(earlier[1])
