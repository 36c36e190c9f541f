# SPDX-License-Identifier: Apache-2.0
"""The manual pages clawd(1), clawd-gateway(1) and clawctl(1), as roff, made from what `--help` is made from."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping

from clawd import __version__
from clawd.manual import roff
from clawd.sources import DEFAULT_FILE, DESCRIPTIONS, make_parser

_CODES = (("0", "done"), ("1", "failed"), ("2", "wrong usage"))
_MORE_CODES = (("3", "no clawd there"), ("4", "degraded"))


PROGRAMS = {
    "clawd": "relays the tokens of language models to those who read them",
    "clawd-gateway": "serves the streams of clawd over HTTP",
}
assert PROGRAMS.keys() == DESCRIPTIONS.keys()


def program_page(program: str) -> str:
    """clawd(1) or clawd-gateway(1)."""
    parser = make_parser(program)
    lines = [
        *_head(program, PROGRAMS[program]),
        *_synopsis(parser.usage or ""),
        ".SH DESCRIPTION",
        roff(parser.description or ""),
        ".SH OPTIONS",
        *_options(parser),
        ".SH FILES",
        ".TP",
        f".I {roff(str(DEFAULT_FILE))}",
        roff("Settings, with the drop-ins of the directory clawd.conf.d beside it; see clawd.conf(5)."),
        ".TP",
        ".I /run/clawd",
        "Lock and sockets, unless $CLAWD_RUNTIME_DIR or a setting names another directory.",
        *_codes(_CODES),
        *_also(*(f"{name}(1)" for name in ("clawctl", *PROGRAMS) if name != program), "clawd.conf(5)"),
    ]
    return "\n".join(lines) + "\n"


def clawctl_page(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """clawctl(1), from the parser of each verb and that of none."""
    top = parsers[""]
    lines = [
        *_head("clawctl", "looks at a running clawd, and steers it"),
        *_synopsis(top.usage or ""),
        ".SH DESCRIPTION",
        *(roff(line) for line in (top.description or "").split("\n")),
        ".SH OPTIONS",
        *_options(top),
        ".SH VERBS",
    ]
    common = {flag for action in top._actions for flag in action.option_strings}
    for verb, parser in parsers.items():
        if verb:
            about, _, example = (parser.epilog or "").partition("example:")
            lines += [f".SS {roff(verb)}", roff(parser.description or "")]
            lines += [".PP", roff(" ".join(about.split()))] if about.strip() else []
            lines += list(_options(parser, common))
            lines += [".PP", "Example:", ".br", roff(example.strip().split("\n")[0])]
    lines += [*_codes((*_CODES, *_MORE_CODES)), *_also("clawd(1)", "clawd-gateway(1)", "clawd.conf(5)")]
    return "\n".join(lines) + "\n"


def _head(name: str, what: str) -> Iterator[str]:
    yield from ('.\\" SPDX-License-Identifier: Apache-2.0', f'.TH {name.upper()} 1 "" "clawd {__version__}" "clawd"')
    yield from (".nh", ".ad l", ".SH NAME", f"{roff(name)} \\- {roff(what)}")


def _synopsis(usage: str) -> Iterator[str]:
    yield from (".SH SYNOPSIS", roff(usage))


def _options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> Iterator[str]:
    for action in parser._actions:
        if any(flag in without for flag in action.option_strings):
            continue
        name = ", ".join(action.option_strings)
        value = action.metavar if isinstance(action.metavar, str) else ""
        takes = not action.option_strings or action.nargs is None
        yield from (".TP", f".B {roff(f'{name} {value}'.strip() if takes else name)}", roff(action.help or ""))


def _codes(codes: tuple[tuple[str, str], ...]) -> Iterator[str]:
    yield ".SH EXIT STATUS"
    for code, meaning in codes:
        yield from (".TP", f".B {code}", meaning)


def _also(*pages: str) -> Iterator[str]:
    yield from (".SH SEE ALSO", roff(", ".join(pages)))
