# SPDX-License-Identifier: Apache-2.0
"""Hostile clients against a live daemon: bytes that are no ZMTP, messages that are none of ours, numbers that are not
theirs. An honest stream completes beside each.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from clawd import protocol
from clawd.core import ffi, lib
from clawd.producer import Producer
from clawd.server.lanes import PARTS_MAX
from clawd.server.relay import FAULTS_MAX
from tests import wire
from tests.daemon import SANITIZED, Daemon, until
from tests.rogue.producer import dial
from tests.test_rogue import fresh, honest

FLOW, CREDIT = wire.FLOW, wire.CREDIT
ANSWER_MS = 30_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("rogue") / "run", "--spool-bytes", "8M") as daemon:
        yield daemon


class Client:
    """A DEALER and a control connection by hand."""

    def __init__(self, runtime_dir: Path) -> None:
        self.control = dial(runtime_dir)
        self.control.send(protocol.encode(protocol.Hello(protocol.VERSION, "consumer")))
        self.session = json.loads(self.control.recv(4096))["session"]
        self.context = zmq.Context()
        self.relay = self.context.socket(zmq.DEALER)
        self.relay.setsockopt(zmq.LINGER, 0)
        self.relay.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self.relay.setsockopt(zmq.SNDTIMEO, ANSWER_MS)
        self.relay.setsockopt(zmq.PROBE_ROUTER, 1)
        self.relay.setsockopt(zmq.IMMEDIATE, 1)  # a new connection is a new pipe, and probes again
        self.relay.connect(f"ipc://{runtime_dir / protocol.RELAY_SOCKET}")
        self.connection = json.loads(self.relay.recv())["connection"]

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.control.close()

    def ask(self, message: bytes) -> dict[str, Any]:
        self.relay.send(message)
        answer: dict[str, Any] = json.loads(self.relay.recv())
        return answer

    def attach(self, stream: str, id: int = 1, **values: Any) -> None:
        self.relay.send(protocol.encode(protocol.Attach(session=self.session, id=id, stream=stream, **values)))

    def flow(self, acked: int, *credits: tuple[int, int], connection: int | None = None, count: int = -1) -> bytes:
        number = self.connection if connection is None else connection
        head = FLOW.pack(
            lib.CLAW_FRAME_FLOW, lib.CLAW_FRAME_VERSION, len(credits) if count < 0 else count, number, acked
        )
        return head + b"".join(CREDIT.pack(id, 0, limit) for id, limit in credits)

    def pong(self) -> None:
        """The connection works, and all that was said before was taken."""
        assert self.ask(b'{"op":"ping"}') == {"op": "pong"}


@contextmanager
def client(daemon: Daemon) -> Iterator[Client]:
    made = Client(daemon.runtime_dir)
    try:
        yield made
    finally:
        made.close()


def test_bytes_that_are_no_zmtp_do_no_harm(daemon: Daemon, dice: random.Random) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    with honest(daemon), ExitStack() as stack:
        for number in range(60):
            raw = stack.enter_context(dial(daemon.runtime_dir, protocol.RELAY_SOCKET))
            start = greeting[: dice.randrange(len(greeting) + 1)] if number % 2 else b""
            raw.send(start + dice.randbytes(dice.randrange(1, 300)))
            if number % 3 == 0:
                raw.close()
    assert daemon.status()["pid"] == daemon.pid


def test_a_zmtp_frame_of_2_63_bytes_ends_its_connection_alone(daemon: Daemon) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    ready = b"\x04" + bytes([len(ready) - 2]) + ready[2:]
    with honest(daemon), dial(daemon.runtime_dir, protocol.RELAY_SOCKET) as raw:
        raw.sendall(greeting + ready)
        raw.sendall(b"\x02" + struct.pack(">Q", 2**63 - 1) + b"x")
        while raw.recv(4096):
            pass


WRONG: dict[str, tuple[Callable[[Client], bytes], str]] = {
    "no JSON": (lambda _: b"hello", "bad_request"),
    "deep JSON": (lambda _: b"[" * 4000, "bad_request"),
    "an operation of the control socket": (lambda _: b'{"op":"status"}', "bad_request"),
    "an attach without session": (lambda _: b'{"op":"attach","id":1,"stream":"s"}', "bad_request"),
    "a message too long": (lambda _: b'{"op":"ping"' + b" " * 4096 + b"}", "bad_request"),
    "a frame of the daemon": (lambda client: wire.frame(client.connection, []), "bad_request"),
    "a flow cut off": (lambda client: client.flow(0)[:-1], "bad_request"),
    "a flow of one byte": (lambda client: client.flow(0)[:1], "bad_request"),
    "a flow with more credits than it says": (lambda client: client.flow(0, (1, 1), count=0), "bad_request"),
    "a flow with less credits than it says": (lambda client: client.flow(0, (1, 1), count=2), "bad_request"),
    "a flow with 65,535 credits that lacks them": (lambda client: client.flow(0, count=65_535), "bad_request"),
    "a flow of another version": (lambda client: b"\xf1\x02" + client.flow(0)[2:], "bad_request"),
    "an ack of what was not sent": (lambda client: client.flow(1 << 40), "bad_request"),
    "an ack of 2^64-1": (lambda client: client.flow(2**64 - 1), "bad_request"),
    "an unknown session": (lambda _: _attach(session="0" * 32), "session"),
    "an id of 0": (lambda client: _attach(session=client.session, id=0), "bad_request"),
    "an id of 2^32": (lambda client: _attach(session=client.session, id=2**32), "bad_request"),
    "no credit": (lambda client: _attach(session=client.session, credit=0), "bad_request"),
    "a credit of 2^64": (lambda client: _attach(session=client.session, credit=2**64), "bad_request"),
    "a name too long": (lambda client: _attach(session=client.session, stream="é" * 128), "bad_request"),
    "after without incarnation": (lambda client: _attach(session=client.session, after=3), "bad_request"),
    "after the end of time": (lambda client: _attach(session=client.session, after=2**63), "bad_request"),
    "a resume of nothing": (lambda client: _attach(session=client.session, after=3, incarnation=1), "lost"),
}


def _attach(**values: Any) -> bytes:
    return json.dumps({"op": "attach", "id": 1, "stream": "none", "wait_ms": 0, **values}).encode()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_message_that_is_wrong_is_answered_and_the_connection_goes_on(daemon: Daemon, wrong: str) -> None:
    make, code = WRONG[wrong]
    with client(daemon) as rogue:
        answer = rogue.ask(make(rogue))
        assert (answer["op"], answer["code"]) == ("error", code)
        rogue.pong()


def test_a_client_that_breaks_rules_again_and_again_is_logged_twice_and_starts_over(daemon: Daemon) -> None:
    before = len(daemon.log.find("client broke a rule"))
    with honest(daemon), client(daemon) as rogue:
        for _ in range(FAULTS_MAX + 5):
            rogue.relay.send(b"nonsense")
        while json.loads(rogue.relay.recv())["op"] != "connected":
            pass  # dropped, and answered like a newcomer
        daemon.log.wait("again and again")
        assert len(daemon.log.find("client broke a rule")) <= before + 2


@pytest.mark.parametrize("parts", [[b"", b""], [b'{"op":"ping"}', b"more"], [b"x"] * PARTS_MAX], ids=len)
def test_a_message_of_several_parts_is_passed_over(daemon: Daemon, parts: list[bytes]) -> None:
    with honest(daemon), client(daemon) as rogue:
        rogue.relay.send_multipart(parts)
        rogue.pong()


@pytest.mark.parametrize("count", [PARTS_MAX + 1, 2000])
def test_a_message_of_more_parts_than_any_of_ours_ends_its_connection_alone(daemon: Daemon, count: int) -> None:
    with honest(daemon), client(daemon) as rogue:
        rogue.relay.send_multipart([b"x"] * count)
        assert json.loads(rogue.relay.recv())["op"] == "connected"  # a new connection, which probes and is greeted
        rogue.pong()


def test_a_message_beyond_the_longest_ends_its_connection_alone(daemon: Daemon) -> None:
    with honest(daemon), client(daemon) as rogue:
        rogue.relay.send(b"{" * (2 << 20))
        # libzmq lets go of it; the socket makes a new connection, which probes and is greeted
        assert json.loads(rogue.relay.recv())["op"] == "connected"


def test_the_longest_flow_message_is_taken(daemon: Daemon) -> None:
    with honest(daemon), client(daemon) as rogue:
        rogue.relay.send(rogue.flow(0, *((id + 1, 2**64 - 1) for id in range(65_535))))
        rogue.pong()


def test_numbers_of_others_do_nothing(daemon: Daemon) -> None:
    """Credits, cancels and detaches go by the connection's own attachments."""
    with client(daemon) as one, client(daemon) as two, Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open(name := fresh("own"))
        one.attach(name, 5, credit=1)
        stream.write("first")
        frame = one.relay.recv()  # the stream's OPEN, and with it or after it its first token
        assert frame[0] == lib.CLAW_FRAME_DATA
        stream.write("second")
        for message in (
            two.flow(0, (5, 1 << 20)),
            two.flow(0, (5, 1 << 20), connection=one.connection),
            b'{"op":"cancel","id":5}',
            b'{"op":"detach","id":5}',
        ):
            two.relay.send(message)
        two.pong()
        one.pong()  # and not the frame that a credit of another would have brought
        assert not stream.cancelled
        one.relay.send(one.flow(len(frame) + lib.CLAW_FRAME_CHARGE, (5, 1 << 20)))
        while b"second" not in one.relay.recv():
            pass
        # another client's session is no way in while its own is taken: a connection keeps to its first
        two.attach(name, 1)
        assert b"first" in two.relay.recv()
        answer = two.ask(_attach(session=one.session))
        assert (answer["code"], answer["id"]) == ("session", 1)
        one.pong()


