# SPDX-License-Identifier: Apache-2.0
"""Whether a value does what it is for: asked of the kernel where it acts, in this network namespace. Each check gives
what is wrong, empty when nothing is.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from clawd.kernel.change import Row

TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_INFO, TCP_CONGESTION, TCP_FASTOPEN = 4, 5, 6, 11, 13, 23
IP_FREEBIND = 15
BACKLOG_AT = 28
"""Of tcpi_sacked in struct tcp_info: for a listener it is its backlog."""
QUEUE = 16


def _bound() -> socket.socket:
    """For this host alone, also where the loopback device is down."""
    made = socket.socket()
    made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
    made.bind(("127.0.0.1", 0))
    return made


def listener_takes_syn_data(row: Row) -> str:
    """A listener that asks for it, as clawd's do, has a queue for requests that come with the SYN. The first one of a
    namespace makes the kernel invent net.ipv4.tcp_fastopen_key.
    """
    if not int(row.live or 0) & 2:
        return ""
    with _bound() as listener:
        listener.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN, QUEUE)
        listener.listen(QUEUE)
        found = listener.getsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN)
    return "" if found > 0 else "a listener that asks for TCP Fast Open gets no queue"


def listener_has_room(row: Row) -> str:
    with _bound() as listener:
        listener.listen(1 << 20)
        info = listener.getsockopt(socket.IPPROTO_TCP, TCP_INFO, BACKLOG_AT + 4)
    found = int.from_bytes(info[BACKLOG_AT : BACKLOG_AT + 4], "little")
    return "" if found >= int(row.live or 0) else f"a listener lets {found} wait"


def _of_a_socket(option: int) -> Callable[[Row], str]:
    def check(row: Row) -> str:
        with socket.socket() as probe:
            found = probe.getsockopt(socket.IPPROTO_TCP, option)
        return "" if found == int(row.live or 0) else f"a new socket has {found}"

    return check


def congestion_control(row: Row) -> str:
    with socket.socket() as probe:
        found = probe.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16).partition(b"\0")[0].decode()
    return "" if found == row.live else f"a new socket has {found}"


_CHECKS = {
    "net.ipv4.tcp_fastopen": listener_takes_syn_data,
    "net.core.somaxconn": listener_has_room,
    "net.ipv4.tcp_keepalive_time": _of_a_socket(TCP_KEEPIDLE),
    "net.ipv4.tcp_keepalive_intvl": _of_a_socket(TCP_KEEPINTVL),
    "net.ipv4.tcp_keepalive_probes": _of_a_socket(TCP_KEEPCNT),
    "net.ipv4.tcp_congestion_control": congestion_control,
}


def effect(row: Row) -> str:
    """What is wrong with what a place that holds the wanted value does. Queues, slices and weights were read where they
    act.
    """
    check = _CHECKS.get(row.place.name)
    if check is None or row.live is None:
        return ""
    try:
        return check(row)
    except OSError as error:
        return f"not to be seen: {error.strerror}"
