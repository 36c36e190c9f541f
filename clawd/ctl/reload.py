# SPDX-License-Identifier: Apache-2.0
"""`clawctl reload`: have the daemon read its configuration again."""

from __future__ import annotations

import argparse
import json
import sys

from clawd import protocol
from clawd.ctl import render
from clawd.ctl.client import Client

HELP = "have clawd read its configuration again"
EXAMPLE = "clawctl config check && clawctl reload"
ABOUT = (
    "All of the new configuration counts, or with any error none of it. Settings that only a restart can change are"
    " named. For root and clawd's own user."
)
VERSION = 1


def run(options: argparse.Namespace) -> int:
    with Client(options.runtime_dir) as client:
        answer = client.ask(protocol.Reload(), protocol.Reloaded)
    errors = answer.errors
    if options.json:
        print(json.dumps({"version": VERSION, **vars(answer)}), flush=True)
    elif errors:
        print(*(render.cell(error) for error in errors), sep="\n", file=sys.stderr)
        print("clawctl: not reloaded, clawd goes on with its old configuration", file=sys.stderr)
    else:
        print(f"generation {answer.generation}; changed: {', '.join(answer.changed) or 'nothing'}", flush=True)
        if answer.pending_restart:
            print(f"a restart is needed for: {', '.join(answer.pending_restart)}", flush=True)
    return 1 if errors else 0