def test_an_attach_before_hello_or_after_its_control_connection_is_denied(daemon: Daemon) -> None:
    with client(daemon) as rogue:
        gone = len(daemon.log.find("client gone")) + 1
        rogue.control.close()
        daemon.log.wait("client gone", count=gone)
        answer = rogue.ask(_attach(session=rogue.session))
        assert answer["code"] == "session"


def test_an_attachment_said_again_starts_again(daemon: Daemon) -> None:
    with client(daemon) as rogue, Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open(name := fresh("again"))
        stream.write("x")
        for _ in range(50):
            rogue.attach(name, 1)
            frame = rogue.relay.recv()
            assert b"x" in frame
        assert daemon.streams()[name]["attachments"] == 1


def test_a_window_that_is_never_acked_holds_what_is_sent(daemon: Daemon) -> None:
    with honest(daemon), client(daemon) as rogue, Producer("p", daemon.runtime_dir, 1 << 20) as producer:
        stream = producer.open(name := fresh("window"))
        rogue.attach(name, 1, credit=1 << 30)
        for _ in range(100):
            stream.write("w" * 3000)
        until(lambda: daemon.streams()[name]["tokens"] == 100, "every token to be in the spool")
        sent = 0
        while sent + lib.CLAW_FRAME_MAX + lib.CLAW_FRAME_CHARGE <= lib.CLAW_WINDOW:
            sent += len(rogue.relay.recv()) + lib.CLAW_FRAME_CHARGE
        assert sent <= lib.CLAW_WINDOW
        for _ in range(5):  # no more frame comes while nothing is acked
            assert daemon.status()["pid"] == daemon.pid
            rogue.pong()
        rogue.relay.send(rogue.flow(sent))
        assert rogue.relay.recv()[0] == lib.CLAW_FRAME_DATA


