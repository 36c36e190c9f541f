# SPDX-License-Identifier: Apache-2.0
"""`clawctl status`: is it running, what does it carry, how fast."""

from __future__ import annotations

import argparse
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.client import figures

HELP = "show whether clawd runs, what it carries and how fast"
ABOUT = "Read from shared memory: clawd is not asked, so a busy or a stopped one can be looked at too."
EXAMPLE = "clawctl status --json | jq .totals.tokens"


def collect(options: argparse.Namespace) -> dict[str, Any]:
    with figures(options.runtime_dir) as (page, life):
        return stats.status(page, life)


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
        f"tokens     {totals['tokens']} in, {totals['sent']} out, {totals['gaps']} gaps,"
        f" {totals['discarded']} discarded",
        f"troubles   {totals['refused']} streams refused, {totals['quarantined']} producers quarantined,"
        f" {totals['rescued']} lost wake-ups",
    ]
    rows = [
        (name.replace("_", " "), row["count"], render.duration(row["p50_ns"]), render.duration(row["p99_ns"]))
        for name, row in value["latency"].items()
    ]
    text = "\n".join(render.fold(line, 11) for line in lines)
    return f"{text}\n\n{render.table(('latency', 'tokens', 'p50', 'p99'), rows)}"
