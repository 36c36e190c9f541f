# SPDX-License-Identifier: Apache-2.0
"""`clawctl consumers`: one row a connection of a client, in the order they came."""

from __future__ import annotations

import argparse
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.client import figures, wrap
from clawd.keys import UID_BASE

HELP = "list the clients, what they read and how far they lag"
EXAMPLE = "clawctl consumers --json | jq '.consumers[] | select(.blocked)'"


def collect(options: argparse.Namespace) -> dict[str, Any]:
    with figures(options.runtime_dir) as (page, life):
        return wrap(page, life, consumers=stats.consumers(page))


def show(value: dict[str, Any]) -> str:
    is_far = any(row["rtt_us"] is not None for row in value["consumers"])
    rows = [
        (
            row["name"],
            row["role"],
            row["attachments"],
            render.size(row["sent_bytes"]),
            render.size(row["unacked_bytes"]),
            *(_way(row) if is_far else ()),
            render.duration(row["attached_ns"]),
            *_who(row),
        )
        for row in value["consumers"]
    ]
    way = ("rtt", "jitter", "loss") if is_far else ()
    return render.table(("name", "role", "readings", "sent", "unacked", *way, "since", "pid", "uid"), rows)


def _who(row: dict[str, Any]) -> tuple[int | None, int | None]:
    """Process and user. Of a client on another host its name tells the key, and no more is known."""
    return (None, None) if row["uid"] >= UID_BASE else (row["pid"] or None, row["uid"])


def _way(row: dict[str, Any]) -> tuple[str, ...]:
    if row["rtt_us"] is None:
        return (render.ABSENT,) * 3
    times = (render.duration(row[name] * 1000) for name in ("rtt_us", "jitter_us"))
    return (*times, f"{row['loss_ppm'] / 10_000:.1f}%")
