# SPDX-License-Identifier: Apache-2.0
"""The `clawctl` command: a table of verbs. 0 done, 1 failed, 2 usage, 3 daemon unreachable, 4 degraded."""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from clawd import __version__
from clawd.config import default_runtime_dir
from clawd.core import guard
from clawd.ctl import (
    cancel,
    completion,
    config,
    consumers,
    demo,
    doctor,
    keys,
    pace,
    producers,
    reload,
    render,
    status,
    stop,
    streams,
    tail,
    top,
    trace,
    tune,
)
from clawd.errors import ClawdError
from clawd.page import Unreachable

# A verb has HELP and EXAMPLE, may have ABOUT and arguments(parser), and either run(options) or collect(options) with
# show(value) and, when its exit code is not that of every verb, code(value). HAS_OWN_OPTIONS: not those of every verb.
VERBS: dict[str, ModuleType] = {
    "status": status,
    "top": top,
    "streams": streams,
    "producers": producers,
    "consumers": consumers,
    "tail": tail,
    "cancel": cancel,
    "pace": pace,
    "config": config,
    "reload": reload,
    "stop": stop,
    "trace": trace,
    "doctor": doctor,
    "keys": keys,
    "tune": tune,
    "demo": demo,
    "completion": completion,
}
VALUED = ("--runtime-dir",)
"""Options of every verb that take a value, which is no verb."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
CODES = "exit codes: 0 done, 1 failed, 2 wrong usage, 3 no clawd there, 4 degraded"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"clawctl: {message} ({self.prog} --help shows what there is)", file=sys.stderr)
        raise SystemExit(2)


def _formatter(prog: str) -> argparse.RawDescriptionHelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=79)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIR",
        default=default_runtime_dir(),
        help=f"clawd's runtime directory (default {default_runtime_dir()})",
    )
    parser.add_argument("--json", action="store_true", help="JSON of raw integers, for programs")


def _top_parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {name:<12}{module.HELP}" for name, module in VERBS.items())
    examples = "\n".join(f"  {module.EXAMPLE}" for module in VERBS.values())
    parser = _Parser(
        prog="clawctl",
        usage="clawctl [VERB] [--runtime-dir DIR] [--json] …",
        description="Look at a running clawd. Without a verb: status.\n`clawctl VERB --help` tells more of one.",
        epilog=f"verbs:\n{verbs}\n\nexamples:\n{examples}\n\n{CODES}",
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    _add_common(parser)
    parser.add_argument("--version", action="version", version=f"clawctl {__version__}", help="show the version")
    return parser


def _verb_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"clawctl {name}",
        description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
        epilog=f"{render.paragraph(getattr(module, 'ABOUT', ''), 79)}example:\n  {module.EXAMPLE}\n\n{CODES}",
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    add_arguments = getattr(module, "arguments", None)
    if add_arguments:
        add_arguments(parser)
    if not getattr(module, "HAS_OWN_OPTIONS", False):
        _add_common(parser)
    # For `completion`: all that can be said
    parser.set_defaults(parsers=_parsers, words=getattr(module, "WORDS", ()))
    return parser


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """Each verb's, and that of none, by the verb."""
    return {"": _top_parser(), **{name: _verb_parser(name, module) for name, module in VERBS.items()}}


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The verb, empty when there is none, and everything else."""
    rest = list(arguments)
    at = 0
    while at < len(rest):
        if not rest[at].startswith("-"):
            return rest.pop(at), rest
        at += 2 if rest[at] in VALUED else 1
    return "", rest


def _run(module: ModuleType, options: argparse.Namespace) -> int:
    run: Any = getattr(module, "run", None)
    if run:
        return int(run(options))
    value = module.collect(options)
    print(json.dumps(value) if options.json else module.show(value), flush=True)
    code: Any = getattr(module, "code", None)
    if code:
        return int(code(value))
    if value.get("unread"):
        print(f"clawctl: {value['unread']} rows could not be read: clawd stopped in them", file=sys.stderr)
    if value.get("answering") is False:
        print("clawctl: clawd does not answer: it is stopped or held up, and these figures are old", file=sys.stderr)
        return 4
    return 0


def _discard_output() -> None:
    # Python would write what is left, and complain, at its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    verb, rest = _split(sys.argv[1:] if arguments is None else arguments)
    if not verb and {"-h", "--help", "--version"} & set(rest):
        _top_parser().parse_args(rest)
    module = VERBS.get(verb or "status")
    if module is None:
        near = difflib.get_close_matches(verb, VERBS, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"verbs: {', '.join(VERBS)}"
        print(f'clawctl: no verb "{render.cell(verb)}"; {hint}', file=sys.stderr)
        return 2
    options = _verb_parser(verb or "status", module).parse_args(rest)
    try:
        guard()  # against a page that is truncated while it is read
        return _run(module, options)
    except BrokenPipeError:
        _discard_output()  # whoever read it has enough
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _discard_output()
        print(f"clawctl: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except Unreachable as error:
        print(f"clawctl: {error}", file=sys.stderr)
        return 3
    except ClawdError as error:
        print(f"clawctl: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
