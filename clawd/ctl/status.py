# SPDX-License-Identifier: Apache-2.0
"""`clawctl status`: is it running, what does it carry, how fast."""

from __future__ import annotations

import argparse
from typing import Any

from clawd import protocol, stats
from clawd.ctl import helper, priority, render
from clawd.ctl.client import Client, figures
from clawd.errors import ControlError
from clawd.page import Life

HELP = "show whether clawd runs, what it carries and how fast"
ABOUT = (
    "Figures are read from shared memory: clawd is not asked, so a busy or a stopped one can be looked at too. Only for"
    " what became of reloads is it asked, if it answers."
)
EXAMPLE = "clawctl status --json | jq .totals.tokens"


def collect(options: argparse.Namespace) -> dict[str, Any]:
    with figures(options.runtime_dir) as (page, life):
        asked = _ask(options) if life is Life.ANSWERING else {"config": None, "urgency": None, "wishes": []}
        kernel = {**helper.look(), "wishes": asked.pop("wishes")}
        value = stats.status(page, life)
        return {**value, **asked, "kernel": kernel, "slices": priority.slices(value["pid"])}


def _ask(options: argparse.Namespace) -> dict[str, Any]:
    """What became of reloads, and what clawd asks for. The page does not have it, and the rest must not fail for it."""
    config = urgency = None
    wishes: list[str] = []
    try:
        with Client(options.runtime_dir) as client:
            answer = client.ask(protocol.Settings(), protocol.InEffect)
            names = ("generation", "loaded_ns", "error", "pending_restart")
            config = {name: getattr(answer, name) for name in names}
            wishes = helper.wishes_of(answer.values)
            urgency = priority.ask(client)
    except ControlError:
        pass
    return {"config": config, "urgency": urgency, "wishes": wishes}


def _told(config: dict[str, Any] | None) -> str:
    if config is None:
        return render.ABSENT
    parts = [f"generation {config['generation']}"]
    if config["pending_restart"]:
        parts.append(f"a restart is needed for {', '.join(config['pending_restart'])}")
    if config["error"]:
        parts.append(f"not reloaded: {render.cell(config['error'])}")
    return "; ".join(parts)


def _burst(totals: dict[str, int]) -> str:
    """How many tokens of a stream a client gets with one wake-up."""
    if not totals["segments"]:
        return render.ABSENT
    mean = totals["sent"] / totals["segments"]
    return f"{mean:.1f} tokens of a stream to a client, {totals['segment_max']} at most"


def _noticed(totals: dict[str, int]) -> str:
    """What pacers made up for."""
    return (
        f"{totals['paced_slower']} turned slower, {totals['paced_high_water']} nearly full,"
        f" {totals['paced_low_water']} ran empty, {totals['paced_delay_jump']} times held 50ms longer"
    )


def show(value: dict[str, Any]) -> str:
    totals = value["totals"]
    used = f"{render.size(value['spool_used_bytes'])} of {render.size(value['spool_bytes'])}"
    lines = [
        f"clawd {value['clawd_version']}, pid {value['pid']}, up {render.duration(value['uptime_ns'])}",
        f"producers  {value['producers']}",
        f"clients    {value['clients']}, {totals['attachments']} readings",
        f"streams    {totals['streams_live']} live, {totals['streams_ended']} ended,"
        f" {totals['streams_awaited']} awaited",
        f"spool      {used} in use",
        f"config     {_told(value['config'])}",
        f"kernel     {helper.told(value['kernel'], value['kernel']['wishes'])}",
        *priority.lines(value),
        f"tokens     {totals['tokens']} in, {totals['sent']} out, {totals['gaps']} gaps,"
        f" {totals['discarded']} discarded",
        f"at once    {_burst(totals)}",
        f"pacers     {_noticed(totals)}",
        f"troubles   {totals['refused']} streams refused, {totals['quarantined']} producers quarantined,"
        f" {totals['rescued']} lost wake-ups",
    ]
    rows = [
        (name.replace("_", " "), row["count"], *(render.duration(row[each]) for each in ("p50_ns", "p99_ns", "max_ns")))
        for name, row in value["latency"].items()
    ]
    text = "\n".join(render.fold(line, 11) for line in lines)
    return f"{text}\n\n{render.table(('latency', 'tokens', 'p50', 'p99', 'max'), rows)}"
