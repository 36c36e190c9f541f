# SPDX-License-Identifier: Apache-2.0
"""Where time goes between a write in the engine and the client's acknowledgement, as rows by stage and class."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clawd.core import lib
from clawd.ctl import render
from clawd.ctl.client import figures
from clawd.ctl.trace_target import Target, target_of
from clawd.errors import HostError
from clawd.kernel.hists import CLASSES, Hist
from clawd.kernel.tracer import Look, Tracer
from clawd.page import Page, minus, quantiles

SHARES = (0.50, 0.90, 0.99)
# What the latency budget of a first token, 200 ms, gives to each part: the model 100, clawd 30, the network 50
_MODEL_US, _RELAY_US, _NETWORK_US = 100_000, 30_000, 50_000
USER = (
    # stage, since when, the page's histogram of first tokens, that of all (None: there are no others), budget
    ("written", "requested", lib.CLAW_HIST_WRITTEN, None, _MODEL_US),
    ("committed", "written", lib.CLAW_HIST_COMMIT_FIRST, lib.CLAW_HIST_COMMIT, _RELAY_US),
    ("released", "committed", lib.CLAW_HIST_HELD_FIRST, lib.CLAW_HIST_HELD, _RELAY_US),
    ("sent", "released", lib.CLAW_HIST_QUEUED_FIRST, lib.CLAW_HIST_QUEUED, _RELAY_US),
    ("relay", "written", lib.CLAW_HIST_SEND_FIRST, lib.CLAW_HIST_SEND, _RELAY_US),
)
KERNEL = (
    # The whole last: its parts have no budget of their own
    ("socket", "write", None),
    ("device", "socket", None),
    ("acked", "device", None),
    ("network", "write", _NETWORK_US),
)
STAGES = (*(row[0] for row in USER), *(row[0] for row in KERNEL))
CLASS_NAMES = ("first", "rest")
LOSSES = {
    "missed": "writes, of sockets that were busy when the trace began, or with too many under way",
    "full_sockets": "parts of writes, for want of room for their sockets",
    "full_threads": "threads, for want of room",
    "full_waits": "waits for a processor, for want of room",
    "full_takers": "times who had the processor, for want of room for its name",
}
"""By counter: what was not followed."""


@dataclass(frozen=True)
class Row:
    """One stage's durations since the trace began. `since`: the moment it is counted from. `backend`: what tells it, or
    why nothing does. `budget_us` of the whole part that it belongs to, None of what is a part of a row that has one.
    """

    name: str
    klass: str
    since: str
    count: int
    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    max_us: float | None
    budget_us: int | None
    backend: str

    def told(self) -> dict[str, Any]:
        values = asdict(self)
        return {("class" if name == "klass" else name): value for name, value in values.items()}


class Trace:
    """From entry to exit: what of the page's histograms is new, and the tracer where there may be one."""

    def __init__(self, runtime_dir: Path, parts: tuple[str, ...], make: Callable[..., Tracer] = Tracer) -> None:
        self._runtime_dir = runtime_dir
        self._parts = parts
        self._make = make
        self._before: dict[int, Any] = {}
        self._began_ns = time.monotonic_ns()
        self._used_ns = _used_ns()
        self._epoch = 0
        self._copied = 0
        self._target: Target | None = None
        self.tracer: Tracer | None = None
        self.reason = ""
        """Why there is no tracer."""

    def __enter__(self) -> Trace:
        with figures(self._runtime_dir) as (page, _life):
            self._epoch = int(page.header().daemon_epoch)
            self._copied = int(page.totals().copied_frames)
            self._before = {which: page.hist(which) for row in USER for which in row[2:4] if which is not None}
        self._stack = ExitStack()
        if os.geteuid() != 0:
            self.reason = "needs root"
        else:
            try:
                self._target = target_of(self._runtime_dir)
                made = self._make(self._target.pid, self._target.lanes, self._parts)
                self.tracer = self._stack.enter_context(made)
            except HostError as error:
                self.reason = str(error)
        self._began_ns = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def collect(self, wanted: Callable[[Row], bool] = lambda _row: True) -> dict[str, Any]:
        """One object, as --json prints it."""
        seen = self.tracer.look() if self.tracer else None
        if self.tracer:
            self.tracer.refresh()
        rows = [row.told() for row in (*self._user_rows(), *self._kernel_rows(seen)) if wanted(row)]
        counters = dict(seen.counters) if seen else {}
        notes = [*self._notes(counters)] if seen and "writes" in self._parts else []
        return {"version": 1, "stages": rows, "counters": counters, "notes": notes, "cost": self._cost()}

    def _notes(self, counters: dict[str, int]) -> Iterator[str]:
        """What has to be known to read the kernel's rows. Counts the express lanes' frames into `counters`."""
        if self._target and self._target.unknown:
            yield f"the kernel's rows are all rest, for the lanes are not known: {self._target.unknown}"
        with figures(self._runtime_dir) as (page, _life):
            copied = counters["express_frames"] = int(page.totals().copied_frames) - self._copied
            firsts = int(self._since(page, lib.CLAW_HIST_SEND_FIRST).count)
        if copied > firsts:
            yield (
                f"first in the kernel's rows is what went by express lanes: {copied} frames, while {firsts} first"
                " tokens were sent. The others are opens, urgent tokens, and all of clients whose way loses much"
            )

    def _user_rows(self) -> Iterator[Row]:
        with figures(self._runtime_dir) as (page, _life):
            if int(page.header().daemon_epoch) != self._epoch:
                raise HostError("clawd was started again meanwhile", "trace again")
            for name, since, of_first, of_all, budget_us in USER:
                # All before the first of them, as clawd counts them: what is left for the rest is never too much
                every = self._since(page, of_all) if of_all is not None else None
                first = self._since(page, of_first)
                yield _of_page(name, "first", since, first, budget_us)
                if every is not None:
                    yield _of_page(name, "rest", since, minus(every, first), budget_us)

    def _since(self, page: Page, which: int) -> Any:
        return minus(page.hist(which), self._before[which])

    def _kernel_rows(self, seen: Look | None) -> Iterator[Row]:
        backends = self.tracer.backends if self.tracer else {}
        lacking = self.tracer.lacking if self.tracer else {}
        stages = [*KERNEL] if "writes" in self._parts else []
        for name, since, budget_us in stages:
            for klass in reversed(CLASSES):
                hist = seen.hists[name, klass] if seen else Hist()
                backend = backends.get(name) or f"none: {lacking.get(name) or self.reason}"
                yield _of_hist(name, klass, since, hist, budget_us, backend)
        if "sched" in self._parts:
            hist = seen.hists["runq", "rest"] if seen else Hist()
            backend = backends.get("runq") or f"none: {lacking.get('runq') or self.reason}"
            yield _of_hist("runq", "all", "woken", hist, _RELAY_US, backend)

    def _cost(self) -> dict[str, Any]:
        """Its own, beside what it costs the kernel."""
        told = self.tracer.cost() if self.tracer else None
        passed_ns = time.monotonic_ns() - self._began_ns
        bpf_ns = told.bpf_ns if told else None
        return {
            "elapsed_ns": passed_ns,
            "bpf_ns": bpf_ns,
            "bpf_runs": told.bpf_runs if told else None,
            "bpf_share": round(bpf_ns / passed_ns, 6) if bpf_ns is not None else None,
            "cpu_ns": _used_ns() - self._used_ns,
            "load_ns": told.load_ns if told else None,
            "programs": told.programs if told else 0,
        }


