# SPDX-License-Identifier: Apache-2.0
"""Clients that take another's name: its session, its ZeroMQ routing id; and acks that go back."""

from __future__ import annotations

import json

import zmq

from clawd import protocol
from clawd.consumer import Consumer
from clawd.core import lib
from clawd.producer import Producer
from tests.daemon import Daemon, until
from tests.history import History
from tests.test_rogue_relay import client


def dealer(context: zmq.Context[zmq.Socket[bytes]], daemon: Daemon, routing_id: bytes) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    for option, value in ((zmq.LINGER, 0), (zmq.PROBE_ROUTER, 1), (zmq.IMMEDIATE, 1), (zmq.RCVTIMEO, 60_000)):
        made.setsockopt(option, value)
    made.setsockopt(zmq.ROUTING_ID, routing_id)
    made.connect(f"ipc://{daemon.runtime_dir / protocol.RELAY_SOCKET}")
    return made


def test_the_latest_connection_of_a_session_has_it_and_each_gets_its_own(daemon: Daemon) -> None:
    with client(daemon) as one, client(daemon) as two, Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("first")
        one.attach("s")
        assert b"first" in one.relay.recv()
        two.session, own = one.session, two.session
        two.attach("s", 7)  # as a client does that lost its connection before clawd saw it
        assert b"first" in two.relay.recv()
        stream.write("second")
        assert b"second" in two.relay.recv()
        assert daemon.streams()["s"]["attachments"] == 1
        assert one.ask(b'{"op":"ping"}')["op"] == "connected"  # dropped, and answered as a newcomer's
        two.session = own
        assert two.ask(protocol.encode(protocol.Attach(own, 8, "s")))["code"] == "session"  # it is the other's now
        stream.close()
        assert b"stop" in two.relay.recv()


def test_the_end_of_a_session_ends_whatever_connection_has_it(daemon: Daemon) -> None:
    with client(daemon) as one, client(daemon) as two, Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").write("x")
        two.session = one.session
        two.attach("s")
        assert b"x" in two.relay.recv()
        one.control.close()
        until(lambda: daemon.streams()["s"]["attachments"] == 0, "its readings to end")
        assert two.ask(b'{"op":"ping"}')["op"] == "connected"


def test_a_routing_id_that_is_taken_brings_nothing_of_who_has_it(daemon: Daemon, history: History) -> None:
    history.put("s", *[b"%d" % number for number in range(100)])
    history.end("s", "stop")
    with (
        zmq.Context() as context,
        dealer(context, daemon, b"name") as owner,
        Consumer(daemon.runtime_dir) as consumer,
        client(daemon) as rogue,
        Producer("p", daemon.runtime_dir) as producer,
    ):
        assert json.loads(owner.recv())["op"] == "connected"
        owner.send(protocol.encode(protocol.Attach(rogue.session, 1, "s", credit=1 << 20)))
        stream = producer.open("s")
        with dealer(context, daemon, b"name") as thief:
            thief.send(b'{"op":"cancel","id":1}')
            thief.send(b'{"op":"detach","id":1}')
            for put in history.written["s"].puts:
                stream.write(put.data)
            stream.close()
            history.reading("s", "honest").follow(consumer.attach("s"))
            got = b""
            while b"stop" not in got:
                got += owner.recv()
            assert not thief.poll(0)
        with dealer(context, daemon, b"other") as free:
            assert json.loads(free.recv())["op"] == "connected"
    history.check()


def test_acks_and_credits_that_go_back_change_nothing(daemon: Daemon) -> None:
    """Also those of an earlier connection, and of an attachment that is no more."""
    with client(daemon) as rogue, Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        rogue.attach("s", 1, credit=1 << 30)
        sent = 0
        for number in range(20):
            stream.write("w" * 3000)
            sent += len(frame := rogue.relay.recv()) + lib.CLAW_FRAME_CHARGE
            assert frame[0] == lib.CLAW_FRAME_DATA, number
            for message in (
                rogue.flow(sent, (1, 1)),
                rogue.flow(sent // 2, (1, 0), (2, 1 << 20)),
                rogue.flow(0),
                rogue.flow(1 << 60, connection=rogue.connection ^ 1 << 20),
            ):
                rogue.relay.send(message)
        rogue.pong()
        stream.close()
        until(lambda: daemon.streams()["s"]["state"] == "ended", "its end")
        assert b"stop" in rogue.relay.recv()
        rogue.relay.send(rogue.flow(sent, (1, 2**64 - 1)))
        rogue.pong()
