# SPDX-License-Identifier: Apache-2.0
"""clawd's tcp clients as the kernel has them: its sockets, taken for a look. What the shaper set, such
as the pacing, shows in them too.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

from clawd.ctl import render
from clawd.ctl.trace_target import Target
from clawd.kernel.taken import tcp_sockets

_SO_COOKIE, _SO_MAX_PACING_RATE = 57, 47
_SIOCOUTQ = 0x5411
# struct tcp_info of linux/tcp.h: fields are only added at its end
_INFO_LEN = 168
_U32_AT = {
    "rtt_us": 68,
    "jitter_us": 72,
    "cwnd": 80,
    "retrans": 100,
    "segments": 136,
    "notsent_bytes": 144,
    "min_rtt_us": 148,
}
_DELIVERY_RATE_AT = 160
_UNPACED = (2**32 - 1, 2**64 - 1)


@dataclass(frozen=True)
class Client:
    """A socket. `loss_ppm`: of a million segments, how many were sent again. `queue_bytes`: not acknowledged yet, of
    which `notsent_bytes` have not left. `pacing`: bytes a second, None without a limit.
    """

    client: str
    port: int
    lane: str | None
    rtt_us: int
    jitter_us: int
    min_rtt_us: int
    loss_ppm: int
    retrans: int
    cwnd: int
    pacing: int | None
    delivery: int
    queue_bytes: int
    notsent_bytes: int
    cookie: int


def sockets_of(pid: int, lanes: dict[int, str]) -> list[Client]:
    """Established tcp sockets of a process. Needs root. Raises HostError."""
    return sorted((row for taken in tcp_sockets(pid) if (row := _look(taken, lanes))), key=lambda row: row.client)


def _look(taken: socket.socket, lanes: dict[int, str]) -> Client | None:
    info = taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    try:
        host, port = taken.getpeername()[:2]
    except OSError:
        return None  # it ended meanwhile
    if len(info) < _INFO_LEN:
        return None
    values = {name: int(struct.unpack_from("=I", info, at)[0]) for name, at in _U32_AT.items()}
    segments = values.pop("segments")
    pacing = int.from_bytes(taken.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 8), "little")
    (queue,) = struct.unpack("i", fcntl.ioctl(taken, _SIOCOUTQ, bytes(4)))
    local = taken.getsockname()[1]
    return Client(
        client=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        port=local,
        lane=lanes.get(local),
        loss_ppm=min(1_000_000, values["retrans"] * 1_000_000 // max(1, segments)),
        pacing=None if pacing in _UNPACED else pacing,
        delivery=int(struct.unpack_from("=Q", info, _DELIVERY_RATE_AT)[0]),
        queue_bytes=queue,
        cookie=int.from_bytes(taken.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8), "little"),
        **values,
    )


def collect(target: Target) -> dict[str, Any]:
    """One object, as --json prints it."""
    lanes = {port: "express" if klass == "first" else "bulk" for port, klass in target.lanes.items()}
    rows = [asdict(row) for row in sockets_of(target.pid, lanes)]
    notes = [f"which port is which lane is not known: {target.unknown}"] if target.unknown else []
    return {"version": 1, "sockets": rows, "backend": "TCP_INFO", "notes": notes}


def show(value: dict[str, Any]) -> str:
    rows = [
        (
            row["client"],
            row["lane"],
            *(render.duration(row[name] * 1000) for name in ("rtt_us", "jitter_us")),
            f"{row['loss_ppm'] / 10_000:.2f}%",
            None if row["pacing"] is None else f"{render.size(row['pacing'])}/s",
            render.size(row["queue_bytes"]),
            render.size(row["notsent_bytes"]),
            row["cwnd"],
        )
        for row in value["sockets"]
    ]
    if not rows:
        return "no client is connected by tcp"
    table = render.table(("client", "lane", "rtt", "jitter", "loss", "pacing", "queue", "unsent", "cwnd"), rows)
    return "\n".join([table, *(render.fold(f"note: {render.cell(note)}", 4) for note in value["notes"])])
