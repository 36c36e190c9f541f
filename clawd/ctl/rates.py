# SPDX-License-Identifier: Apache-2.0
"""What a clawd did between two looks at its page: rates, and latencies of that time alone."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any

from clawd import protocol, stats
from clawd.core import ffi
from clawd.page import Life, Page, quantiles

_BUCKETS_AT = ffi.offsetof("struct claw_hist", "bucket")


@dataclass(frozen=True)
class Look:
    """All of a page at one moment. `hists` are counts by bucket."""

    at_ns: int
    status: dict[str, Any]
    streams: list[dict[str, Any]]
    producers: list[dict[str, Any]]
    consumers: list[dict[str, Any]]
    hists: dict[str, array[int]]
    unread: int


def look(page: Page, life: Life) -> Look:
    hists = {name: _buckets(page.hist(which)) for name, which in stats.HISTS}
    at_ns = time.monotonic_ns()
    status = stats.status(page, life)
    unread = page.unread
    streams = stats.streams(page)
    unread += page.unread
    producers = stats.producers(page)
    consumers = stats.consumers(page)
    return Look(at_ns, status, streams, producers, consumers, hists, unread + page.unread)


def _buckets(hist: Any) -> array[int]:
    return array("Q", bytes(ffi.buffer(hist)[_BUCKETS_AT:]))


def between(before: Look | None, now: Look, most: int) -> dict[str, Any]:
    """What `top` shows. `before` of another clawd, or None: there are no rates yet. `most` streams, busiest first."""
    if before and before.status["instance"] == now.status["instance"] and before.status["pid"] == now.status["pid"]:
        passed_ns = max(1, now.at_ns - before.at_ns)
    else:
        before, passed_ns = None, 0
    totals = now.status["totals"]
    live = [row for row in _streams(before, now, passed_ns) if row["state"] == "live" or row["tokens_per_second"]]
    live.sort(key=lambda row: (-(row["tokens_per_second"] or 0), row["name"]))
    return {
        "version": stats.VERSION,
        **{name: now.status[name] for name in ("clawd_version", "pid", "answering", "uptime_ns")},
        "interval_ns": passed_ns or None,
        "tokens_in_per_second": _total(before, now, "tokens", passed_ns),
        "tokens_out_per_second": _total(before, now, "sent", passed_ns),
        "tokens_per_wakeup": _at_once(before, now),
        **{name: totals[name] for name in ("streams_live", "streams_awaited", "streams_ended", "attachments")},
        "first_waiting": totals["first_count"],
        "boost": protocol.BOOSTS[min(totals["boost"], len(protocol.BOOSTS) - 1)],
        **{name: totals[name] for name in ("boosts", "pressure")},
        "waited_ns_per_second": _total(before, now, "run_delay_ns", passed_ns),
        **{name: now.status[name] for name in ("spool_bytes", "spool_used_bytes")},
        "latency": {name: _latency(before, now, name) for name, _ in stats.HISTS},
        "streams": live[:most],
        "producers": _producers(before, now, passed_ns),
        "consumers": sorted(now.consumers, key=lambda row: -row["unacked_bytes"]),
        "unread": now.unread,
    }


def _rate(before: int | None, now: int, passed_ns: int) -> float | None:
    """A second; None when nothing is known of before."""
    return None if before is None or not passed_ns else round(max(0, now - before) * 1e9 / passed_ns, 1)


def _total(before: Look | None, now: Look, name: str, passed_ns: int) -> float | None:
    return _rate(before.status["totals"][name] if before else None, now.status["totals"][name], passed_ns)


def _at_once(before: Look | None, now: Look) -> float | None:
    """Tokens of a stream that a client gets at once."""
    sent, segments = (
        now.status["totals"][name] - (before.status["totals"][name] if before else 0) for name in ("sent", "segments")
    )
    return round(sent / segments, 1) if segments > 0 else None


def _streams(before: Look | None, now: Look, passed_ns: int) -> list[dict[str, Any]]:
    known = {(row["name"], row["incarnation"]): row["tokens"] for row in before.streams} if before else {}
    return [
        {
            "name": row["name"],
            "state": row["state"],
            # one that was not there before began at 0
            "tokens_per_second": _rate(
                known.get((row["name"], row["incarnation"]), 0 if before else None), row["tokens"], passed_ns
            ),
            "tokens": row["tokens"],
            "spool_bytes": row["spool_bytes"],
            "readers": row["attachments"],
            "pace": row["pace"],
            "lag_ms": row["lag_ms"],
        }
        for row in now.streams
    ]


def _producers(before: Look | None, now: Look, passed_ns: int) -> list[dict[str, Any]]:
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["name"], row["pid"], row["since_ns"]  # a process may have several of one name

    known = {key(row): row["tokens"] for row in before.producers} if before else {}
    return [
        {**row, "tokens_per_second": _rate(known.get(key(row), 0 if before else None), row["tokens"], passed_ns)}
        for row in now.producers
    ]


def _latency(before: Look | None, now: Look, name: str) -> dict[str, int | None]:
    """Of the tokens of the interval; of all there were when there was no look before."""
    counts = now.hists[name]
    if before:
        counts = array("Q", (max(0, new - old) for new, old in zip(counts, before.hists[name], strict=True)))
    hist = ffi.new("struct claw_hist *")
    ffi.buffer(hist)[_BUCKETS_AT:] = counts.tobytes()
    hist.count = sum(counts)
    count, (p50, p99) = quantiles(hist, (0.50, 0.99))
    return {"count": count, "p50_ns": p50 if count else None, "p99_ns": p99 if count else None}
