# SPDX-License-Identifier: Apache-2.0
"""`clawctl`: one file a verb, each of which collects a value that is shown as a table or as JSON."""

from __future__ import annotations

import sys


def command() -> int:
    """The installed `clawctl`. An engine's environment has it too, but not what it draws tables with."""
    try:
        from clawd.ctl.main import main
    except ModuleNotFoundError as error:
        if (error.name or "clawd").partition(".")[0] == "clawd":
            raise
        print(f"clawctl: the module {error.name} is missing; run: pip install 'clawd[daemon]'", file=sys.stderr)
        return 1
    return main()
