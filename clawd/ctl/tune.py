# SPDX-License-Identifier: Apache-2.0
"""`clawctl tune`: the kernel as a profile asks for it, shown, planned, applied, taken back, verified."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clawd.ctl import render, tune_show
from clawd.errors import ClawdError, HostError
from clawd.kernel import netns, profile
from clawd.kernel.journal import DIRECTORY, Entry
from clawd.kernel.tuning import Tuning
from clawd.page import Life, Page

HELP = "tune the kernel for clawd, and take it back"
EXAMPLE = "clawctl tune plan --profile wan --device eth0"
ABOUT = (
    "show: what the kernel has and what the profile asks for. plan: the operations of an apply and how they are taken"
    " back; the same as apply --dry-run. apply: those, each in the journal before. revert: takes back what still holds"
    " what apply wrote. verify: is it as asked for, and does it act; exit 4 when not. A profile is one of clawd's or a"
    " file in /etc/clawd/profiles. Changes need root; neither clawd nor systemd."
)
VERSION = 1
ACTIONS = ("show", "plan", "apply", "revert", "verify")
WORDS = ACTIONS
"""What a shell completes."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", default="show", metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument(
        "--profile", metavar="NAME", help=f"what to ask for (default: that applied last, else {profile.DEFAULT})"
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help="instead of those with a default route; repeatable",
    )
    parser.add_argument("--netns", metavar="NAME", help="in this network namespace: a name, a number, or pid:N")
    parser.add_argument("--dry-run", action="store_true", help="say what apply or revert would do")
    parser.add_argument(
        "--state-dir", type=Path, default=DIRECTORY, metavar="DIR", help=f"of the journal (default {DIRECTORY})"
    )


def run(options: argparse.Namespace) -> int:
    if options.action not in ACTIONS:
        near = difflib.get_close_matches(options.action, ACTIONS, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"there is {', '.join(ACTIONS)}"
        print(f'clawctl: no action "{render.cell(options.action)}" of tune; {hint}', file=sys.stderr)
        return 2
    action = "plan" if options.dry_run and options.action == "apply" else options.action
    if options.netns is not None:
        netns.enter(options.netns)
    if action in ("apply", "revert") and not options.dry_run and os.geteuid() != 0:
        raise HostError("changing the kernel needs root", f"sudo clawctl tune {action}")
    tuning = Tuning(
        "clawctl tune",
        options.state_dir,
        devices=options.device,
        pids=() if options.netns is not None else _clawds(options.runtime_dir),
        host=options.netns is None,
    )
    value = {
        "version": VERSION,
        "action": action,
        "netns": asdict(tuning.namespace),
        **_ACTION[action](tuning, options),
    }
    print(json.dumps(value) if options.json else tune_show.text(value), flush=True)
    return tune_show.code(value)


def _clawds(runtime_dir: Path) -> Sequence[int]:
    try:
        with Page(runtime_dir) as page:
            return [page.header().pid] if page.life() is not Life.GONE else []
    except ClawdError:
        return []


def _entries(tuning: Tuning) -> tuple[list[Entry], list[str]]:
    """Of the journal, and what is to be said of it. To look needs no journal."""
    try:
        entries, void = tuning.journal.load()
    except HostError as error:
        return [], [str(error)]
    notes = [void] if void else []
    if any(entry.before is not None for entry in entries):
        notes.append("an apply was interrupted; clawctl tune apply, or revert, puts that right")
    return entries, notes


def _chosen(tuning: Tuning, options: argparse.Namespace) -> profile.Profile:
    return profile.load(options.profile or tuning.journal.profiles.get(tuning.namespace.cookie, profile.DEFAULT))


def _head(chosen: profile.Profile) -> dict[str, Any]:
    return {"profile": chosen.name, "about": chosen.about, "files": [str(path) for path in chosen.files]}


def _show(tuning: Tuning, options: argparse.Namespace) -> dict[str, Any]:
    entries, notes = _entries(tuning)
    chosen = _chosen(tuning, options)
    rows = [asdict(row) for row in tuning.rows(chosen)]
    return {**_head(chosen), "notes": notes, "rows": rows, "applied": [asdict(entry) for entry in entries]}


def _plan(tuning: Tuning, options: argparse.Namespace) -> dict[str, Any]:
    entries, notes = _entries(tuning)
    chosen = _chosen(tuning, options)
    plan = tuning.plan(chosen, entries)
    return {**_head(chosen), "notes": notes, "rows": [asdict(row) for row in plan.rows],
            "changes": [asdict(change) for change in plan.changes]}  # fmt: skip


def _apply(tuning: Tuning, options: argparse.Namespace) -> dict[str, Any]:
    tuning.journal.load()
    chosen = _chosen(tuning, options)
    outcomes = tuning.apply(chosen)
    rows = [asdict(row) for row in tuning.rows(chosen)]
    return {**_head(chosen), "outcomes": [asdict(outcome) for outcome in outcomes], "rows": rows}


def _revert(tuning: Tuning, options: argparse.Namespace) -> dict[str, Any]:
    entries, notes = _entries(tuning)
    if options.dry_run:
        return {"action": "plan", "notes": notes, "changes": [asdict(change) for change in tuning.undo(entries)]}
    outcomes = tuning.revert()
    return {"notes": [note for note in notes if "boot" in note], "outcomes": [asdict(outcome) for outcome in outcomes]}


def _verify(tuning: Tuning, options: argparse.Namespace) -> dict[str, Any]:
    entries, notes = _entries(tuning)
    chosen = _chosen(tuning, options)
    rows, drifts = tuning.verify(chosen, entries)
    return {**_head(chosen), "notes": notes, "rows": [asdict(row) for row in rows],
            "drift": [asdict(drift) for drift in drifts]}  # fmt: skip


_ACTION = {"show": _show, "plan": _plan, "apply": _apply, "revert": _revert, "verify": _verify}