def _used_ns() -> int:
    """Processor time until now, of this process and of the compiler, which is another."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return int(sum(each.ru_utime + each.ru_stime for each in used) * 1e9)


def _us(value_ns: int) -> float:
    return round(value_ns / 1000, 3)


def _row(
    name: str,
    klass: str,
    since: str,
    count: int,
    values_ns: list[int],
    max_ns: int,
    budget_us: int | None,
    backend: str,
) -> Row:
    p50, p90, p99, longest = (_us(value) if count else None for value in (*values_ns, max_ns))
    return Row(name, klass, since, count, p50, p90, p99, longest, budget_us, backend)


def _of_page(name: str, klass: str, since: str, hist: Any, budget_us: int) -> Row:
    count, values = quantiles(hist, SHARES)
    # The longest ever is known, and the longest since then only by its bucket
    return _row(name, klass, since, count, values, quantiles(hist, (1.0,))[1][0], budget_us, "core")


def _of_hist(name: str, klass: str, since: str, hist: Hist, budget_us: int | None, backend: str) -> Row:
    # The middle of a bucket may be beyond the longest of those in it, which is known
    values = [min(hist.quantile(share), hist.max_ns) for share in SHARES]
    return _row(name, klass, since, hist.count, values, hist.max_ns, budget_us, backend)


def show(value: dict[str, Any]) -> str:
    notes = [render.fold(f"note: {render.cell(note)}", 4) for note in value.get("notes", ())]
    return "\n".join([*told_stages(value), *notes, *told_losses(value), told_cost(value)])


def told_stages(value: dict[str, Any]) -> list[str]:
    """The table, and what tells it."""
    header = ("stage", "class", "since", "count", "p50", "p90", "p99", "max", "budget")
    rows = [
        (
            row["name"],
            row["class"],
            row["since"],
            row["count"],
            *(_time(row[f"{column}_us"]) for column in ("p50", "p90", "p99", "max")),
            _share(row),
        )
        for row in value["stages"]
    ]
    told = [render.fold(f"{', '.join(names)}: {render.cell(backend)}", 4) for backend, names in _backends(value)]
    return [render.table(header, rows), *told]


def _time(value_us: float | None) -> str | None:
    return None if value_us is None else render.duration(int(value_us * 1000))


def _share(row: dict[str, Any]) -> str | None:
    """Of the budget, at the 99th percentile."""
    if row["p99_us"] is None or not row["budget_us"]:
        return None
    return f"{100 * row['p99_us'] / row['budget_us']:.1f}%"


def _backends(value: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What tells which stages, in their order."""
    found: dict[str, list[str]] = {}
    for row in value["stages"]:
        names = found.setdefault(row["backend"], [])
        if row["name"] not in names:
            names.append(row["name"])
    return list(found.items())


def told_cost(value: dict[str, Any]) -> str:
    """In a line."""
    cost = value["cost"]
    told = f"cost: {render.duration(cost['cpu_ns'])} of processor time here"
    if cost["bpf_ns"] is not None:
        each_ns = cost["bpf_ns"] // max(1, cost["bpf_runs"])
        share = 100 * (cost["bpf_share"] or 0)
        told += f", {render.duration(cost['bpf_ns'])} ({share:.3f}%) in the kernel, {each_ns} ns a run"
    return render.fold(told, 6)


def told_losses(value: dict[str, Any]) -> list[str]:
    """In a line, what the tracer saw and could not follow; none when that is nothing."""
    counters = value.get("counters") or {}
    told = [f"{counters[name]} {what}" for name, what in LOSSES.items() if counters.get(name)]
    return [render.fold(f"not followed: {'; '.join(told)}", 4)] if told else []
