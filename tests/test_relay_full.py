# SPDX-License-Identifier: Apache-2.0
"""A client's queue in ZeroMQ that is full: what met EAGAIN is kept, and goes out in order once there is room."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import zmq

from clawd import protocol
from clawd.core import lib
from clawd.server.access import Who
from clawd.server.relay import Relay
from rig import Rig, parse


class Reader:
    """The client behind the session."""

    who, role, label = Who(1, 0), "consumer", "test"


def test_frames_that_meet_a_full_queue_are_sent_later_in_order(tmp_path: Path) -> None:
    with Rig({"stream_bytes": 1 << 19}) as rig, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        relay = Relay(rig.core, {"session": Reader()}, 8, 8)
        relay._lane.socket.setsockopt(zmq.SNDHWM, 1)
        relay.listen(tmp_path / "relay.sock")
        for option, value in ((zmq.PROBE_ROUTER, 1), (zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
            client.setsockopt(option, value)
        client.connect(f"ipc://{tmp_path / 'relay.sock'}")
        ring = rig.ring()
        ring.open(0, "s")
        count, written, kept = 400, 0, False
        attach = protocol.Attach(session="session", id=1, stream="s", credit=1 << 20)
        got: list[int] = []
        attached, acked, connection = False, 0, 0
        deadline = time.monotonic() + 30
        while len(got) < count:
            assert time.monotonic() < deadline, f"{len(got)} of {count} came"
            if written < count and attached:
                ring.write(0, b"%0700d" % written)
                written += 1
            rig.core.turn()
            relay.send_frames()
            relay.tick([])
            relay.receive()
            stuck = any(each.bulk.pending for each in relay._by_number.values())
            kept |= stuck
            if attached and not kept and written < count:
                continue  # the client reads nothing until its queue was full once
            if not client.poll(1):
                continue
            message = client.recv()
            if message[:1] == b"{":
                assert protocol.decode(message, protocol.RELAY_REPLIES).op == "connected"
                narrow(relay)
                client.send(protocol.encode(attach))
                attached = True
                continue
            items = parse(message)
            connection = items[0].connection
            got += [item.seq for item in items if item.kind == lib.CLAW_TOKEN]
            acked += len(message) + lib.CLAW_FRAME_CHARGE
            client.send(flow(connection, acked))
        assert kept, "the queue was never full"
        assert got == list(range(count))
        relay.close()


def narrow(relay: Relay) -> None:
    """Let the kernel hold little: libzmq sets no buffer's size on ipc, and a whole window fits into the usual one."""
    relay._door.look()
    for fd in relay._door._users:
        with socket.socket(fileno=os.dup(fd)) as accepted:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def flow(connection: int, acked: int) -> bytes:
    head = bytes([lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, 0, 0])
    return head + connection.to_bytes(4, "little") + acked.to_bytes(8, "little")
