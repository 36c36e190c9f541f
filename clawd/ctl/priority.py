# SPDX-License-Identifier: Apache-2.0
"""What lets first tokens go first, for `clawctl status`: weights as they are and what they go back to, who asked for
them and why, how short of processor time the host is, the slices of clawd's threads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from clawd import protocol
from clawd.ctl import render
from clawd.ctl.client import Client
from clawd.errors import ControlError
from clawd.kernel import sched
from clawd.kernel.change import Trouble


def ask(client: Client) -> dict[str, Any] | None:
    """What clawd says of itself; None: it does not."""
    try:
        answer = client.ask(protocol.Boosts(), protocol.Urgency)
    except ControlError:
        return None
    return {**asdict(answer), "level": protocol.BOOSTS[answer.level]}


def slices(pid: int) -> dict[str, Any]:
    """Threads of clawd by their slice in ns, or why that is not to be seen."""
    lever = sched.Slices()
    found: Counter[str] = Counter()
    reason = None
    try:
        for place in sched.threads(pid):
            found[lever.read(place)] += 1
    except Trouble as error:
        reason = str(error)
    return {"threads_by_ns": dict(found), "reason": reason, "scheduler": sched.scheduler() or None}


def lines(value: dict[str, Any]) -> list[str]:
    """Of the whole status."""
    return [
        f"first      {_first(value)}",
        f"pressure   {_pressure(value)}",
        f"slice      {_slices(value['slices'])}",
    ]


def _first(value: dict[str, Any]) -> str:
    totals, urgency, boosting = value["totals"], value["urgency"], value["kernel"]["boosting"]
    parts = [f"{totals['first_count']} first tokens waited for, {totals['boosts']} boosts"]
    reason = (urgency or {}).get("reason")
    if reason:
        parts.append(f"weights are not flipped: {render.cell(reason)}")
    if boosting:
        parts += told(boosting)
    return "; ".join(parts)


def told(boosting: dict[str, Any]) -> list[str]:
    """What clawd-kernel says of weights."""
    parts = []
    weights = [
        f"{render.cell(name)} {live}" + (f" (else {rest})" if (rest := boosting["resting"].get(name)) != live else "")
        for name, live in boosting["weights"].items()
    ]
    if boosting["state"] == "off":
        parts.append(f"clawd-kernel flips none: {render.cell(boosting['reason'])}")
    else:
        parts.append(f"now {boosting['state']}: {', '.join(weights)}; {boosting['writes']} writes")
    for pid, uid, level, waiting, pressure in boosting["asked"]:
        why = f"{waiting} first tokens" if level == 2 else f"pressure {pressure}"
        parts.append(f"asked for by pid {pid} of user {uid} for {why}")
    parts += [f"{render.cell(name)}: {render.cell(why)}" for name, why in boosting["kept"].items()]
    if boosting["limited"]:
        parts.append(f"{boosting['limited']} changes put off, as there were too many")
    return parts


def _pressure(value: dict[str, Any]) -> str:
    parts = [f"level {value['totals']['pressure']} of 3"]
    urgency = value["urgency"]
    if urgency:
        if urgency["some_permille"] is not None:
            parts.append(f"work waited {urgency['some_permille'] / 10:.0f}% of the last second")
        if urgency["wait_us"] is not None:
            parts.append(f"a thread of clawd's {render.duration(urgency['wait_us'] * 1000)} each time")
        if urgency["unseen"]:
            parts.append(render.cell(urgency["unseen"]))
    return ", ".join(parts)


def _slices(found: dict[str, Any]) -> str:
    parts = [f"{render.duration(int(ns))} of {count} threads" for ns, count in found["threads_by_ns"].items()]
    if found["reason"]:
        parts.append(render.cell(found["reason"]))
    if found["scheduler"]:
        parts.append(f"{render.cell(found['scheduler'])} decides instead")
    return ", ".join(parts)
