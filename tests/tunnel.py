# SPDX-License-Identifier: Apache-2.0
"""A link between two network namespaces that this process makes and holds: packets go from one TUN device to the other
as late, as often and as fast as its standard input says, one JSON object a line. `python tests/tunnel.py SEED` prints
the two namespaces' descriptors.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time

ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 1500
QUEUE_BYTES = 256 << 10
"""What a direction holds when packets come faster than they may go; more is lost."""

_CLONE_NEWNET = 0x40000000
# linux/if_tun.h, linux/sockios.h
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _IFF_UP = 0x8913, 0x8914, 0x8916, 0x891C, 1


def _configure(name: bytes, address: str | None) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def ask(request: int, value: bytes) -> bytes:
            return fcntl.ioctl(control, request, struct.pack("16s24s", name, value))

        def inet(text: str) -> bytes:
            return struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(text))

        if address:
            ask(_SIOCSIFADDR, inet(address))
            ask(_SIOCSIFNETMASK, inet("255.255.255.0"))
        (flags,) = struct.unpack_from("=H", ask(_SIOCGIFFLAGS, b""), 16)
        ask(_SIOCSIFFLAGS, struct.pack("=H", flags | _IFF_UP))


def make_end(address: str) -> tuple[int, int]:
    """A new namespace with a device of this address: its descriptor, and the device's."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"clawd0", _IFF_TUN_NO_PI))
    _configure(b"lo", None)
    _configure(b"clawd0", address)
    return os.open("/proc/self/ns/net", os.O_RDONLY), device


class Way:
    """One direction."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.queue: list[tuple[float, int, bytes]] = []
        self.free_at = 0.0
        self.queued = 0


def carry(devices: tuple[int, int], dice: random.Random) -> None:
    """Until standard input ends."""
    ways = {devices[0]: Way(devices[1]), devices[1]: Way(devices[0])}
    loss, delay_s, jitter_s, rate, up, count = 0.0, 0.0, 0.0, 0.0, True, 0
    carried = lost = 0
    while True:
        due = min((way.queue[0][0] for way in ways.values() if way.queue), default=None)
        now = time.monotonic()
        wait = None if due is None else max(0.0, due - now)
        readable, _, _ = select.select([0, *devices], [], [], wait)
        now = time.monotonic()
        if 0 in readable:
            line = os.read(0, 4096)
            if not line:
                return
            for text in line.splitlines():
                said = json.loads(text)
                loss, delay_s = said.get("loss", loss), said.get("delay_s", delay_s)
                jitter_s = said.get("jitter_s", jitter_s)
                rate, up = said.get("rate", rate), said.get("up", up)
                print(json.dumps({"carried": carried, "lost": lost}), flush=True)
        for device, way in ways.items():
            if device in readable:
                for _ in range(64):
                    try:
                        packet = os.read(device, 65536)
                    except BlockingIOError:
                        break
                    if not up or dice.random() < loss or way.queued > QUEUE_BYTES:
                        lost += 1
                        continue
                    start = max(now, way.free_at)
                    way.free_at = start + (len(packet) / rate if rate else 0.0)
                    count += 1
                    due_at = way.free_at + delay_s + dice.uniform(-jitter_s, jitter_s)
                    heapq.heappush(way.queue, (due_at, count, packet))
                    way.queued += len(packet)
            while way.queue and way.queue[0][0] <= now:
                packet = heapq.heappop(way.queue)[2]
                way.queued -= len(packet)
                carried += 1
                try:
                    os.write(way.to, packet)
                except OSError:
                    lost += 1


def main() -> None:
    namespaces, devices = zip(*(make_end(address) for address in ADDRESSES), strict=True)
    print(json.dumps(namespaces), flush=True)
    carry(devices, random.Random(int(sys.argv[1])))


if __name__ == "__main__":
    main()
