# SPDX-License-Identifier: Apache-2.0
"""`clawctl trace`: where the time goes, stage by stage, down to the kernel. Detached again however it ends."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from clawd.ctl import render, trace_sched, trace_sockets, trace_stages, trace_stream
from clawd.ctl.client import figures
from clawd.ctl.terminal import Terminal, can_repaint
from clawd.ctl.trace_file import TraceFile
from clawd.ctl.trace_stages import CLASS_NAMES, STAGES, Row, Trace
from clawd.ctl.trace_target import target_of
from clawd.errors import HostError

HELP = "find the slow stage between engine and client"
EXAMPLE = "clawctl trace stages --duration 10 --json | tail -1 | jq .cost"
ABOUT = (
    "stages: from the write in the engine to the client's acknowledgement; BUDGET is the p99's share of what a first"
    " token may take in that part. sockets: each tcp client's round trip, jitter, loss, pacing and queue. stream ID:"
    " its tokens as they come, as a waterfall: how long each waited for its commit, was held by its pacer, and was on"
    " its way to a reader on this host, which is the command itself. sched: how long clawd's threads waited for a"
    " processor, and for whom. The times within clawd are taken by clawd itself; those in the kernel need root and"
    " python3-bpfcc. Lines below the table say what tells which stage, or why nothing does. In the kernel, first is"
    " what goes by the express lane: first and urgent tokens, and all of a client whose way loses much; rest is the"
    " bulk lane, which has a copy of that. Figures are since the trace began, and so is its own cost."
)
ACTIONS = ("stages", "sockets", "stream", "sched")
WORDS = ACTIONS
DURATION_MAX_S = 86_400.0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= DURATION_MAX_S:
        raise argparse.ArgumentTypeError(f'"{render.cell(text)}" is not allowed; it must be 0.1 to 86400 seconds')
    return value


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", default="stages", metavar="WHAT", help=", ".join(ACTIONS))
    parser.add_argument("stream", nargs="?", metavar="ID", help="the name of the stream, for stream")
    parser.add_argument("--duration", type=_seconds, metavar="S", help="end after so many seconds")
    parser.add_argument("--interval", type=_seconds, metavar="S", help="tell it so often (default 1; else at the end)")
    parser.add_argument("--stage", choices=STAGES, metavar="NAME", help=f"one alone: {', '.join(STAGES)}")
    parser.add_argument("--class", dest="klass", choices=CLASS_NAMES, metavar="NAME", help="first or rest")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write a file for trace viewers too")


def run(options: argparse.Namespace) -> int:
    if options.action not in ACTIONS:
        near = difflib.get_close_matches(options.action, ACTIONS, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"there is {', '.join(ACTIONS)}"
        return _wrong(f'no trace of "{render.cell(options.action)}"; {hint}')
    if (options.action == "stream") != (options.stream is not None):
        return _wrong("trace stream takes the name of a stream, and nothing else does")
    for flag, value, actions in (
        ("--stage", options.stage, ("stages",)),
        ("--class", options.klass, ("stages",)),
        ("--perfetto", options.perfetto, ("stages", "stream", "sched")),
        ("--interval", options.interval, ("stages", "sockets", "sched")),
    ):
        if value is not None and options.action not in actions:
            return _wrong(f"{flag} is of trace {', '.join(actions)}, not of {options.action}")
    with ExitStack() as stack:
        file = stack.enter_context(TraceFile(options.perfetto)) if options.perfetto else None
        stack.enter_context(_ended_by_signals())
        if options.action == "stream":
            return _stream(options, file)
        if options.action == "sockets":
            return _sockets(options)
        return _stages(options, file, stack)


def _wrong(text: str) -> int:
    print(f"clawctl: {text}", file=sys.stderr)
    return 2


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does: what was attached is detached, the file is closed."""

    def end(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _until(options: argparse.Namespace) -> float:
    return time.monotonic() + (options.duration or DURATION_MAX_S)


def _stages(options: argparse.Namespace, file: TraceFile | None, stack: ExitStack) -> int:
    is_sched = options.action == "sched"
    parts = ("sched",) if is_sched else ("writes",)
    trace = stack.enter_context(Trace(options.runtime_dir, parts))
    if is_sched and not trace.tracer:
        raise HostError(f"no run-queue delays can be traced: {trace.reason}", "sudo clawctl trace sched")

    def wanted(row: Row) -> bool:
        return options.stage in (None, row.name) and options.klass in (None, row.klass)

    def collect() -> dict[str, Any]:
        value = trace_sched.collect(trace) if is_sched else trace.collect(wanted)
        if file:
            file.stages(value)
        return value

    return _tell(options, collect, trace_sched.show if is_sched else trace_stages.show)


def _sockets(options: argparse.Namespace) -> int:
    if os.geteuid() != 0:
        raise HostError("looking at clawd's sockets needs root", "sudo clawctl trace sockets")
    with figures(options.runtime_dir):
        target = target_of(options.runtime_dir)
    if not options.duration and not options.interval and not can_repaint():
        options.duration = 0.0  # one look is a look
    return _tell(options, lambda: trace_sockets.collect(target), trace_sockets.show)


def _tell(
    options: argparse.Namespace, collect: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], str]
) -> int:
    """On a terminal over and over; else each interval, or at the end."""
    until = time.monotonic() + options.duration if options.duration is not None else _until(options)
    is_live = not options.json and can_repaint()
    # Without an end there is nothing to tell at it
    interval = options.interval or (1.0 if is_live or options.duration is None else DURATION_MAX_S)
    value: dict[str, Any] | None = None
    try:
        if is_live:
            with Terminal() as terminal:
                while time.monotonic() < until and terminal.wait(min(until, time.monotonic() + interval)):
                    value = collect()
                    terminal.paint(show(value))
        else:
            while time.monotonic() < until:
                time.sleep(max(0.0, min(interval, until - time.monotonic())))
                if time.monotonic() < until:
                    value = _print(options, collect(), show)
    except KeyboardInterrupt:
        pass  # what was seen until now is told
    value = value if is_live and value else collect()
    _print(options, value, show)
    return 0


def _print(options: argparse.Namespace, value: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    print(json.dumps(value) if options.json else show(value), flush=True)
    return value


def _stream(options: argparse.Namespace, file: TraceFile | None) -> int:
    for value in trace_stream.watch(options.runtime_dir, options.stream, _until(options)):
        _print(options, value, trace_stream.show)
        if file and "seq" in value:
            file.token(options.stream, value)
    return 0
