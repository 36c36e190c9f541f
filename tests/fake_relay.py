# SPDX-License-Identifier: Apache-2.0
"""clawd's two client sockets without clawd: a test says what is sent and sees what came."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import zmq

import wire
from clawd import protocol

T = TypeVar("T")
PATIENCE_S = 10.0
"""How long a test waits for what must come; it is not waited out when all is well."""


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another thread makes true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


class FakeRelay:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.connection = 0  # number of the latest relay connection
        self.sessions = 0
        self.greet = True  # answer hellos
        self.answer_probes = True
        self.attached: dict[int, protocol.Attach] = {}
        self.acked: dict[int, list[int]] = {}
        self.credits: dict[int, list[int]] = {}
        self._seen: queue.Queue[Any] = queue.Queue()
        self._orders: queue.Queue[tuple[Callable[[], Any], queue.Queue[Any]]] = queue.Queue()
        self._kick, self._kicked = socket.socketpair()
        self._context = zmq.Context()
        self._router: Any = None
        self._listener: socket.socket | None = None
        self._controls: list[socket.socket] = []
        self._peer = b""
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeRelay:
        self._start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._orders.put((self._leave, queue.Queue()))
        self._kick.send(b"x")
        self._thread.join(PATIENCE_S)
        self._context.destroy(linger=0)
        self._kick.close()
        self._kicked.close()

    # ---- what a test says; each returns when it is done

    def stop(self) -> None:
        self._do(self._stop)

    def start(self) -> None:
        self._do(self._start)

    def drop_relay(self) -> None:
        """Cut the relay connection and take the next one; the control connection lives on."""

        def drop() -> None:
            self._router.close(linger=0)
            self._bind()

        self._do(drop)

    def drop_control(self) -> None:
        self._do(self._hang_up)

    def send(self, message: bytes | protocol.Message) -> None:
        data = message if isinstance(message, bytes) else protocol.encode(message)
        self._do(lambda: self._router.send_multipart([self._peer, data]))

    def say_connected(self, connection: int) -> None:
        self.send(protocol.Connected(version=protocol.VERSION, connection=connection))

    def tell(self, attachment: int, first_seq: int, *records: wire.Record, connection: int | None = None,
             incarnation: int = 7) -> int:  # fmt: skip
        """Send one frame with one segment. Returns its length."""
        segment = wire.Segment(attachment, incarnation, first_seq, records)
        data = wire.frame(self.connection if connection is None else connection, [segment])
        self.send(data)
        return len(data)

    def expect(self, kind: type[T], matches: Callable[[T], bool] = lambda message: True) -> T:
        """The next message of `kind` for which `matches` holds, passing over others."""
        while True:
            try:
                message = self._seen.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} came") from None
            if isinstance(message, kind) and matches(message):
                return message

    def seen(self) -> list[Any]:
        """All that came and was not looked at."""
        self._do(lambda: None)
        found = []
        while not self._seen.empty():
            found.append(self._seen.get())
        return found

    # ---- on the relay's thread

    def _do(self, order: Callable[[], Any]) -> Any:
        answer: queue.Queue[Any] = queue.Queue()
        self._orders.put((order, answer))
        self._kick.send(b"x")
        result = answer.get(timeout=PATIENCE_S)
        if isinstance(result, BaseException):
            raise result
        return result

    def _bind(self) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{self.directory / protocol.RELAY_SOCKET}")

    def _start(self) -> None:
        path = self.directory / protocol.CONTROL_SOCKET
        path.unlink(missing_ok=True)
        self._bind()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()

    def _hang_up(self) -> None:
        for control in self._controls:
            control.close()
        self._controls.clear()

    def _stop(self) -> None:
        if self._listener is not None:
            self._router.close(linger=0)
            self._hang_up()
            self._listener.close()
            self._listener = None

    def _leave(self) -> None:
        self._stop()
        self._running = False

    def _run(self) -> None:
        while self._running:
            poller = zmq.Poller()
            poller.register(self._kicked, zmq.POLLIN)
            if self._listener is not None:
                for entry in (self._router, self._listener, *self._controls):
                    poller.register(entry, zmq.POLLIN)
            ready = {entry for entry, _ in poller.poll()}
            if self._listener is not None:
                if self._listener.fileno() in ready:
                    self._controls.append(self._listener.accept()[0])
                for control in [control for control in self._controls if control.fileno() in ready]:
                    self._hear_control(control)
                if self._router in ready:
                    self._hear_relay()
            if self._kicked.fileno() in ready:
                self._kicked.recv(1)
                order, answer = self._orders.get()
                try:
                    answer.put(order())
                except Exception as error:
                    answer.put(error)

    def _hear_control(self, control: socket.socket) -> None:
        try:
            packet = control.recv(4096)
        except ConnectionResetError:  # it left without reading the welcome
            packet = b""
        if not packet:
            control.close()
            self._controls.remove(control)
            self._seen.put("control closed")
            return
        self._seen.put(protocol.decode(packet, protocol.CONTROL_REQUESTS))
        if self.greet:
            self._welcome(control)

    def _welcome(self, control: socket.socket) -> None:
        self.sessions += 1
        welcome = protocol.Welcome(protocol.VERSION, session=f"session-{self.sessions}", instance="test")
        with contextlib.suppress(BrokenPipeError):  # a client that is gone already
            control.send(protocol.encode(welcome))

    def welcome(self) -> None:
        """Answer the hello that was left waiting."""
        self._do(lambda: self._welcome(self._controls[-1]))

    def _hear_relay(self) -> None:
        peer, message = self._router.recv_multipart()
        if not message:
            self._peer = peer
            self.connection += 1
            self._seen.put("probe")
            if self.answer_probes:
                connected = protocol.Connected(version=protocol.VERSION, connection=self.connection)
                with contextlib.suppress(zmq.ZMQError):  # a client that is gone already
                    self._router.send_multipart([peer, protocol.encode(connected)])
        elif message[0] == ord("{"):
            request: protocol.Message = protocol.decode(message, protocol.RELAY_REQUESTS)
            if isinstance(request, protocol.Attach):
                self.attached[request.id] = request
            self._seen.put(request)
        else:
            flow = wire.parse_flow(message)
            self.acked.setdefault(flow.connection, []).append(flow.acked)
            for attachment, limit in flow.credits.items():
                self.credits.setdefault(attachment, []).append(limit)
            self._seen.put(flow)
