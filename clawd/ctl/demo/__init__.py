# SPDX-License-Identifier: Apache-2.0
"""`clawctl demo`, `scripts/demo`: a private daemon, producers in processes of their own and a client, and whether all
of it arrived.
"""

import argparse

HELP = "see a private clawd at work, and whether every token arrived"
ABOUT = (
    "Starts a clawd of its own, lets producer processes write tokens into it, reads them back as they arrive and"
    " accounts for every one. Nothing is left behind, and no other clawd is touched. Without --text three producers run"
    " at once: English prose, Chinese prose and figures."
)
EXAMPLE = "clawctl demo --rate 0 --json | jq .added_us"
HAS_OWN_OPTIONS = True


def arguments(parser: argparse.ArgumentParser) -> None:
    from clawd.ctl.demo.command import arguments

    arguments(parser)


def run(options: argparse.Namespace) -> int:
    from clawd.ctl.demo.command import run

    return run(options)
