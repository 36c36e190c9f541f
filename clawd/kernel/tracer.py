# SPDX-License-Identifier: Apache-2.0
"""The tracer: times of clawd's writes on their way to tcp clients, and of its threads on theirs to a processor.
Attached from entry to exit; also when it is killed, for all it has are descriptors.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from clawd.errors import HostError
from clawd.kernel import bpf, bpfcall, tracefs
from clawd.kernel.bpfcall import Table
from clawd.kernel.shaper import unified_mount

SOURCE = "tracer.bpf.c"
STAGES = ("socket", "device", "acked", "runq")
CLASSES = ("rest", "first")
COUNTERS = ("writes", "sent_bytes", "packets", "missed", "preempted")
"""All three as in ebpf/tracer.h."""
CUT_BITS = 4
BUCKETS = 592
CGROUP_SKB = {"claw_egress": bpfcall.EGRESS, "claw_ingress": bpfcall.INGRESS}
TRACEPOINTS = {
    "claw_queued": "net/net_dev_queue",
    "claw_driven": "net/net_dev_xmit",
    "claw_woken": "sched/sched_wakeup",
    "claw_switched": "sched/sched_switch",
}
WRITES = (
    # Where it begins and where it ends, each: program, kind, tracepoint or function
    (
        ("claw_begins", "RAW_TRACEPOINT", "tcp_sendmsg_locked"),
        ("kfunc__vmlinux__tcp_sendmsg", "TRACING", "tcp_sendmsg"),
        ("kfunc__tcp_sendmsg", "TRACING", "tcp_sendmsg"),
    ),
    (
        ("claw_ends", "RAW_TRACEPOINT", "sock_send_length"),
        ("kretfunc__vmlinux__tcp_sendmsg", "TRACING", "tcp_sendmsg"),
        ("kretfunc__tcp_sendmsg", "TRACING", "tcp_sendmsg"),
    ),
)
"""The newest first; which there are depends on the kernel, not on its version."""


@dataclass(frozen=True)
class Hist:
    """Durations in nanoseconds, by bucket."""

    counts: array[int] = field(default_factory=lambda: array("Q"))
    max_ns: int = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> int:
        """The middle of the bucket that has it; 0 when empty."""
        left = max(1, -(-self.count * share // 1))
        for number, count in enumerate(self.counts):
            left -= count
            if left <= 0 and count:
                return middle(number)
        return 0


def middle(bucket: int) -> int:
    """Nanoseconds; the inverse of bucket_of in ebpf/tracer.bpf.c."""
    if bucket < 2 << CUT_BITS:
        return bucket
    octave = (bucket >> CUT_BITS) - 1
    return ((bucket - (octave << CUT_BITS)) << octave) + (1 << octave) // 2


@dataclass(frozen=True)
class Look:
    """What was counted since entry. `takers`: who had the processor that a thread of clawd waited for: waits, their
    time in nanoseconds, how many of these were pre-emptions.
    """

    hists: Mapping[tuple[str, str], Hist]
    counters: Mapping[str, int]
    takers: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Cost:
    """Time the programs ran since entry, as the kernel has it, and how often; None where it does not tell."""

    bpf_ns: int | None
    bpf_runs: int | None
    load_ns: int
    programs: int


@dataclass
class Tracer:
    """Of process `pid`. `lanes`: the class of each local port that is a lane. `parts`: `writes`, `sched`, or both.

    Raises HostError when not one program could be attached; `lacking` says what else could not, and why.
    """

    pid: int
    lanes: Mapping[int, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ("writes", "sched")
    backends: dict[str, str] = field(default_factory=dict)
    """What tells a stage: each that is attached."""
    lacking: dict[str, str] = field(default_factory=dict)
    """By stage: why it is not seen."""

    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _load_ns: int = 0
    _has_cost: bool = False

    def __enter__(self) -> Tracer:
        began_ns = time.monotonic_ns()
        with contextlib.ExitStack() as stack:
            programs = self._programs()
            flags, events = [f"-DCLAW_PID={self.pid}"], [*TRACEPOINTS.values()]
            self._loaded = bpf.load(SOURCE, programs, flags, [*programs], events)
            stack.callback(self._loaded.close)
            self._attach_all(stack)
            if not self.backends:
                raise HostError(f"nothing can be traced here: {next(iter(self.lacking.values()), 'no program')}")
            self._hist = bpfcall.mapped(self._loaded.maps["hist"])
            stack.callback(self._hist.close)
            with contextlib.suppress(OSError):  # then the kernel does not tell the cost
                stack.callback(os.close, bpfcall.measure_cost())
                self._has_cost = True
            lanes = Table(self._loaded.maps["lanes"])
            for port, name in self.lanes.items():
                lanes.set(port, struct.pack("=I", CLASSES.index(name)))
            self.refresh()
            self._stack = stack.pop_all()
        self._load_ns = time.monotonic_ns() - began_ns
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _programs(self) -> dict[str, str]:
        wanted: dict[str, str] = {}
        if "writes" in self.parts:
            wanted |= {name: kind for choices in WRITES for name, kind, _ in choices}
            wanted |= dict.fromkeys(CGROUP_SKB, "CGROUP_SKB")
        names = [name for name in TRACEPOINTS if (name in ("claw_queued", "claw_driven")) == ("writes" in self.parts)]
        if len(self.parts) == 2:
            names = [*TRACEPOINTS]
        return wanted | dict.fromkeys(names, "TRACEPOINT")

    def _attach_all(self, stack: contextlib.ExitStack) -> None:
        if "writes" in self.parts:
            self._attempt("socket", lambda: self._follow(stack))
            if "socket" in self.backends:
                self.backends["acked"] = self.backends["socket"]
                self._attempt("device", lambda: self._at_tracepoints(stack, "claw_queued", "claw_driven"))
        if "sched" in self.parts:
            self._attempt("runq", lambda: self._at_tracepoints(stack, "claw_woken", "claw_switched"))

    def _attempt(self, stage: str, attach: object) -> None:
        try:
            self.backends[stage] = attach()  # type: ignore[operator]
        except HostError as error:
            self.lacking[stage] = error.message
        except OSError as error:
            self.lacking[stage] = error.strerror or str(error)

    def _follow(self, stack: contextlib.ExitStack) -> str:
        """Writes and packets of the control group of `pid`."""
        directory = os.open(cgroup_of(self.pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name, kind in CGROUP_SKB.items():
                stack.callback(os.close, bpfcall.attach(self._program(name), directory, kind))
        finally:
            os.close(directory)
        used = [self._first_of(stack, choices) for choices in WRITES]
        return f"{', '.join(dict.fromkeys(used))}; cgroup_skb"

    def _first_of(self, stack: contextlib.ExitStack, choices: tuple[tuple[str, str, str], ...]) -> str:
        """Attach the first that this kernel has."""
        why: list[str] = []
        for name, kind, place in choices:
            try:
                tracepoint = place if kind == "RAW_TRACEPOINT" else ""
                stack.callback(os.close, bpfcall.attach_tracing(self._program(name), tracepoint))
            except HostError as error:
                why.append(error.message)
            except OSError as error:
                why.append(f"{place}: {error.strerror}")
            else:
                return f"{'tracepoint' if tracepoint else 'fentry'} {place}"
        raise HostError("; ".join(why))

    def _at_tracepoints(self, stack: contextlib.ExitStack, *names: str) -> str:
        for name in names:
            event = TRACEPOINTS[name]
            stack.callback(os.close, tracefs.attach(self._program(name), event, self._loaded.events[event]))
        return f"tracepoint {TRACEPOINTS[names[-1]].rpartition('/')[2]}"

    def _program(self, name: str) -> int:
        if name not in self._loaded.programs:
            raise HostError(f"{name}: {self._loaded.lacking.get(name, 'not loaded')}")
        return self._loaded.programs[name]

    def refresh(self) -> None:
        """Threads of the process may have come since."""
        if "runq" not in self.backends:
            return
        table = Table(self._loaded.maps["threads"])
        with contextlib.suppress(OSError):  # the process is gone: who asks will see
            for path in Path(f"/proc/{self.pid}/task").iterdir():
                table.set(int(path.name), struct.pack("=I", 1))

    def look(self) -> Look:
        hists = {}
        for stage, stage_name in enumerate(STAGES):
            for klass, class_name in enumerate(CLASSES):
                hists[stage_name, class_name] = self._hist_of(stage * len(CLASSES) + klass)
        counters = Table(self._loaded.maps["counters"])
        return Look(hists, {name: counters.total(at) for at, name in enumerate(COUNTERS)}, self._takers())

    def _hist_of(self, place: int) -> Hist:
        counts = array("Q", self._hist[place * BUCKETS * 8 : (place + 1) * BUCKETS * 8])
        (longest,) = struct.unpack_from("=Q", Table(self._loaded.maps["longest"]).get(place))
        return Hist(counts, longest)

    def _takers(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        table = Table(self._loaded.maps["takers"])
        for key in table.raw_keys():
            with contextlib.suppress(KeyError):
                name = key.partition(b"\0")[0].decode("ascii", "replace")
                found[name] = struct.unpack_from("=QQQ", table.get_raw(key))
        return found

    def cost(self) -> Cost:
        told = [bpfcall.program_cost(fd) for fd in self._loaded.programs.values()]
        if not self._has_cost:
            return Cost(None, None, self._load_ns, len(told))
        return Cost(sum(ns for ns, _ in told), sum(runs for _, runs in told), self._load_ns, len(told))


def cgroup_of(pid: int) -> Path:
    """Its directory in version 2 of control groups."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError as error:
        raise HostError(f"process {pid} is gone") from error
    path = next((line.partition("::")[2] for line in lines if line.startswith("0::")), "/")
    return unified_mount() / path.lstrip("/")
