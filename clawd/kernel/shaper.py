# SPDX-License-Identifier: Apache-2.0
"""The shaper: its program on clawd's cgroup, a policy for each lane's port, a row for each socket. Loaded when the
first lane is named; ends with its owner, and what a killed one left is swept by the next.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from clawd import log, protocol
from clawd.errors import HostError
from clawd.kernel import bpf, bpfcall, egress
from clawd.kernel.bpfcall import Table
from clawd.kernel.connections import count_open
from clawd.kernel.egress import Egress
from clawd.kernel.pins import Pins

SOURCE = "shaper.bpf.c"
ROWS = 4096
"""Sockets seen at once. A power of two; 96 bytes each."""
PINS = Path("/sys/fs/bpf")
OPTIONS = ("pacing", "lowat", "priority", "thin", "congestion")
"""By bit of a row's `refused`."""
COUNTERS = (
    *("runs", "shaped", "ended", "full", "refused", "repaced", "marked", "unmarkable"),
    *(f"refused_{option}" for option in OPTIONS),
)
"""As in ebpf/shaper.h."""
PROOF_NS = 30_000_000_000
"""How long it may be attached without being seen to run."""
LOOK_NS = 4_000_000_000
"""How often devices and queues are looked at: as often as the helper's loop turns."""
LANES_MAX = 64
"""As the map of policies."""


@dataclass(frozen=True)
class Policy:
    """Of a lane's sockets; zero leaves an option as the kernel has it. `pacing` in bytes a second, `lowat` in bytes."""

    lane: int
    pacing: int = 0
    lowat: int = 0
    priority: int = 0
    dscp: int = 0
    thin: int = 0
    congestion: bytes = b""


def unified_mount(mounts: str = "/proc/self/mounts") -> Path:
    """Where version 2 of control groups is mounted. Raises HostError."""
    for line in Path(mounts).read_text().splitlines():
        _device, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise HostError("control groups of version 2 are not mounted", "boot with systemd.unified_cgroup_hierarchy=1")


