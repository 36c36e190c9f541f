# SPDX-License-Identifier: Apache-2.0
"""`clawctl streams`: one row a stream, live ones first."""

from __future__ import annotations

import argparse
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.client import figures, wrap

HELP = "list the streams, live ones first"
EXAMPLE = "clawctl streams --json | jq '.streams[] | select(.state == \"live\") | .name'"
_ORDER = ("live", "awaited", "ended", "gone")


def collect(options: argparse.Namespace) -> dict[str, Any]:
    with figures(options.runtime_dir) as (page, life):
        rows = stats.streams(page)
        rows.sort(key=lambda row: (_order(row["state"]), row["opened_ns"] or 0, row["name"]))
        return wrap(page, life, streams=rows)


def _order(state: str) -> int:
    return _ORDER.index(state) if state in _ORDER else len(_ORDER)


def show(value: dict[str, Any]) -> str:
    rows = [
        (
            row["name"],
            row["state"] if row["reason"] is None else f"{row['state']}: {row['reason']}"[:26],
            row["tokens"],
            render.size(row["text_bytes"]),
            row["attachments"],
            row["pace"] or render.ABSENT,
            f"{row['lag_ms']} ms",
            render.duration(row["first_token_ns"]),
        )
        for row in value["streams"]
    ]
    return render.table(("name", "state", "tokens", "bytes", "readers", "pace", "held", "first token"), rows)
