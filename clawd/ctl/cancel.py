# SPDX-License-Identifier: Apache-2.0
"""`clawctl cancel STREAM`: end a stream for its producer and everybody who reads it."""

from __future__ import annotations

import argparse
from typing import Any

from clawd import protocol, stats
from clawd.ctl import render
from clawd.ctl.client import Client, figures
from clawd.errors import ControlError, ProtocolError
from clawd.page import Life, Unreachable

HELP = "end a live stream for everybody"
ABOUT = (
    "The engine is told at its next token, readers get the end `cancelled`. For root and clawd's own user."
    " A stream that is unknown or has ended is exit 1."
)
EXAMPLE = "clawctl cancel chatcmpl-1 --dry-run"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stream", metavar="STREAM", help="the name of the stream")
    parser.add_argument("--dry-run", action="store_true", help="say what would be cancelled, and leave it")


def collect(options: argparse.Namespace) -> dict[str, Any]:
    try:
        request = protocol.decode(protocol.encode(protocol.CancelStream(options.stream)), (protocol.CancelStream,))
    except ProtocolError as error:
        raise ControlError(f"this is no name of a stream: {error}") from error
    with figures(options.runtime_dir) as (page, life):
        row = stats.find_stream(page, options.stream)
        if options.dry_run and (row is None or row["state"] == "awaited"):
            raise ControlError(f'no stream "{options.stream}" is open', "clawctl streams lists them")
        if options.dry_run and row is not None and row["state"] != "live":
            raise ControlError(f'stream "{options.stream}" has ended already')
        if life is not Life.ANSWERING and not options.dry_run:
            raise Unreachable("clawd does not answer: it is stopped or held up", "try again, or see its log")
    if not options.dry_run:
        with Client(options.runtime_dir) as client:
            client.ask(request, protocol.StreamCancelled)
    return {
        "version": stats.VERSION,
        "stream": options.stream,
        "dry_run": options.dry_run,
        "cancelled": not options.dry_run,
        "tokens": row["tokens"] if row else None,
        "readers": row["attachments"] if row else None,
    }


def show(value: dict[str, Any]) -> str:
    tokens, readers = (render.cell(value[name]) for name in ("tokens", "readers"))
    verb = "would cancel" if value["dry_run"] else "cancelled"
    return render.fold(f"{verb} {render.cell(value['stream'])} after {tokens} tokens, {readers} readers", 2)
