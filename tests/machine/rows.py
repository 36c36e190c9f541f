# SPDX-License-Identifier: Apache-2.0
"""Run in clawd.slice: what the shaper's rows tell of connections over a link with delay, jitter and loss."""

from __future__ import annotations

import array
import json
import socket
import sys

sys.path.append(sys.argv[1])

from clawd import protocol
from clawd.server.shaping import Rows
from tests.veth import NEAR, Side, link

WAYS = {
    "plain": "",
    "delayed": "tc qdisc replace dev near root netem delay 50ms",
    "jittered": "tc qdisc replace dev near root netem delay 30ms 20ms",
    "lossy": "tc qdisc replace dev near root netem loss 8%",
}


def rows_of(helper: socket.socket) -> Rows:
    while True:
        helper.send(b'{"op":"rows"}')
        packet, ancillary, _, _ = helper.recvmsg(protocol.ANSWER_MAX, socket.CMSG_SPACE(8))
        told = protocol.decode(packet, (protocol.SocketRows,), protocol.ANSWER_MAX)
        if told.entries:
            fds = array.array("i")
            for _level, _kind, data in ancillary:
                fds.frombytes(data)
            return Rows(told, fds)


def carry(near: Side, far: Side, listener: socket.socket, rows: Rows) -> dict[str, int]:
    peer = far.make(lambda: socket.create_connection(listener.getsockname(), 60))
    ours, _ = listener.accept()
    with peer, ours:
        for _ in range(60):
            ours.sendall(bytes(1000))
            left = 1000
            while left:
                left -= len(peer.recv(left))
        cookie = int.from_bytes(ours.getsockopt(socket.SOL_SOCKET, 57, 8), "little")
        row = rows.find(cookie)
        assert row, "no row"
        return row


def main() -> None:
    with link() as (near, far), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as helper:
        helper.connect("/run/clawd-kernel/kernel.sock")
        listener = near.make(lambda: socket.create_server((NEAR, 0)))
        lane = protocol.SetLane(listener.getsockname()[1], "express", lowat=16384)
        helper.send(protocol.encode(lane))
        helper.recv(protocol.ANSWER_MAX)
        rows = rows_of(helper)
        told = {}
        for name, command in WAYS.items():
            if command:
                near.run(command)
            told[name] = carry(near, far, listener, rows)
    print(json.dumps(told))


main()
