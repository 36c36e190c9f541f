# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several test modules use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_relay import FakeRelay

from clawd.consumer import Consumer


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[FakeRelay]:
    with FakeRelay(tmp_path) as running:
        yield running


@pytest.fixture
def consumer(relay: FakeRelay) -> Iterator[Consumer]:
    with Consumer(relay.directory) as connected:
        yield connected
