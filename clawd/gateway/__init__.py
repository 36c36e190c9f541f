# SPDX-License-Identifier: Apache-2.0
"""`clawd-gateway`: clawd's streams over HTTP, its figures for Prometheus. A process of its own, without privilege."""

from __future__ import annotations

import sys


def command() -> int:
    """The installed `clawd-gateway`. An engine's environment has it too, but not what it serves HTTP with."""
    try:
        from clawd.gateway.main import main
    except ModuleNotFoundError as error:
        if (error.name or "clawd").partition(".")[0] == "clawd":
            raise
        print(f"clawd-gateway: the module {error.name} is missing; run: pip install 'clawd[gateway]'", file=sys.stderr)
        return 1
    return main()
