# SPDX-License-Identifier: Apache-2.0
"""The tracer: times of clawd's writes on their way to tcp clients, and of its threads on theirs to a processor.
Attached from entry to exit; also when it is killed, for all it has are descriptors.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from clawd.errors import HostError
from clawd.kernel import bpf, bpfcall, tracefs
from clawd.kernel.bpfcall import Table
from clawd.kernel.hists import CLASSES, COUNTERS, STAGES, Counted, Hist, set_lanes
from clawd.kernel.shaper import unified_mount
from clawd.kernel.stamps import BACKEND, Stamps

SOURCE = "tracer.bpf.c"
CGROUP_SKB = {"claw_egress": bpfcall.EGRESS, "claw_ingress": bpfcall.INGRESS}
TRACEPOINTS = {
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
DRIVEN = (("claw_driven", "RAW_TRACEPOINT", "net_dev_xmit"),)
CLOSED = (("claw_closed", "RAW_TRACEPOINT", "inet_sock_set_state"),)

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode, the same on every host: PID_NS_INIT_INO of linux/nsfs.h. The numbers of processes that programs in the
kernel see are those in it.
"""


@dataclass(frozen=True)
class Look:
    """What was counted since entry. `counters`: those of COUNTERS, and `full_threads`, how many threads are not
    followed now for want of room. `takers`: who had the processor that a thread of clawd waited for: waits, their time
    in nanoseconds, how many of these were pre-emptions.
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
    `is_stamped`: writes by transmit timestamps where the kernel has them, else by tracepoints.

    Raises HostError when not one program could be attached; `lacking` says what else could not, and why.
    """

    pid: int
    lanes: Mapping[int, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ("writes", "sched")
    is_stamped: bool = True
    backends: dict[str, str] = field(default_factory=dict)
    """What tells a stage: each that is attached."""
    lacking: dict[str, str] = field(default_factory=dict)
    """By stage: why it is not seen. `stamps`: why there are no transmit timestamps."""

    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _load_ns: int = 0
    _has_cost: bool = False
    _stamps: Stamps | None = None
    _loaded: bpf.Loaded | None = None
    _counted: Counted | None = None
    _threads: set[int] = field(default_factory=set)
    """Those that are followed."""
    _full_threads: int = 0

    def __enter__(self) -> Tracer:
        began_ns = time.monotonic_ns()
        if Path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE:
            raise HostError(
                "a container has numbers of its own for its processes",
                "run it in the host's PID namespace (--pid=host)",
            )
        with contextlib.ExitStack() as stack:
            parts = self.parts
            if "writes" in parts and self.is_stamped and self._stamp(stack):
                parts = tuple(part for part in parts if part != "writes")
            if parts:
                self._load(stack, parts)
            if not self.backends:
                raise HostError(f"nothing can be traced here: {next(iter(self.lacking.values()), 'no program')}")
            with contextlib.suppress(OSError):  # then the kernel does not tell the cost
                stack.callback(os.close, bpfcall.measure_cost())
                self._has_cost = True
            self.refresh()
            self._stack = stack.pop_all()
        self._load_ns = time.monotonic_ns() - began_ns
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _stamp(self, stack: contextlib.ExitStack) -> bool:
        try:
            self._stamps = stack.enter_context(Stamps(self.pid, cgroup_of(self.pid), self.lanes))
        except HostError as error:
            self.lacking["stamps"] = error.message
            return False
        self.backends |= dict.fromkeys(("socket", "device", "acked", "network"), BACKEND)
        return True

    def _load(self, stack: contextlib.ExitStack, parts: tuple[str, ...]) -> None:
        programs = _programs(parts)
        flags, events = [f"-DCLAW_PID={self.pid}"], [*TRACEPOINTS.values()]
        self._loaded = bpf.load(SOURCE, programs, flags, [*programs], events)
        stack.callback(self._loaded.close)
        self._counted = Counted(self._loaded)
        stack.callback(self._counted.close)
        set_lanes(self._loaded, self.lanes)
        if "writes" in parts:
            self._attempt("socket", lambda: self._follow(stack))
            if "socket" in self.backends:
                self.backends |= dict.fromkeys(("acked", "network"), self.backends["socket"])
                self._attempt("device", lambda: self._first_of(stack, DRIVEN))
        if "sched" in parts:
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
        self._first_of(stack, CLOSED)  # before a socket takes room that nobody would free
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
        assert self._loaded
        for name in names:
            event = TRACEPOINTS[name]
            stack.callback(os.close, tracefs.attach(self._program(name), event, self._loaded.events[event]))
        return f"tracepoint {TRACEPOINTS[names[-1]].rpartition('/')[2]}"

    def _program(self, name: str) -> int:
        assert self._loaded
        if name not in self._loaded.programs:
            raise HostError(f"{name}: {self._loaded.lacking.get(name, 'not loaded')}")
        return self._loaded.programs[name]

    def refresh(self) -> None:
        """Threads of the process, and its sockets, may have come since."""
        if self._stamps:
            self._stamps.refresh()
            others = f"; {self._stamps.unseen} sockets of another control group not followed"
            self.backends["socket"] = BACKEND + (others if self._stamps.unseen else "")
        if "runq" not in self.backends or not self._loaded:
            return
        self._follow_threads(Table(self._loaded.maps["threads"]))

    def _follow_threads(self, table: Table) -> None:
        threads: set[int] = set()
        with contextlib.suppress(OSError):  # the process is gone: who asks will see
            threads = {int(path.name) for path in Path(f"/proc/{self.pid}/task").iterdir()}
        # First those that ended: their room is needed, and their numbers will be others'
        for thread in self._threads - threads:
            table.remove(thread)
        self._threads &= threads
        self._full_threads = 0
        for thread in threads - self._threads:
            try:
                table.set(thread, struct.pack("=I", 1))
            except OSError:
                self._full_threads += 1
            else:
                self._threads.add(thread)

    def look(self) -> Look:
        writes = self._stamps.counted if self._stamps else self._counted
        hists: dict[tuple[str, str], Hist] = {}
        for stage in STAGES:
            counted = self._counted if stage == "runq" else writes
            hists |= {(stage, klass): counted.hist(stage, klass) if counted else Hist() for klass in CLASSES}
        counters = dict.fromkeys(COUNTERS, 0)
        for each in (self._stamps and self._stamps.counted, self._counted):
            if each:
                counters = {name: counters[name] + value for name, value in each.counters().items()}
        return Look(hists, {**counters, "full_threads": self._full_threads}, self._takers())

    def _takers(self) -> dict[str, tuple[int, int, int]]:
        found: dict[str, tuple[int, int, int]] = {}
        if not self._loaded:
            return found
        table = Table(self._loaded.maps["takers"])
        for key in table.raw_keys():
            with contextlib.suppress(KeyError):
                name = key.partition(b"\0")[0].decode("ascii", "replace")
                found[name] = struct.unpack_from("=QQQ", table.get_raw(key))
        return found

    def cost(self) -> Cost:
        loaded = [each for each in (self._stamps and self._stamps.loaded, self._loaded) if each]
        told = [bpfcall.program_cost(fd) for each in loaded for fd in each.programs.values()]
        if not self._has_cost:
            return Cost(None, None, self._load_ns, len(told))
        return Cost(sum(ns for ns, _ in told), sum(runs for _, runs in told), self._load_ns, len(told))


def _programs(parts: tuple[str, ...]) -> dict[str, str]:
    wanted: dict[str, str] = {}
    if "writes" in parts:
        wanted |= {name: kind for choices in (*WRITES, DRIVEN, CLOSED) for name, kind, _ in choices}
        wanted |= dict.fromkeys(CGROUP_SKB, "CGROUP_SKB")
    if "sched" in parts:
        wanted |= dict.fromkeys(TRACEPOINTS, "TRACEPOINT")
    return wanted


def cgroup_of(pid: int) -> Path:
    """Its directory in version 2 of control groups."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError as error:
        raise HostError(f"process {pid} is gone") from error
    path = next((line.partition("::")[2] for line in lines if line.startswith("0::")), "/")
    return unified_mount() / path.lstrip("/")
