# SPDX-License-Identifier: Apache-2.0
"""`clawctl status`: is it running, what does it carry, how fast."""

from __future__ import annotations

from typing import Any

from clawd import protocol
from clawd.ctl import render
from clawd.ctl.client import Client

HELP = "show whether clawd runs, what it carries and how fast"


def collect(client: Client) -> dict[str, Any]:
    answer = client.ask(protocol.Status())
    del answer["op"]
    return answer


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
        f"config     {_config(value['config'])}",
        f"tokens     {totals['tokens']} in, {totals['sent']} out, {totals['gaps']} gaps,"
        f" {totals['discarded']} discarded",
        f"troubles   {totals['refused']} streams refused, {totals['quarantined']} producers quarantined,"
        f" {totals['rescued']} lost wake-ups",
        "",
    ]
    rows = [
        (name.replace("_", " "), row["count"], render.duration(row["p50_ns"]), render.duration(row["p99_ns"]))
        for name, row in value["latency"].items()
    ]
    return "\n".join(lines) + "\n" + render.table(("latency", "tokens", "p50", "p99"), rows)


def _config(state: dict[str, Any]) -> str:
    parts = [f"generation {state['generation']}"]
    if state["pending_restart"]:
        parts.append(f"a restart is needed for {', '.join(state['pending_restart'])}")
    if state["error"]:
        parts.append(f"not reloaded: {render.cell(state['error'])}")
    return "; ".join(parts)
