# SPDX-License-Identifier: Apache-2.0
"""Figures for Prometheus: clawd's own, read from its page in shared memory when they are asked for, and the gateway's.
Nothing is computed in the relay for them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from clawd.core import ffi, lib
from clawd.errors import ClawdError
from clawd.gateway.figures import SECONDS, Figures, Histogram
from clawd.page import FRESH_NS, Page

_CUTS = int(lib.CLAW_HIST_CUTS)
_BUCKETS = int(lib.CLAW_HIST_BUCKETS)
FAULTS = ("error", "producer_lost", "lost", "limit", "unavailable", "no_space")
"""Reasons of an end, up to a colon, by which a reader did not get what there was: not that it asked for nothing."""


def bucket_middle(index: int) -> int:
    """The middle of a bucket of claw_hist, in ns: what csrc/hist.c takes for all values in it."""
    if index < 2 * _CUTS:
        return index
    octave = index // _CUTS - 1
    return ((index - octave * _CUTS) << octave) + ((1 << octave) >> 1)


_MIDDLES = [bucket_middle(index) for index in range(_BUCKETS)]
_ENDS = [bisect_right(_MIDDLES, bound * 1e9) for bound in SECONDS]


def hist_buckets(hist: Any) -> list[tuple[str, float]]:
    """The cumulative buckets of a struct claw_hist with our upper bounds; its own are 3.2 % wide at most."""
    sums = [0, *accumulate(ffi.unpack(hist.bucket, _BUCKETS))]
    rows = [(repr(bound), float(sums[end])) for bound, end in zip(SECONDS, _ENDS, strict=True)]
    return [*rows, ("+Inf", float(sums[-1]))]


def is_fault(reason: str) -> bool:
    """Whether a stream that ended so failed its reader."""
    return reason.partition(":")[0] in FAULTS


class Load(NamedTuple):
    """What the gateway carries now."""

    connections: int = 0
    readers: int = 0
    streams: int = 0
    attachments: int = 0


class _Families:
    """Metrics whose names have a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def gauge(self, name: str, help: str, *rows: tuple[dict[str, str], float]) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, help)
        return self._fill(family, rows)

    def counter(self, name: str, help: str, *rows: tuple[dict[str, str], float]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, help)
        return self._fill(family, rows, "_total")

    @staticmethod
    def _fill(family: Metric, rows: tuple[tuple[dict[str, str], float], ...], suffix: str = "") -> Metric:
        for labels, value in rows:
            family.add_sample(family.name + suffix, labels, value)
        return family

    def histogram(self, name: str, help: str, *rows: tuple[dict[str, str], list[tuple[str, float]], float]) -> Metric:
        names = tuple(rows[0][0]) if rows else ()
        family = HistogramMetricFamily(self._prefix + name, help, labels=names)
        for labels, buckets, total in rows:
            family.add_metric(tuple(labels.values()), buckets, total)
        return family


def _of(histogram: Histogram, **labels: str) -> tuple[dict[str, str], list[tuple[str, float]], float]:
    return labels, histogram.buckets(), histogram.sum


def _page_row(hist: Any, **labels: str) -> tuple[dict[str, str], list[tuple[str, float]], float]:
    return labels, hist_buckets(hist), hist.sum_ns / 1e9