def test_a_client_that_asks_without_reading_costs_bounded_memory(daemon: Daemon) -> None:
    with honest(daemon), client(daemon) as rogue:
        before = daemon.private_bytes()
        for _ in range(100_000):
            rogue.relay.send(b'{"op":"ping"}')
        daemon.await_total("attachments", 1)
        grown = daemon.private_bytes() - before
    # a sanitizer keeps what was freed
    assert SANITIZED or grown < 2 << 20, f"{grown} bytes for answers that nobody reads"


def test_a_client_that_leaves_while_answers_wait_for_it_is_no_fault(daemon: Daemon) -> None:
    for _ in range(3):
        with client(daemon) as rogue:
            for _ in range(5000):
                rogue.relay.send(b'{"op":"ping"}')
            assert daemon.status()["pid"] == daemon.pid
    with honest(daemon):
        daemon.await_total("attachments", 1)


def test_random_messages_do_no_harm(daemon: Daemon, dice: random.Random) -> None:
    with honest(daemon, tokens=200), client(daemon) as rogue:
        good = [
            rogue.flow(0, (1, 1000)),
            _attach(session=rogue.session, wait_ms=5),
            b'{"op":"cancel","id":1}',
            b'{"op":"detach","id":1}',
        ]
        for _ in range(1500):
            message = bytearray(dice.choice([*good, dice.randbytes(dice.randrange(1, 100))]))
            for _ in range(dice.randrange(3)):
                message[dice.randrange(len(message))] = dice.randrange(256)
            rogue.relay.send(bytes(message))
            while rogue.relay.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                rogue.relay.recv()
    assert daemon.status()["pid"] == daemon.pid
    assert ffi.sizeof("struct claw_flow") == FLOW.size
