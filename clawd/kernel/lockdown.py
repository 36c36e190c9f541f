# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel keeps even root from what tracing and BPF need: kernel_lockdown(7)."""

from __future__ import annotations

from pathlib import Path

STATE = Path("/sys/kernel/security/lockdown")
HINT = "boot without lockdown=, which secure boot may bring"


def mode() -> str:
    """`integrity` or `confidentiality`; empty: there is none, or it cannot be seen."""
    try:
        _before, mark, rest = STATE.read_text().partition("[")
    except OSError:
        return ""
    chosen = rest.partition("]")[0]
    return chosen if mark and chosen != "none" else ""
