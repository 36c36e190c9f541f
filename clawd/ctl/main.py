# SPDX-License-Identifier: Apache-2.0
"""The `clawctl` command: a table of verbs. 0 done, 1 failed, 2 usage, 3 daemon unreachable."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from clawd import __version__
from clawd.config import default_runtime_dir
from clawd.ctl import config, reload, status, streams
from clawd.ctl.client import Client, Unreachable
from clawd.errors import ClawdError

# A verb has HELP, and either collect(client) with show(value), or EXAMPLE and run(options), perhaps ABOUT and
# arguments(parser)
VERBS: dict[str, ModuleType] = {"status": status, "streams": streams, "config": config, "reload": reload}
EXAMPLES = """\
examples:
  clawctl                        the same as clawctl status
  clawctl streams                what is being relayed
  clawctl status --json | jq .totals.tokens
  clawctl config check && clawctl reload
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"clawctl: {message} (clawctl --help shows the verbs)", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {name:<12}{module.HELP}" for name, module in VERBS.items())
    parser = _Parser(
        prog="clawctl",
        usage="clawctl [VERB] [--runtime-dir DIR] [--json]",
        description="Look at a running clawd.",
        epilog=f"verbs:\n{verbs}\n\n{EXAMPLES}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=79),
        allow_abbrev=False,
    )
    parser.add_argument("verb", nargs="?", default="status", metavar="VERB", help="what to do (default status)")
    _add_common(parser)
    parser.add_argument("--version", action="version", version=f"clawctl {__version__}", help="show the version")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIR",
        default=default_runtime_dir(),
        help=f"clawd's runtime directory (default {default_runtime_dir()})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object of raw integers, for programs")


def _verb_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"clawctl {name}",
        description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
        epilog=f"{module.ABOUT}\n\nexample:\n  {module.EXAMPLE}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=79),
        allow_abbrev=False,
    )
    if hasattr(module, "arguments"):
        module.arguments(parser)
    _add_common(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    module = VERBS.get(given[0]) if given else None
    if module and hasattr(module, "run"):
        options = _verb_parser(given[0], module).parse_args(given[1:])
    else:
        options = _parser().parse_args(given)
        module = VERBS.get(options.verb)
    if module is None:
        near = difflib.get_close_matches(options.verb, VERBS, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"verbs: {', '.join(VERBS)}"
        print(f'clawctl: no verb "{options.verb}"; {hint}', file=sys.stderr)
        return 2
    try:
        if hasattr(module, "run"):
            return int(module.run(options))
        with Client(options.runtime_dir) as client:
            value = module.collect(client)
        print(json.dumps(value) if options.json else module.show(value), flush=True)
    except BrokenPipeError:
        # Whoever read our output has enough; Python would complain at exit otherwise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Unreachable as error:
        print(f"clawctl: {error}", file=sys.stderr)
        return 3
    except ClawdError as error:
        print(f"clawctl: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
