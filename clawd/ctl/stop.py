# SPDX-License-Identifier: Apache-2.0
"""`clawctl stop`: end the daemon as SIGTERM does, at once or when its streams have ended, and wait for that."""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import time
from typing import Any

from clawd import protocol, stats
from clawd.ctl import render
from clawd.ctl.client import Client, figures
from clawd.errors import ControlError
from clawd.page import Life, Unreachable, is_locked, read_instance

HELP = "stop clawd, at once or when its streams have ended"
ABOUT = (
    "What was written before is sent first; engines and clients find the next clawd by themselves. With --drain it"
    " waits for the live streams to end: they and their readers go on, new readers too, while new streams and new"
    " producers are refused. Ending clawctl does not end a drain. What clawd holds stays for its next start, unless"
    " --discard gives it up: all tokens are gone and producers must attach anew; it works when no clawd runs, too."
    " For root and clawd's own user."
    " Exit 1 when it has not stopped in time."
)
EXAMPLE = "clawctl stop --drain=60"
DRAIN_S = 30
PATIENCE_S = 10.0
"""How long clawd may take to end once nothing holds it up."""


def _seconds(text: str) -> int:
    most = protocol.DRAIN_MS_MAX // 1000
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f'"{render.cell(text)}" is not allowed; it must be 1 to {most} seconds')
    return int(text)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain", type=_seconds, nargs="?", const=DRAIN_S, default=0, metavar="S",
        help=f"wait for live streams to end, at most so many seconds ({DRAIN_S})",
    )  # fmt: skip
    parser.add_argument("--discard", action="store_true", help="leave nothing for the next start")
    parser.add_argument("--dry-run", action="store_true", help="say what would be stopped, and leave it")


def collect(options: argparse.Namespace) -> dict[str, Any]:
    try:
        with figures(options.runtime_dir) as (page, life):
            before = stats.status(page, life)
    except Unreachable:
        if not options.discard:
            raise
        return _discard(options)
    if life is not Life.ANSWERING and not options.dry_run:
        raise Unreachable(
            "clawd does not answer: it is stopped or held up", f"kill -CONT {before['pid']}, or see its log"
        )
    value = {
        "version": stats.VERSION,
        "pid": before["pid"],
        "dry_run": options.dry_run,
        "drain_s": options.drain,
        "discard": options.discard,
        "streams_live": before["totals"]["streams_live"],
        "producers": before["producers"],
        "clients": before["clients"],
        "stopped": False,
        "took_ns": None,
    }
    if options.dry_run:
        return value
    began_ns = time.monotonic_ns()
    with Client(options.runtime_dir) as client:
        ended = client.daemon_fd()
        try:
            client.ask(protocol.Stop(1000 * options.drain, options.discard), protocol.Stopping)
            if not _await_end(options, ended, options.drain + PATIENCE_S):
                raise ControlError(
                    f"clawd, pid {before['pid']}, was told to stop and has not within"
                    f" {options.drain + PATIENCE_S:.0f} s", f"see its log, or kill -KILL {before['pid']}",
                )  # fmt: skip
        finally:
            if ended >= 0:
                os.close(ended)
    return {**value, "stopped": True, "took_ns": time.monotonic_ns() - began_ns}


def _discard(options: argparse.Namespace) -> dict[str, Any]:
    """What an ended clawd left is given up."""
    from clawd.server import memory, recovery  # which need what a daemon needs

    instance, owner = read_instance(options.runtime_dir), os.stat(options.runtime_dir).st_uid
    if os.geteuid() not in (0, owner):
        raise ControlError("only root and clawd's own user may discard what it left", "be one of them")
    value = {
        "version": stats.VERSION, "pid": None, "dry_run": options.dry_run, "drain_s": options.drain, "discard": True,
        "streams_live": 0, "producers": 0, "clients": 0, "stopped": False, "took_ns": None,
    }  # fmt: skip
    if options.dry_run:
        return {**value, "objects": len(memory.left_behind(instance))}
    try:
        lock = os.open(options.runtime_dir / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ControlError(f"cannot take clawd's lock: {error.strerror}", "is this its --runtime-dir?") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return {**value, "objects": recovery.discard(instance, owner)}
    except BlockingIOError as error:
        raise ControlError("a clawd is just starting or stopping there", "try again") from error
    finally:
        os.close(lock)


def _await_end(options: argparse.Namespace, ended: int, seconds: float) -> bool:
    if ended >= 0:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        return bool(poll.poll(1000 * seconds))
    until = time.monotonic() + seconds
    while is_locked(options.runtime_dir):  # it is of another process namespace
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def show(value: dict[str, Any]) -> str:
    what = ", ".join(f"{value[name]} {label}" for name, label in (
        ("streams_live", "live streams"), ("producers", "producers"), ("clients", "clients"),
    ))  # fmt: skip
    if value["pid"] is None:
        text = f"{'would remove' if value['dry_run'] else 'removed'} {value['objects']} objects; no clawd runs"
    elif value["stopped"]:
        text = f"stopped clawd, pid {value['pid']}, in {render.duration(value['took_ns'])}; it had {what}"
    else:
        how = f", after at most {value['drain_s']} s for its streams" if value["drain_s"] else ""
        text = f"would stop clawd, pid {value['pid']}{how}; it has {what}"
    return render.fold(text, 2)
