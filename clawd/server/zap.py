# SPDX-License-Identifier: Apache-2.0
"""Who may speak to the tcp lanes: libzmq asks here (ZAP, RFC 27) before it lets a connection in. It asks by an inproc
socket that must be bound before the lanes are; when nobody answers nobody gets in.
"""

from __future__ import annotations

import time

import zmq
import zmq.utils.z85

from clawd import log
from clawd.keys import AllowList
from clawd.server.tcp import is_loopback

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = "clawd"
LOOK_MAX = 64
"""Requests answered a pass: a crowd of strangers must not hold up the relay."""
TELL_NS = 10_000_000_000
_VERSION = b"1.0"
_PARTS = 6
"""Frames of a request without its credentials."""


class Zap:
    """Answers every request. With `allow` only keys that are there; without, clients of this host need none."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allow: AllowList | None) -> None:
        self._allow = allow
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.fd = int(self._socket.getsockopt(zmq.FD))
        """Readable when there may be a request."""
        self._refused = 0
        self._told_ns = -TELL_NS

    def look(self) -> bool:
        """True: there may be more, so look again before sleeping."""
        for _ in range(LOOK_MAX):
            try:
                request = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._socket.send_multipart(self._answer(request))
        return True

    def close(self) -> None:
        self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        if len(request) < _PARTS or request[0] != _VERSION:
            return [_VERSION, request[1] if len(request) > 1 else b"", b"500", b"", b"", b""]
        _, id, domain, address, _, mechanism, *credentials = request
        user = self._user(domain, address.decode(errors="replace"), mechanism, credentials)
        if user is None:
            self._tell(address)
            return [_VERSION, id, b"400", b"not allowed", b"", b""]
        return [_VERSION, id, b"200", b"", user, b""]

    def _user(self, domain: bytes, address: str, mechanism: bytes, credentials: list[bytes]) -> bytes | None:
        """The key it comes by, empty where none is needed; None: it may not."""
        if domain != DOMAIN.encode():
            return None
        if self._allow is None:
            try:
                return b"" if mechanism == b"NULL" and is_loopback(address) else None
            except ValueError:
                return None
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return None
        self._allow.refresh()
        public = bytes(zmq.utils.z85.encode(credentials[0]))
        return public if self._allow.find(public.decode()) else None

    def _tell(self, address: bytes) -> None:
        self._refused += 1
        now_ns = time.monotonic_ns()
        if now_ns - self._told_ns >= TELL_NS:
            log.warning("keys refused", count=self._refused, address=address.decode(errors="replace"))
            self._refused, self._told_ns = 0, now_ns