class _Collector(Collector):
    def __init__(self, runtime_dir: Path, prefix: str, figures: Figures | None, load: Callable[[], Load]) -> None:
        self._runtime_dir = runtime_dir
        self._make = _Families(prefix)
        self._figures = figures
        self._load = load

    def collect(self) -> Iterator[Metric]:
        make = self._make
        try:
            with Page(self._runtime_dir) as page:
                header = page.header()
                is_up = abs(time.monotonic_ns() - header.beat_ns) < FRESH_NS
                yield make.gauge("up", "1 while clawd turns.", ({}, float(is_up)))
                yield from self._daemon(page, int(header.clients))
        except ClawdError:  # gone, or only starting
            yield make.gauge("up", "1 while clawd turns.", ({}, 0.0))
        if self._figures is not None:
            yield from self._gateway(self._figures, self._load())

    def _daemon(self, page: Page, clients: int) -> Iterator[Metric]:
        make, totals = self._make, page.totals()
        yield from self._delays(page)
        block = float(lib.CLAW_BLOCK_BYTES)
        free = totals.spool_free * block
        states = ("live", "ended", "awaited", "gone")
        rows = [({"state": state}, float(getattr(totals, f"streams_{state}"))) for state in states]
        yield make.gauge("streams", "Streams by state.", *rows)
        yield make.gauge("attachments", "Readings at once.", ({}, float(totals.attachments)))
        yield make.gauge("clients", "Clients connected.", ({}, float(clients)))
        yield make.gauge("producers", "Producers attached.", ({}, float(sum(1 for _ in page.rings()))))
        held = {"used": totals.spool_blocks * block - free, "free": free}
        rows = [({"state": state}, value) for state, value in held.items()]
        yield make.gauge("spool_bytes", "Memory for tokens, by what it holds.", *rows)
        for name, help, value in (
            ("tokens", "Tokens committed.", totals.tokens),
            ("text_bytes", "Bytes of text committed.", totals.text_bytes),
            ("sent_tokens", "Tokens sent, once for each reader.", totals.sent),
            ("sent_bytes", "Bytes sent to clients.", totals.frame_bytes),
            ("gaps", "Gaps told to readers.", totals.gaps),
            ("streams_opened", "Streams opened.", totals.opened),
        ):
            yield make.counter(name, help, ({}, float(value)))
        yield make.counter("streams_ended", "Streams ended, by why.",
                           ({"reason": "cancelled"}, float(totals.cancelled)),
                           ({"reason": "other"}, float(max(0, totals.ended - totals.cancelled))))  # fmt: skip
        yield make.counter("tokens_lost", "Tokens that were written and are not kept, by why.",
                           ({"reason": "no_room"}, float(totals.dropped)),
                           ({"reason": "stream_over"}, float(totals.discarded)))  # fmt: skip
        yield make.counter("errors", "What failed in clawd, by what.", *(
            ({"reason": name}, float(getattr(totals, name))) for name in ("refused", "quarantined", "rescued")
        ))  # fmt: skip

    def _delays(self, page: Page) -> Iterator[Metric]:
        make = self._make
        first, told = page.hist(lib.CLAW_HIST_FIRST), page.hist(lib.CLAW_HIST_FIRST_REQUESTED)
        every, requested = hist_buckets(first), hist_buckets(told)
        # both grow while they are read, the first one first: never less than none
        opened = [(bound, max(0.0, value - less)) for (bound, value), (_, less) in zip(every, requested, strict=True)]
        yield make.histogram(
            "first_token_duration_seconds",
            "To the first token's sending, from the request where the producer told its time, else from the open.",
            ({"origin": "requested"}, requested, told.sum_ns / 1e9),
            ({"origin": "opened"}, opened, max(0, first.sum_ns - told.sum_ns) / 1e9),
        )
        gaps = [_page_row(page.hist(lib.CLAW_HIST_GAP_RAW), side="raw"),
                _page_row(page.hist(lib.CLAW_HIST_GAP), side="released"),
                _page_row(page.hist(lib.CLAW_HIST_GAP_SENT), side="sent")]  # fmt: skip
        added = [_page_row(page.hist(lib.CLAW_HIST_HELD), by="pacer")]
        if self._figures is not None:
            gaps.append(_of(self._figures.delivered_gap, side="delivered"))
            added.append(_of(self._figures.added, by="all"))
        yield make.histogram(
            "token_gap_seconds",
            "Between two tokens of a stream: raw as they came, released by the pacer, sent to a client, delivered by"
            " the gateway.",
            *gaps,
        )
        yield make.histogram(
            "added_delay_seconds",
            "Added to a token: by the pacer, and by all of it, from its engine's write to the gateway's write to a"
            " reader that keeps up.",
            *added,
        )
        commit, send = page.hist(lib.CLAW_HIST_COMMIT), page.hist(lib.CLAW_HIST_SEND)
        yield make.histogram(
            "stage_duration_seconds",
            "From a token's write by its engine to what is named: committed, or sent to a client.",
            _page_row(commit, stage="committed"),
            _page_row(send, stage="sent"),
        )

    def _gateway(self, figures: Figures, load: Load) -> Iterator[Metric]:
        make = self._make
        yield make.histogram(
            "gateway_first_text_seconds", "From a reader's request to its first text.", _of(figures.first_token)
        )
        yield make.histogram("gateway_burst_tokens", "Tokens written to a reader at once.", _of(figures.burst))
        for name, value in load._asdict().items():
            yield make.gauge(f"gateway_{name}", f"The gateway's {name} now.", ({}, float(value)))
        for name, help, amount in (
            ("tokens", "Tokens written to readers.", figures.tokens),
            ("bytes", "Bytes of events written to readers.", figures.bytes),
            ("stalled", "Readers cut off because they took nothing.", figures.stalled),
            ("moved", "Readers that fell behind and read for themselves.", figures.moved),
        ):
            yield make.counter(f"gateway_{name}", help, ({}, float(amount)))
        requests = [({"kind": kind, "code": str(code)}, float(count)) for (kind, code), count in
                    sorted(figures.requests.items())]  # fmt: skip
        yield make.counter("gateway_requests", "Requests answered, by kind and status.", *requests)
        yield make.counter("gateway_ends", "Streams that ended for readers, by why.", *_by("reason", figures.ends))
        yield make.counter("gateway_gaps", "Gaps told to readers, by why.", *_by("reason", figures.gaps))
        yield make.counter("gateway_refused", "Connections over a limit, by which.", *_by("limit", figures.refused))
        faults = sum(count for reason, count in figures.ends.items() if is_fault(reason))
        faults += sum(count for (_, code), count in figures.requests.items() if code >= 500)
        yield make.counter("gateway_faults", "Streams and requests that failed their reader.", ({}, float(faults)))


def _by(label: str, counts: dict[str, int]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, float(count)) for name, count in sorted(counts.items())]


class Exporter:
    """Makes the text of /metrics. `figures` is None where no streams are served."""

    def __init__(self, runtime_dir: Path, prefix: str, figures: Figures | None) -> None:
        self.load: Callable[[], Load] = Load
        """Says what the gateway carries."""
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(runtime_dir, prefix, figures, lambda: self.load()))

    def text(self) -> bytes:
        return generate_latest(self._registry)
