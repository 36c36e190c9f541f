# SPDX-License-Identifier: Apache-2.0
"""`clawctl streams`: one row a stream, live ones first."""

from __future__ import annotations

from typing import Any

from clawd.ctl import render
from clawd.ctl.client import Client
from clawd.server.stats import VERSION

HELP = "list the streams, live ones first"
_ORDER = ("live", "awaited", "ended", "gone")


def collect(client: Client) -> dict[str, Any]:
    rows = sorted(client.streams(), key=lambda row: (_ORDER.index(row["state"]), row["opened_ns"] or 0, row["name"]))
    return {"version": VERSION, "streams": rows}


def show(value: dict[str, Any]) -> str:
    rows = [
        (
            row["name"],
            row["state"] if row["reason"] is None else f"{row['state']}: {row['reason']}"[:26],
            row["tokens"],
            render.size(row["text_bytes"]),
            row["attachments"],
            render.duration(row["first_token_ns"]),
        )
        for row in value["streams"]
    ]
    return render.table(("name", "state", "tokens", "bytes", "readers", "first token"), rows)
