# SPDX-License-Identifier: Apache-2.0
"""Each test starts with clawd and its helper running as installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host import UNITS, run


@pytest.fixture(autouse=True)
def running() -> None:
    run("systemctl", "reset-failed", check=False)
    started = run("systemctl", "start", *UNITS, check=False)
    assert started.returncode == 0, run("journalctl", "-b", "-n", "30", "--no-pager").stdout


@pytest.fixture
def no_drop_ins() -> Iterator[None]:
    """Takes away what a test put beside the units and the configuration."""
    yield
    run("rm", "-rf", "/etc/systemd/system/clawd.service.d", "/etc/clawd/clawd.conf.d")
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "clawd")
