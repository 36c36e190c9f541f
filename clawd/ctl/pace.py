# SPDX-License-Identifier: Apache-2.0
"""`clawctl pace MODE [STREAM]`: how tokens are spread over time, from now on."""

from __future__ import annotations

import argparse
from typing import Any

from clawd import protocol, stats
from clawd.config import PACES
from clawd.ctl import render
from clawd.ctl.client import Client, figures
from clawd.errors import ControlError, ProtocolError

HELP = "set how tokens are spread over time"
ABOUT = (
    "Of one stream, or of all that made no choice of their own; tokens that are held go by the new rule at once."
    " Without a stream it counts until the configuration is read again: to keep it, set `pace` in clawd.conf."
    " `default` gives a stream back to the configuration. For root and clawd's own user."
)
EXAMPLE = "clawctl pace off"
WORDS = (*PACES, "default")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", metavar="MODE", choices=WORDS, help=", ".join(WORDS))
    parser.add_argument("stream", metavar="STREAM", nargs="?", help="the name of one stream")
    parser.add_argument("--dry-run", action="store_true", help="say what would be set, and leave it")


def collect(options: argparse.Namespace) -> dict[str, Any]:
    if options.mode == "default" and not options.stream:
        raise ControlError('"default" is for one stream', "name it, or run clawctl reload")
    try:
        request = protocol.SetPace(options.mode, options.stream)
        protocol.decode(protocol.encode(request), (protocol.SetPace,))
    except ProtocolError as error:
        raise ControlError(f"this is no name of a stream: {error}") from error
    if options.dry_run:
        _find(options)
    else:
        with Client(options.runtime_dir) as client:
            client.ask(request, protocol.PaceSet)
    return {"version": stats.VERSION, "mode": options.mode, "stream": options.stream, "dry_run": options.dry_run}


def _find(options: argparse.Namespace) -> None:
    """What clawd would refuse is refused here too."""
    with figures(options.runtime_dir) as (page, _):
        row = stats.find_stream(page, options.stream) if options.stream else None
    if options.stream and (row is None or row["state"] not in ("live", "ended")):
        raise ControlError(f'no stream "{options.stream}" is open or kept', "clawctl streams lists them")


def show(value: dict[str, Any]) -> str:
    what = (
        f"stream {render.cell(value['stream'])}" if value["stream"] else "all streams that made no choice of their own"
    )
    verb = "would pace" if value["dry_run"] else "paced"
    return render.fold(f"{verb} {value['mode']}: {what}", 2)
