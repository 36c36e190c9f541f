# SPDX-License-Identifier: Apache-2.0
"""How long clawd's threads waited for a processor, and who had it meanwhile."""

from __future__ import annotations

from typing import Any

from clawd.ctl import render
from clawd.ctl.trace_stages import Trace, told_cost, told_losses, told_stages

TAKERS_MAX = 10


def collect(trace: Trace) -> dict[str, Any]:
    value = trace.collect()
    seen = trace.tracer.look() if trace.tracer else None
    takers = sorted((seen.takers if seen else {}).items(), key=lambda row: -row[1][1])[:TAKERS_MAX]
    value["stages"] = [row for row in value["stages"] if row["name"] == "runq"]
    value["preempted"] = value["counters"].get("preempted", 0)
    value["takers"] = [
        {"name": name, "waits": waits, "wait_ns": wait_ns, "preempted": taken}
        for name, (waits, wait_ns, taken) in takers
    ]
    return value


def show(value: dict[str, Any]) -> str:
    rows = [(row["name"], row["waits"], render.duration(row["wait_ns"]), row["preempted"]) for row in value["takers"]]
    head = [*told_stages(value), f"clawd was pre-empted {value['preempted']} times"]
    table = [render.table(("had the processor", "waits", "waited", "pre-empted"), rows)] if rows else []
    return "\n".join([*head, *table, *told_losses(value), told_cost(value)])
