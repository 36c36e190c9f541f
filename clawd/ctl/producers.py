# SPDX-License-Identifier: Apache-2.0
"""`clawctl producers`: one row a producer and its ring, in the order they came."""

from __future__ import annotations

import argparse
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.client import figures, wrap

HELP = "list the producers and how full their rings are"
EXAMPLE = "clawctl producers --json | jq '.producers[] | {name, pid, used_bytes}'"


def collect(options: argparse.Namespace) -> dict[str, Any]:
    with figures(options.runtime_dir) as (page, life):
        return wrap(page, life, producers=stats.producers(page))


def show(value: dict[str, Any]) -> str:
    rows = [
        (
            row["name"],
            row["pid"] or None,
            row["uid"],
            row["state"],
            row["streams"],
            row["tokens"],
            f"{render.size(row['used_bytes'])}/{render.size(row['ring_bytes'])}",
            render.duration(row["attached_ns"]),
        )
        for row in value["producers"]
    ]
    return render.table(("name", "pid", "uid", "state", "streams", "tokens", "ring used", "since"), rows)
