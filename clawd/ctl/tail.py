# SPDX-License-Identifier: Apache-2.0
"""`clawctl tail STREAM`: the text of a stream as it comes. Reads as an observer, which can do a stream no harm."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.client import figures
from clawd.errors import AttachError, ControlError, ReadTimeout
from clawd.page import Life, Unreachable

HELP = "show a stream's text as it comes"
ABOUT = (
    "Starts with the next token, as tail -f does; --from-start begins with all that is still kept. Ends with the"
    " stream; the reason goes to stderr. Nobody is cancelled or slowed down by it. With --json one object a token, then"
    ' {"end": reason}.'
)
EXAMPLE = "clawctl tail chatcmpl-1 --from-start"
_LOOK_S = 1.0
_GONE_S = 5
"""So long a daemon may be away, as in a restart, before tail gives up."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stream", metavar="STREAM", help="the name of the stream")
    parser.add_argument("--from-start", action="store_true", help="begin with the first token that is still kept")


def run(options: argparse.Namespace) -> int:
    from clawd.consumer import Consumer

    class Observer(Consumer):
        _role = "observer"

    after = _position(options)
    with Observer(options.runtime_dir) as consumer:
        reading = consumer.attach(options.stream, after, wait=0.0)
        gaps = silent = 0
        try:
            while True:
                try:
                    token = reading.read(_LOOK_S)
                    silent = 0
                except ReadTimeout:
                    silent = _check(options, silent)
                    continue
                for gap in reading.gaps[gaps:]:
                    _tell_gap(gap, options.json)
                gaps = len(reading.gaps)
                if token is None:
                    break
                _tell(token, options.json)
        except AttachError as error:
            raise ControlError(str(error), "clawctl streams lists them") from error
        if options.json:
            _print({"version": stats.VERSION, "end": reading.end_reason})
        else:
            _narrate(f"the stream ended: {render.cell(reading.end_reason)}")
    return 0


def _position(options: argparse.Namespace) -> str | None:
    """Where the stream is now, None for its start."""
    with figures(options.runtime_dir) as (page, life):
        if life is not Life.ANSWERING:
            raise Unreachable("clawd does not answer: it is stopped or held up", "try again, or see its log")
        row = stats.find_stream(page, options.stream)
    if row is None or row["state"] == "awaited":
        raise ControlError(f'no stream "{render.cell(options.stream)}" is open', "clawctl streams lists them")
    if row["state"] == "gone":
        raise ControlError(f'stream "{render.cell(options.stream)}" has ended and is not kept any more')
    return None if options.from_start or not row["next_seq"] else f"{row['incarnation']}-{row['next_seq'] - 1}"


def _check(options: argparse.Namespace, silent: int) -> int:
    """Nothing came for a while: is clawd still there? Returns for how many looks it was not."""
    try:
        with figures(options.runtime_dir):
            return 0
    except Unreachable:
        if silent + 1 >= _GONE_S:
            raise
        return silent + 1


def _tell(token: Any, as_json: bool) -> None:
    if as_json:
        _print(
            {
                "version": stats.VERSION,
                "seq": token.seq,
                "text": token.text,
                "written_ns": token.written_ns,
                "class": token.klass,
                "count": token.count,
            }
        )
        return
    # A model's words must not reach a terminal as an escape; a file or a pipe gets them as they are
    sys.stdout.write(_visible(token.text) if sys.stdout.isatty() else token.text)
    sys.stdout.flush()


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def _tell_gap(gap: Any, as_json: bool) -> None:
    if as_json:
        _print({"version": stats.VERSION, "gap": {"first": gap.first, "last": gap.last, "reason": gap.reason}})
    else:
        _narrate(f"tokens {gap.first} to {gap.last} are missing: {render.cell(gap.reason)}")


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _narrate(line: str) -> None:
    sys.stdout.flush()
    start = "\n" if sys.stdout.isatty() else ""
    print(f"{start}clawctl: {line}", file=sys.stderr, flush=True)
