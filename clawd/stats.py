# SPDX-License-Identifier: Apache-2.0
"""The daemon's figures as objects of raw integers, read from its page: for `clawctl` and for programs."""

from __future__ import annotations

import time
from typing import Any

from clawd.core import ffi, lib, text
from clawd.page import Life, Page, quantiles

VERSION = 1
"""Of the objects made here: fields are only added."""

STREAM_STATE = {
    lib.CLAW_STREAM_AWAITED: "awaited",
    lib.CLAW_STREAM_LIVE: "live",
    lib.CLAW_STREAM_ENDED: "ended",
    lib.CLAW_STREAM_GONE: "gone",
}
RING_STATE = {
    lib.CLAW_RING_LIVE: "live",
    lib.CLAW_RING_LEFT: "left",
    lib.CLAW_RING_DONE: "done",
    lib.CLAW_RING_BROKEN: "quarantined",
}
ROLE = {
    lib.CLAW_ROLE_PRODUCER: "producer",
    lib.CLAW_ROLE_CONSUMER: "consumer",
    lib.CLAW_ROLE_OBSERVER: "observer",
    lib.CLAW_ROLE_ADMIN: "admin",
}

PACE = {lib.CLAW_PACE_OFF: "off", lib.CLAW_PACE_SMOOTH: "smooth", lib.CLAW_PACE_STEADY: "steady"}

_TOTALS = [name for name, _ in ffi.typeof("struct claw_totals").fields]
HISTS = (
    ("written_to_committed", lib.CLAW_HIST_COMMIT),
    ("written_to_sent", lib.CLAW_HIST_SEND),
    ("released_to_sent", lib.CLAW_HIST_QUEUED),
    ("first_token", lib.CLAW_HIST_FIRST),
    ("held", lib.CLAW_HIST_HELD),
    ("gap_raw", lib.CLAW_HIST_GAP_RAW),
    ("gap", lib.CLAW_HIST_GAP),
    ("gap_sent", lib.CLAW_HIST_GAP_SENT),
    ("release_error", lib.CLAW_HIST_RELEASE),
)
"""The page's histograms, by the name that people and programs see."""


def status(page: Page, life: Life = Life.ANSWERING) -> dict[str, Any]:
    """The daemon as a whole. `life` is what `page.life()` said."""
    totals = page.totals()
    latency = {}
    for name, which in HISTS:
        hist = page.hist(which)
        count, (p50, p99) = quantiles(hist, (0.50, 0.99))
        row = {"p50_ns": p50, "p99_ns": p99, "max_ns": int(hist.max_ns)}
        latency[name] = {"count": count, **(row if count else dict.fromkeys(row))}
    producers = sum(1 for _ in page.rings())
    header = page.header()
    now_ns = time.monotonic_ns()
    return {
        "version": VERSION,
        "clawd_version": ffi.string(header.version).decode("ascii", "replace"),
        "pid": header.pid,
        "instance": page.instance,
        "answering": life is Life.ANSWERING,
        "turned_ago_ns": max(0, now_ns - header.beat_ns),
        "uptime_ns": max(0, now_ns - header.started_ns),
        "producers": producers,
        "clients": header.clients,
        "spool_bytes": totals.spool_blocks * lib.CLAW_BLOCK_BYTES,
        "spool_used_bytes": (totals.spool_blocks - totals.spool_free) * lib.CLAW_BLOCK_BYTES,
        "totals": {name: getattr(totals, name) for name in _TOTALS},
        "latency": latency,
    }


def streams(page: Page) -> list[dict[str, Any]]:
    """One object a stream, in no order."""
    return [_stream(row) for row in page.streams()]


def find_stream(page: Page, name: str) -> dict[str, Any] | None:
    """The stream of this name."""
    label = name.encode()
    for row in page.streams():
        if bytes(ffi.buffer(row.name, row.name_len)) == label:
            return _stream(row)
    return None


def _stream(row: Any) -> dict[str, Any]:
    began_ns = row.requested_ns or row.opened_ns
    return {
        "name": text(row.name, row.name_len),
        "state": STREAM_STATE.get(row.state, str(row.state)),
        "incarnation": row.incarnation,
        "reason": text(row.reason, row.reason_len) or None,
        "next_seq": row.next_seq,
        "released_seq": row.released_seq,
        "pace": PACE.get(row.pace),
        "lag_ms": row.lag_ms,
        "tokens": row.tokens,
        "text_bytes": row.text_bytes,
        "spool_bytes": row.spool_bytes,
        "attachments": row.attachments,
        "opened_ns": row.opened_ns or None,
        "ended_ns": row.ended_ns or None,
        "first_token_ns": row.first_sent_ns - began_ns if row.first_sent_ns else None,
    }


def producers(page: Page) -> list[dict[str, Any]]:
    """One object a producer, in the order they came."""
    now_ns = time.monotonic_ns()
    return sorted((_producer(row, now_ns) for row in page.rings()), key=lambda row: -(row["attached_ns"] or 0))


def _producer(row: Any, now_ns: int) -> dict[str, Any]:
    return {
        **_peer(row.peer, now_ns),
        "state": RING_STATE.get(row.state, str(row.state)),
        "streams": row.streams,
        "tokens": row.tokens,
        "records": row.records,
        "bytes": row.bytes,
        "ring_bytes": row.ring_bytes,
        "used_bytes": row.used_bytes,
    }


def consumers(page: Page) -> list[dict[str, Any]]:
    """One object a connection of a client, in the order they came."""
    now_ns = time.monotonic_ns()
    return sorted((_consumer(row, now_ns) for row in page.connections()), key=lambda row: -(row["attached_ns"] or 0))


def _consumer(row: Any, now_ns: int) -> dict[str, Any]:
    known = bool(row.way_seen_ns)
    return {
        **_peer(row.peer, now_ns),
        "role": ROLE.get(row.peer.role),
        "attachments": row.attachments,
        "sent_bytes": row.charged,
        "unacked_bytes": max(0, row.charged - row.acked),
        "blocked": bool(row.blocked),
        "rtt_us": row.rtt_us if known else None,
        "jitter_us": row.jitter_us if known else None,
        "loss_ppm": row.loss_ppm if known else None,
        "way_age_ns": max(0, now_ns - row.way_ns) if known else None,
    }


def _peer(peer: Any, now_ns: int) -> dict[str, Any]:
    known = bool(peer.since_ns)
    return {
        "name": text(peer.label, peer.label_len) or None,
        "pid": peer.pid if known else None,
        "uid": peer.uid if known else None,
        "since_ns": peer.since_ns if known else None,
        "attached_ns": max(0, now_ns - peer.since_ns) if known else None,
    }