class Shaper:
    """`cgroup`: whose sockets, and those of cgroups below it. `pins`: a BPF file system, for what is to outlive us."""

    def __init__(
        self, cgroup: Path, pins: Path = PINS, rows: int = ROWS, load: Callable[..., bpf.Loaded] = bpf.load
    ) -> None:
        self._cgroup = cgroup
        self._pins = Pins(pins / "clawd")
        self._rows = rows
        self._load = load
        self._lock = threading.Lock()  # the loader's thread and the helper's loop
        self._loader: threading.Thread | None = None
        self._lanes: dict[int, Policy] = {}
        self._missing: dict[bytes, str] = {}
        """By congestion control: why the kernel cannot give it, empty when it can."""
        self._loaded: bpf.Loaded | None = None
        self._link = -1
        self._cgroup_fd = -1
        self._egress = Egress()
        self._since_ns = 0
        self._looked_ns = time.monotonic_ns()
        self._warned: dict[str, str] = {}
        self._is_swept = False
        """What an earlier helper left is in force until clawd had the time to name lanes anew."""
        self._reason = "no lane was named"
        self._unpinned = ""
        self._is_closed = False

    # --- lanes ---

    def set_lane(self, port: int, policy: Policy) -> None:
        """Shape what is accepted on `port` from now on. Loads the program, in a thread of its own, if it is not."""
        with self._lock:
            if len(self._lanes) >= LANES_MAX and port not in self._lanes:
                raise HostError(f"more than {LANES_MAX} lanes")
            self._lanes[port] = policy
            self._missing[policy.congestion] = find_congestion(policy.congestion)
            if self._loaded:
                self._put(port, policy)
                self._follow()
            elif not self._loader or not self._loader.is_alive():  # what failed may have been put right
                self._reason = "its program is being compiled"
                self._loader = threading.Thread(target=self._start, name="shaper", daemon=True)
                self._loader.start()

    def drop_lanes(self, ports: Iterable[int]) -> None:
        """Shape nothing new there: whose they were is gone. Sockets that are open keep what they have."""
        with self._lock:
            for port in ports:
                if self._lanes.pop(port, None) and self._loaded:
                    Table(self._loaded.maps["policies"]).remove(port)

    def wait(self, timeout_s: float) -> bool:
        """Until it is attached, or it is known why not."""
        if self._loader:
            self._loader.join(timeout_s)
        return self._loaded is not None

    def _put(self, port: int, policy: Policy) -> None:
        assert self._loaded
        table = self._loaded.maps["policies"]
        Table(table).set(port, bpfcall.packed(table, asdict(policy)))

    def _follow(self) -> None:
        """With the lock."""
        assert self._loaded
        if any(policy.dscp or policy.priority for policy in self._lanes.values()):
            is_marking = any(policy.dscp for policy in self._lanes.values())
            program, classes = self._loaded.programs["claw_egress"], Table(self._loaded.maps["classes"])
            self._egress.follow(program, classes, is_marking=is_marking)

    # --- loading ---

    def _start(self) -> None:
        began_ns = time.monotonic_ns()
        try:
            loaded = self._load(
                SOURCE, {"claw_sockops": "SOCK_OPS", "claw_egress": "SCHED_CLS"}, [f"-DCLAW_ROWS={self._rows}"]
            )
            with self._lock:
                if self._is_closed:
                    loaded.close()
                    return
                self._attach(loaded)
        except HostError as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f'cannot attach to "{self._cgroup}": {error.strerror}')
        else:
            log.event("shaper attached", cgroup=self._cgroup, ms=(time.monotonic_ns() - began_ns) // 10**6)

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
        log.warning("no shaping", reason=reason)

    def _attach(self, loaded: bpf.Loaded) -> None:
        """With the lock."""
        try:
            self._cgroup_fd = os.open(self._cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._link = bpfcall.attach(loaded.programs["claw_sockops"], self._cgroup_fd, bpfcall.SOCK_OPS)
        except OSError:
            loaded.close()
            raise
        self._loaded = loaded
        self._since_ns = time.monotonic_ns()
        self._reason = ""
        # After ours is attached: at no time is there none
        maps = {name: loaded.maps[name].fd for name in ("rows", "policies")}
        self._unpinned = self._pins.pin({"link": self._link, **maps})
        egress.sweep()
        self._is_swept = True
        for port, policy in self._lanes.items():
            self._put(port, policy)
        self._follow()
        self._looked_ns = time.monotonic_ns()

    def _sweep(self) -> None:
        """Take away what a killed helper left in force."""
        self._pins.sweep()
        egress.sweep()

    def close(self) -> None:
        """Detach."""
        with self._lock:
            self._is_closed = True
            self._pins.close()
            if not self._is_swept:
                egress.sweep()
            if not self._loaded:
                return
            self._egress.close()
            os.close(self._link)
            os.close(self._cgroup_fd)
            self._loaded.close()
            self._loaded = None
            self._reason = "it was stopped"

    # --- looking ---

    def look(self) -> None:
        """What changed around it: call it again and again."""
        if time.monotonic_ns() - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = time.monotonic_ns()
        self._warn("unseen", "shaper not seen to run", str(self._cgroup) if self._is_unseen() else "")
        with self._lock:
            if self._loaded:
                self._follow()
                self._warn("beside", "other programs may set the same", ",".join(map(str, self._others())))
                self._warn("ahead", "others run before the classifier", ", ".join(self._egress.ahead()))
            elif not self._is_swept and (not self._lanes or self._has_failed()):
                self._sweep()
                self._is_swept = True

    def _warn(self, key: str, what: str, told: str) -> None:
        """In the journal, each time that it is another."""
        if told and self._warned.get(key) != told:
            log.warning(what, reason=told)
        self._warned[key] = told

    def _is_unseen(self) -> bool:
        """It had the time to be seen to run, and was not."""
        with self._lock:
            is_due = self._lanes and self._loaded and time.monotonic_ns() - self._since_ns >= PROOF_NS
        return bool(is_due) and not self.is_proved()

    def _has_failed(self) -> bool:
        return self._loader is not None and not self._loader.is_alive()

    def maps(self) -> tuple[bpf.Map, bpf.Map] | None:
        """The rows, and what clawd wants for them."""
        with self._lock:
            return (self._loaded.maps["rows"], self._loaded.maps["wants"]) if self._loaded else None

    def counters(self) -> dict[str, int]:
        with self._lock:
            if not self._loaded:
                return dict.fromkeys(COUNTERS, 0)
            table = Table(self._loaded.maps["counters"])
            return {name: table.total(number) for number, name in enumerate(COUNTERS)}

    def is_proved(self) -> bool:
        """Whether the program was seen to run. It is called when a socket of its cgroup listens, as one of ours does
        here; where this process is not in that cgroup, not before clawd's own sockets are.
        """
        if not self.counters()["runs"] and self._loaded:
            try:
                with socket.create_server(("127.0.0.1", 0)):
                    pass
            except OSError:
                return False  # no loopback: clawd's sockets will show
        return self.counters()["runs"] > 0

    def state(self) -> protocol.Shaping:
        """What is attached, since when, how often it ran, what runs beside it."""
        is_proved = self.is_proved()
        counters = self.counters()
        with self._lock:
            reason, others, headers = self._reason, [], None
            if self._loaded:
                others, headers = self._others(), self._loaded.headers
                # systemd removes a cgroup that is empty, and its programs with it, and may make another of that name
                if not self._is_same_cgroup():
                    reason = f'"{self._cgroup}" is another than the one attached to; restart clawd-kernel'
            return protocol.Shaping(
                "off" if reason else "attached",
                reason or None,
                str(self._cgroup),
                self._since_ns or None,
                is_proved,
                self._unpinned or None,
                headers,
                len(self._lanes),
                others,
                self._egress.devices,
                self._egress.reason or None,
                self._egress.ahead(),
                self._egress.pacers() if self._loaded else {},
                counters,
                [told(port, policy) for port, policy in self._lanes.items()],
                sorted({why for each in self._lanes.values() if (why := self._missing[each.congestion])}),
                self._egress.classes,
                self._unshaped(),
            )

    def _unshaped(self) -> int:
        """Sockets of the lanes that have no row, for they were there before we were. Where some had no room for one, or
        clawd is in another network namespace, it is not known. With the lock.
        """
        if not self._loaded or Table(self._loaded.maps["counters"]).total(COUNTERS.index("full")):
            return 0
        rows = self._loaded.maps["rows"]
        place = next(field.offset for field in rows.layout if field.name == "port")
        with bpfcall.mapped(rows) as memory:
            starts = range(place, rows.entries * rows.value_size, rows.value_size)
            seen = sum(int.from_bytes(memory[at : at + 4], "little") in self._lanes for at in starts)
        return max(0, count_open(self._lanes) - seen)

    def _is_same_cgroup(self) -> bool:
        try:
            return self._cgroup.stat().st_ino == os.fstat(self._cgroup_fd).st_ino
        except OSError:
            return False

    def _others(self) -> list[int]:
        assert self._loaded
        ours = bpfcall.program_id(self._loaded.programs["claw_sockops"])
        try:
            found = bpfcall.programs_at(self._cgroup_fd, bpfcall.SOCK_OPS, is_effective=True)
        except OSError:
            return []
        return [number for number in found if number != ours]


def told(port: int, policy: Policy) -> dict[str, int | str]:
    """As the state has it, by the words of a request."""
    lane = protocol.LANES[policy.lane - 1]
    return {"port": port, **asdict(policy), "lane": lane, "congestion": policy.congestion.decode()}


def find_congestion(name: bytes) -> str:
    """Why the kernel has no such congestion control, empty when it has. Asking loads its module where we may: at a
    socket's establishment nothing is loaded.
    """
    if not name:
        return ""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except FileNotFoundError:
        return f"this kernel has no congestion control {name.decode()}"
    except OSError as error:
        return f"congestion control {name.decode()} cannot be had: {error.strerror}"
    return ""


def default_cgroup() -> Path:
    try:
        return unified_mount() / "clawd.slice"
    except HostError:
        return Path("/sys/fs/cgroup/clawd.slice")  # attaching will say what is wrong with it
