# SPDX-License-Identifier: Apache-2.0
"""The `clawd-kernel` command. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clawd import __version__, log, protocol
from clawd.config import Config
from clawd.errors import ClawdError, ConfigErrors
from clawd.kernel import boot, tree
from clawd.kernel.boost import Booster
from clawd.kernel.helper import ABILITIES, Helper, find_user
from clawd.kernel.journal import DIRECTORY
from clawd.kernel.shaper import PINS, Shaper, default_cgroup
from clawd.kernel.weight import Weights
from clawd.sources import DEFAULT_FILE, Sources


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
    parser.add_argument(
        "--cgroup",
        type=Path,
        help="control group whose sockets are shaped, with the slices that are weighed beside it"
        " (default: clawd.slice of version 2)",
    )
    parser.add_argument(
        "--bpf-dir", type=Path, default=PINS, help="BPF file system that programs are pinned in (default %(default)s)"
    )
    parser.add_argument("--user", default="clawd", help="clawd's user (default %(default)s)")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"clawd's settings (default {DEFAULT_FILE})")
    parser.add_argument(
        "--state-dir", type=Path, default=DIRECTORY, help="of the journal of tuning (default %(default)s)"
    )
    parser.add_argument("--relax", action="store_true", help="put back weights that one left that was killed, and end")
    options = parser.parse_args(arguments)
    log.start(name="clawd-kernel")
    try:
        weights = Weights(mount=options.cgroup and options.cgroup.parent)
        booster = Booster(tree.load(), weights, options.state_dir)
        if options.relax:
            boot.relax(booster)
            return 0
        shaper = Shaper(options.cgroup or default_cgroup(), options.bpf_dir)
        with Helper(options.dir, find_user(options.user), shaper, booster) as helper:
            boot.relax(booster)
            boot.tune(_config(options.config), options.state_dir)
            # Tuning wanted root's own; requests want these
            boot.keep_only([bit for bit, _ in ABILITIES.values()])
            helper.run()
    except ClawdError as error:
        print(f"clawd-kernel: {error}", file=sys.stderr)
        return 1
    return 0


def _config(file: Path | None) -> Config:
    """Nothing is tuned when the settings have an error, which is for clawd to be told of; requests are served."""
    try:
        return Sources(file).load().config
    except ConfigErrors as errors:
        for error in errors.errors:
            log.failure("settings not read", error)
        return Config()


if __name__ == "__main__":
    sys.exit(main())
