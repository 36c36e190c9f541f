# SPDX-License-Identifier: Apache-2.0
"""What operators see and what is behind it: a slow first token, stalls, lost connections, ports that run out. From
clawd's figures of the last minutes and from the counters of this network namespace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from clawd.core import lib
from clawd.ctl import render
from clawd.ctl.check import Finding
from clawd.errors import ClawdError
from clawd.page import Page, quantiles

FIRST_NS = 300_000_000
"""A first token that comes later is felt as a wait."""
STALL_NS = 50_000_000
"""A token that waits so long in its ring is felt as a stall."""
ENOUGH = 20
"""Tokens from which on a quantile says something."""
FULL = 0.75
"""Of a ring, or of the ports there are."""
LOST, LOST_SHARE = 10, 0.01
"""Connections that timed out, and their share of all, from which on it is no accident."""
BUFFER = 256 << 10
TIME_WAIT = "06"
PROC = Path("/proc/thread-self/net")
SYS = Path("/proc/sys/net/ipv4")


def find_symptoms(runtime_dir: Path) -> Iterator[Finding]:
    try:
        with Page(runtime_dir) as page:
            yield check_first_token(page)
            yield check_stalls(page)
    except ClawdError:
        pass  # no clawd, which was said before
    yield check_disconnects()
    yield check_ports()


def check_first_token(page: Page) -> Finding:
    count, (first,) = quantiles(page.lately(lib.CLAW_HIST_FIRST), (0.95,))
    if count < ENOUGH or first <= FIRST_NS:
        return Finding("first_token", "ok", "first tokens come within 300ms, as far as there were any")
    _, (ours,) = quantiles(page.lately(lib.CLAW_HIST_SEND), (0.95,))
    what = f"first tokens take {render.duration(first)} (P95 of {count}), {render.duration(ours)} of it in clawd"
    if ours > FIRST_NS // 3:
        fix = "clawctl consumers shows who is blocked, clawctl tune what the kernel may do; see clawctl(1)"
        return Finding("first_token", "warn", f"{what}: it waits here", fix)
    return Finding("first_token", "warn", f"{what}: the model is cold or its queue is long",
                   "warm the model: send it a prompt of its own at the start and when it was idle;"
                   " clawctl streams shows each one's first token; see clawctl(1)")  # fmt: skip


def check_stalls(page: Page) -> Finding:
    count, (late,) = quantiles(page.lately(lib.CLAW_HIST_COMMIT), (0.99,))
    ring = max(page.rings(), key=lambda row: row.used_bytes / max(1, row.ring_bytes), default=None)
    share = ring.used_bytes / max(1, ring.ring_bytes) if ring is not None else 0.0
    if share < FULL and (count < ENOUGH or late <= STALL_NS):
        return Finding("stalls", "ok", "no ring is nearly full, no token waits in one")
    size = ring.ring_bytes if ring is not None else 0
    if share >= FULL:
        what = f"a ring of {render.size(size)} is {share:.0%} full"
    else:
        what = f"tokens wait {render.duration(late)} in their ring (P99 of {count})"
    wanted = render.size(max(BUFFER, 2 * size))
    return Finding("stalls", "warn", f"{what}: an engine writes more at once than it has room for",
                   f"put buffer_size = {wanted} below [stream], clawctl reload, and attach the engine anew;"
                   " see clawd.conf(5)")  # fmt: skip


def check_disconnects(proc: Path = PROC) -> Finding:
    lost = _counter(proc / "netstat", "TcpExt", "TCPAbortOnTimeout")
    opened = _counter(proc / "snmp", "Tcp", "ActiveOpens") + _counter(proc / "snmp", "Tcp", "PassiveOpens")
    if lost < max(LOST, LOST_SHARE * opened):
        return Finding("disconnects", "ok", f"{lost} of {opened} TCP connections timed out since the boot")
    return Finding("disconnects", "warn", f"{lost} of {opened} TCP connections timed out since the boot: something on"
                   " the way forgets silent ones",
                   "put keepalive = 10s below [network] and clawctl reload; for other programs: clawctl tune apply;"
                   " see clawd.conf(5)")  # fmt: skip


def check_ports(proc: Path = PROC, sys: Path = SYS) -> Finding:
    low, high = (int(word) for word in (_text(sys / "ip_local_port_range") or "32768 60999").split())
    peer, used, waiting = _busiest(proc, low, high)
    there_are = high - low + 1
    what = f"{used} of {there_are} ports are taken towards one peer, {waiting} of them only wait"
    if used < FULL * there_are:
        return Finding("ports", "ok", what if peer else f"none of {there_are} ports is taken")
    if _text(sys / "tcp_tw_reuse").strip() != "1":
        fix = "clawctl tune apply sets net.ipv4.tcp_tw_reuse = 1; better: keep connections open; see clawctl(1)"
    elif _text(sys / "tcp_timestamps").strip() == "0":
        fix = "sysctl -w net.ipv4.tcp_timestamps=1, without which tcp_tw_reuse does nothing; see clawctl(1)"
    else:
        fix = "keep connections open, or widen net.ipv4.ip_local_port_range; see clawctl(1)"
    return Finding("ports", "warn", f"{what}: soon no connection can be made", fix)


def _busiest(proc: Path, low: int, high: int) -> tuple[str, int, int]:
    """The peer towards which most local ports are taken, how many, and how many of those only wait."""
    used: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for name in ("tcp", "tcp6"):
        for line in _text(proc / name).splitlines()[1:]:
            _, ours, peer, state, *_ = line.split()
            if low <= int(ours.rpartition(":")[2], 16) <= high and not peer.endswith(":0000"):
                used[peer] += 1
                waiting[peer] += state == TIME_WAIT
    peer, count = max(used.items(), key=lambda item: item[1], default=("", 0))
    return peer, count, waiting[peer]


def _counter(path: Path, group: str, name: str) -> int:
    rows = [line.split()[1:] for line in _text(path).splitlines() if line.startswith(f"{group}:")]
    if len(rows) < 2 or name not in rows[0]:
        return 0
    return int(rows[1][rows[0].index(name)])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
