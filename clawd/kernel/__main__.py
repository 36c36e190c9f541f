# SPDX-License-Identifier: Apache-2.0
"""The `clawd-kernel` command. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clawd import __version__, log, protocol
from clawd.errors import ClawdError
from clawd.kernel.helper import Helper, find_user


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="clawd-kernel",
        description="The privileged helper of clawd: does what needs rights that clawd lacks, when clawd's user or root"
        " asks for it on its socket. SIGTERM stops it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"clawd-kernel {__version__}")
    parser.add_argument(
        "--dir", type=Path, default=Path(protocol.KERNEL_DIR), help="directory of its socket (default %(default)s)"
    )
    parser.add_argument("--user", default="clawd", help="clawd's user (default %(default)s)")
    options = parser.parse_args(arguments)
    log.start(name="clawd-kernel")
    try:
        with Helper(options.dir, find_user(options.user)) as helper:
            helper.run()
    except ClawdError as error:
        print(f"clawd-kernel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
