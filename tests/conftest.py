# SPDX-License-Identifier: Apache-2.0
"""Shows at a run's end what the proofs counted."""

from __future__ import annotations

import pytest

import counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if sums := counts.of_this_run():
        terminalreporter.write_line(f"counted: {counts.text(sums)}")
