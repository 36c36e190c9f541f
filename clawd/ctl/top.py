# SPDX-License-Identifier: Apache-2.0
"""`clawctl top`: what clawd does right now, once a second, from its page alone."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from clawd.ctl import render
from clawd.ctl.client import figures
from clawd.ctl.rates import Look, between, look
from clawd.ctl.terminal import Terminal, can_repaint
from clawd.page import Unreachable

HELP = "watch rates, streams, producers and clients live"
ABOUT = (
    "Rates and latencies are those of the last interval. Figures are read from shared memory: clawd is not asked, so"
    " watching costs it nothing. q or Ctrl-C ends it. Into a pipe or a file it writes one snapshot after the other."
    " FIRST is how many first tokens are waited for, what was asked for them, and how much of the time clawd's threads"
    " waited for a processor. KEPT is what the spool holds of a stream, UNACKED what a client was sent and has not"
    " acknowledged: its lag. GAP is between tokens as they went, RAW as they came, HELD what lies between."
    " With --json one object a line."
)
EXAMPLE = "clawctl top --count 10 --json | jq .tokens_out_per_second"
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.1, 3600.0
ROWS = 10
"""Streams shown where there is no screen to fill."""
SHOWN = ("written_to_sent", "first_token", "held", "gap")
"""Of the latencies; `clawctl status` has them all."""
_GONE_S = 5.0
"""So long a daemon may be away, as in a restart, before top gives up."""


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not INTERVAL_MIN_S <= value <= INTERVAL_MAX_S:
        raise argparse.ArgumentTypeError(f'"{render.cell(text)}" is not allowed; it must be 0.1 to 3600 seconds')
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise argparse.ArgumentTypeError(f'"{render.cell(text)}" is not allowed; it must be 1 or more')
    return int(text[:9])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="seconds between two (default 1)")
    parser.add_argument("--count", type=_count, metavar="N", help="end after so many")
    parser.add_argument("--rows", type=_count, metavar="N", help=f"streams to show (default {ROWS}, or a screenful)")


def run(options: argparse.Namespace) -> int:
    before = _look(options)  # before the screen is taken: an error stands where the next prompt will
    if options.json or not can_repaint():
        return _print(options, before)
    with Terminal() as terminal:
        return _watch(options, before, terminal)


def _look(options: argparse.Namespace) -> Look:
    # Opened each time: the next clawd after a restart has another page
    with figures(options.runtime_dir) as (page, life):
        return look(page, life)


def _print(options: argparse.Namespace, before: Look) -> int:
    shown = 0
    due = time.monotonic()
    while True:
        due = max(due + options.interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        now = _look(options)
        value = between(before, now, options.rows or ROWS)
        print(json.dumps(value) if options.json else ("\n" if shown else "") + show(value), flush=True)
        before, shown = now, shown + 1
        if shown == options.count:
            return _end(value)


def _end(value: dict[str, Any]) -> int:
    if value["unread"]:
        print(f"clawctl: {value['unread']} rows could not be read: clawd stopped in them", file=sys.stderr)
    if not value["answering"]:
        print("clawctl: clawd does not answer: it is stopped or held up, and these figures are old", file=sys.stderr)
        return 4
    return 0


def _watch(options: argparse.Namespace, before: Look, terminal: Terminal) -> int:
    value = between(None, before, options.rows or terminal.rows)
    terminal.paint(show(value, terminal.rows))
    shown, seen, due = 0, time.monotonic(), time.monotonic()
    while shown != options.count:
        due = max(due + options.interval, time.monotonic())
        if not terminal.wait(due):
            break
        try:
            now = _look(options)
        except Unreachable as error:
            if time.monotonic() - seen > _GONE_S:
                raise
            terminal.paint(render.fold(f"{render.cell(error)}; waiting for the next", 2))
            continue
        value = between(before, now, options.rows or terminal.rows)
        terminal.paint(show(value, terminal.rows))
        before, shown, seen = now, shown + 1, time.monotonic()
    return 0 if value["answering"] else 4


def show(value: dict[str, Any], rows: int | None = None) -> str:
    """As tables; in `rows` lines, of which streams get what the others leave."""
    head = _head(value)
    producers, consumers = _producers(value), _consumers(value)
    if rows is None:
        parts = [head, _streams(value, None), producers, consumers]
    else:
        # Half of what is below the head is the streams', and what the others do not need
        room = max(0, rows - len(head) - 3)
        streams = min(len(value["streams"]) + 1, max(room // 2, room - len(producers) - len(consumers)))
        rest = max(0, room - streams)
        producers = producers[: max(rest // 2, rest - len(consumers))]
        parts = [head, _streams(value, streams), producers, consumers[: rest - len(producers)]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _rate(value: float | None) -> str:
    return render.ABSENT if value is None else f"{value:.0f}"


def _share(ns_per_second: float | None) -> str:
    """Of the time. Of clawd's threads together, so it may be more than all of it."""
    return render.ABSENT if ns_per_second is None else f"{ns_per_second / 1e7:.1f}%"


