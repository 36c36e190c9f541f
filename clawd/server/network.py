# SPDX-License-Identifier: Apache-2.0
"""What is known of the way to a client where no row tells it: a port. TCP_INFO answers for tcp; ipc has no way to speak
of.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from typing import Protocol

from clawd.core import Told

# struct tcp_info of linux/tcp.h: tcpi_rtt, tcpi_rttvar, tcpi_total_retrans, tcpi_segs_out; fields are only ever added
_RTT = struct.Struct("=II")
_RTT_AT = 68
_RETRANS_AT = 100
_SEGS_OUT_AT = 136
_LEN = 140


class Way(Protocol):
    """Looks at one connection again and again."""

    def look(self) -> Told | None:
        """What is known now; None: nothing, or the connection is gone."""


@dataclass
class TcpWay:
    """By TCP_INFO of the connection's descriptor, which stays its owner's: it is looked at, never closed."""

    fd: int

    def look(self) -> Told | None:
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
        return Told(time.monotonic_ns(), rtt_us, jitter_us, segments, again)
