# SPDX-License-Identifier: Apache-2.0
"""What is known of the way to a client: round trip, jitter, loss. A port: TCP_INFO answers for tcp; ipc has no way to
speak of.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

# struct tcp_info of linux/tcp.h: tcpi_rtt, tcpi_rttvar, tcpi_total_retrans, tcpi_segs_out; fields are only ever added
_RTT = struct.Struct("=II")
_RTT_AT = 68
_RETRANS_AT = 100
_SEGS_OUT_AT = 136
_LEN = 140

WINDOW_SEGMENTS = 200
"""Loss is told over so many segments that were sent, or more."""


class Network(NamedTuple):
    """Smoothed round trip and its mean deviation in microseconds; how many of a million segments were sent again."""

    rtt_us: int
    jitter_us: int
    loss_ppm: int


class Way(Protocol):
    """Looks at one connection again and again."""

    def look(self) -> Network | None:
        """What is known now; None: nothing, or the connection is gone."""


@dataclass
class Loss:
    """Of a connection, over its last segments, from what the kernel counts from its start on."""

    _segments: int = 0
    _again: int = 0
    _loss_ppm: int = 0

    def learn(self, segments: int, again: int) -> int:
        """What of a million was sent again lately."""
        sent = (segments - self._segments) % 2**32
        if sent >= WINDOW_SEGMENTS:
            self._loss_ppm = min(1_000_000, (again - self._again) % 2**32 * 1_000_000 // sent)
            self._segments, self._again = segments, again
        return self._loss_ppm


@dataclass
class TcpWay:
    """By TCP_INFO of the connection's descriptor, which stays its owner's: it is looked at, never closed."""

    fd: int
    _loss: Loss = field(default_factory=Loss)

    def look(self) -> Network | None:
        try:
            with socket.socket(fileno=self.fd) as connection:
                try:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                finally:
                    connection.detach()
        except OSError:
            return None
        if len(info) < _LEN:
            return None
        rtt_us, jitter_us = _RTT.unpack_from(info, _RTT_AT)
        (again,) = struct.unpack_from("=I", info, _RETRANS_AT)
        (segments,) = struct.unpack_from("=I", info, _SEGS_OUT_AT)
        return Network(rtt_us, jitter_us, self._loss.learn(segments, again))
