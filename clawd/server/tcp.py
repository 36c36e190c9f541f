# SPDX-License-Identifier: Apache-2.0
"""Listeners for clients of other hosts, made here because libzmq sets few of the options that tokens need; what the
kernel made of each is read back. Accepted sockets inherit all but the priority.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

from clawd import log
from clawd.errors import HostError

BACKLOG = 128
LOWAT_BYTES = 16_384
"""Unsent bytes the kernel takes of a connection: what is still ours can be overtaken. One frame."""
PRIORITY = 6
"""SO_PRIORITY of an express lane: the most that needs no privilege, and the first band of fq and pfifo_fast."""
KEEPALIVE_PROBES = 3
# linux/tcp.h; Python does not name them
TCP_NOTSENT_LOWAT = 25
TCP_THIN_LINEAR_TIMEOUTS = 16
# asm-generic/socket.h, Linux 4.12
SO_COOKIE = 57


def listen(host: str, port: int, *, fastopen: bool, keepalive_ns: int, thin: bool = False) -> socket.socket:
    """Raises HostError when the address cannot be had. An option the kernel refuses is logged: it costs time only.
    `thin`: what it carries is too little at a time for a fast retransmit.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    except OSError as error:
        raise HostError(f'cannot listen on "{host}:{port}": {error.strerror}') from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "name an address of this host, and a port of which the next one is free too"
        raise HostError(f'cannot listen on "{host}:{port}": {error.strerror}', hint) from error
    for what, level, option, value in _options(keepalive_ns):
        _set(listener, what, level, option, value)
    if thin:  # timeouts are not doubled at once
        _set(listener, "TCP_THIN_LINEAR_TIMEOUTS", socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1)
    fast_open(listener, fastopen)
    return listener


def _options(keepalive_ns: int) -> list[tuple[str, int, int, int]]:
    seconds = max(1, keepalive_ns // 1_000_000_000)
    return [
        ("TCP_NODELAY", socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ("TCP_NOTSENT_LOWAT", socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, LOWAT_BYTES),
        ("SO_KEEPALIVE", socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        ("TCP_KEEPIDLE", socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds),
        ("TCP_KEEPINTVL", socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // KEEPALIVE_PROBES)),
        ("TCP_KEEPCNT", socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        # Without it, what was sent to a host that is gone keeps its connection for a quarter of an hour
        ("TCP_USER_TIMEOUT", socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2 * keepalive_ns // 1_000_000),
    ]


def _set(where: socket.socket, what: str, level: int, option: int, value: int) -> None:
    try:
        where.setsockopt(level, option, value)
        found = where.getsockopt(level, option)
    except OSError as error:
        log.warning("socket option not set, going on", option=what, value=value, reason=error.strerror)
        return
    if found != value:
        log.warning("socket option not as set, going on", option=what, value=value, found=found)


def fast_open(listener: socket.socket, on: bool) -> None:
    """Let clients send their first bytes with the SYN, or no more. Works on a socket that listens already."""
    _set(listener, "TCP_FASTOPEN", socket.IPPROTO_TCP, socket.TCP_FASTOPEN, BACKLOG if on else 0)


def cookie(connection: socket.socket) -> int:
    """A number no other socket of this boot has: descriptors are used again."""
    return int(struct.unpack("=Q", connection.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))[0])


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this host reaches."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