def _times(value: dict[str, Any], name: str) -> str:
    row = value["latency"][name]
    return f"p50 {render.duration(row['p50_ns'])}, p99 {render.duration(row['p99_ns'])}"


def _head(value: dict[str, Any]) -> list[str]:
    state = "" if value["answering"] else "; DOES NOT ANSWER, these figures are old"
    lines = [
        f"clawd {value['clawd_version']}, pid {value['pid']}, up {render.duration(value['uptime_ns'])}{state}",
        f"tokens/s   {_rate(value['tokens_in_per_second'])} in, {_rate(value['tokens_out_per_second'])} out,"
        f" {value['tokens_per_wakeup'] or render.ABSENT} of a stream at once",
        f"streams    {value['streams_live']} live, {value['streams_awaited']} awaited, {value['streams_ended']} ended;"
        f" {value['attachments']} readings",
        f"first      {value['first_waiting']} wait, {value['boosts']} boosts, {value['boost']};"
        f" pressure {value['pressure']}, late {_share(value['waited_ns_per_second'])}",
        f"spool      {render.size(value['spool_used_bytes'])} of {render.size(value['spool_bytes'])} in use",
    ]
    for name in SHOWN:
        lines.append(f"latency    {name.replace('_', ' ')}: {_times(value, name)}")
    lines[-1] += f"; raw {_times(value, 'gap_raw')}"
    return "\n".join(render.fold(line, 11) for line in lines).splitlines()


def _streams(value: dict[str, Any], most: int | None) -> list[str]:
    rows = [
        (
            row["name"],
            _rate(row["tokens_per_second"]),
            row["readers"],
            render.size(row["spool_bytes"]),
            row["tokens"],
            f"{row['lag_ms']} ms",
        )
        for row in value["streams"]
    ]
    return render.table(("stream", "tokens/s", "readers", "kept", "tokens", "held"), rows).splitlines()[:most]


def _producers(value: dict[str, Any]) -> list[str]:
    rows = [
        (
            row["name"],
            _rate(row["tokens_per_second"]),
            f"{100 * row['used_bytes'] // max(1, row['ring_bytes'])}%",
            row["streams"],
            row["state"],
            row["pid"] or None,
        )
        for row in value["producers"]
    ]
    return render.table(("producer", "tokens/s", "ring", "streams", "state", "pid"), rows).splitlines()


def _consumers(value: dict[str, Any]) -> list[str]:
    rows = [
        (
            row["name"],
            render.size(row["unacked_bytes"]),
            "blocked" if row["blocked"] else "",
            row["attachments"],
            row["role"],
            row["pid"] or None,
        )
        for row in value["consumers"]
    ]
    return render.table(("client", "unacked", "socket", "readings", "role", "pid"), rows).splitlines()
