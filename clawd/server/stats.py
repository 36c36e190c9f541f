# SPDX-License-Identifier: Apache-2.0
"""The daemon's figures as one object of raw integers, for `clawctl` and for programs."""

from __future__ import annotations

import os
import time
from typing import Any

from clawd import __version__
from clawd.core import Core, ffi, lib, text

VERSION = 1
"""Of the objects made here: fields are only added."""
STREAMS_PAGE = 50
"""Rows an answer: with the longest names it still fits one packet."""

STATE = {
    lib.CLAW_STREAM_AWAITED: "awaited",
    lib.CLAW_STREAM_LIVE: "live",
    lib.CLAW_STREAM_ENDED: "ended",
    lib.CLAW_STREAM_GONE: "gone",
}

_TOTALS = [name for name, _ in ffi.typeof("struct claw_totals").fields]
_HISTS = (
    ("written_to_committed", lib.CLAW_HIST_COMMIT),
    ("written_to_sent", lib.CLAW_HIST_SEND),
    ("first_token", lib.CLAW_HIST_FIRST),
)


def status(
    core: Core, *, instance: str, started_ns: int, producers: int, clients: int, config: dict[str, Any]
) -> dict[str, Any]:
    """Answer to `status`."""
    totals = core.refresh_totals()
    latency = {}
    for name, which in _HISTS:
        count, (p50, p99) = core.quantiles(which, (0.50, 0.99))
        latency[name] = {"count": count, "p50_ns": p50 if count else None, "p99_ns": p99 if count else None}
    return {
        "op": "status",
        "version": VERSION,
        "clawd_version": __version__,
        "pid": os.getpid(),
        "instance": instance,
        "uptime_ns": time.monotonic_ns() - started_ns,
        "producers": producers,
        "clients": clients,
        "config": config,
        "spool_bytes": totals.spool_blocks * lib.CLAW_BLOCK_BYTES,
        "spool_used_bytes": (totals.spool_blocks - totals.spool_free) * lib.CLAW_BLOCK_BYTES,
        "totals": {name: getattr(totals, name) for name in _TOTALS},
        "latency": latency,
    }


def streams(core: Core, start: int) -> dict[str, Any]:
    """Answer to `streams`: one page of rows."""
    rows, following = core.stream_rows(start, STREAMS_PAGE)
    return {"op": "streams", "version": VERSION, "streams": [_stream(row) for row in rows], "next": following}


def _stream(row: Any) -> dict[str, Any]:
    began_ns = row.requested_ns or row.opened_ns
    return {
        "name": text(row.name, row.name_len),
        "state": STATE[row.state],
        "incarnation": row.incarnation,
        "reason": text(row.reason, row.reason_len) or None,
        "tokens": row.tokens,
        "text_bytes": row.text_bytes,
        "spool_bytes": row.spool_bytes,
        "attachments": row.attachments,
        "opened_ns": row.opened_ns or None,
        "ended_ns": row.ended_ns or None,
        "first_token_ns": row.first_sent_ns - began_ns if row.first_sent_ns else None,
    }
