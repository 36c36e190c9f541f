# SPDX-License-Identifier: Apache-2.0
"""A real clawd-gateway in a process of its own, and plain clients of it: events by hand over a socket, so that a test
sees each byte that a browser would.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from clawd.gateway import position
from clawd.gateway.position import Position
from tests.daemon import FAULT, PATIENCE_S, Log, until

COMMAND = "import sys; from clawd.gateway import command; sys.exit(command())"


class Gateway:
    """`with Gateway(runtime_dir, "--keepalive", "1s") as gateway:` serves until the block ends."""

    def __init__(self, runtime_dir: Path, *flags: str, listen: str = "127.0.0.1:0") -> None:
        files = ("--config", os.devnull, "--listen", listen)
        self.command = [sys.executable, "-c", COMMAND, *files, "--runtime-dir", str(runtime_dir), *flags]
        self.over = False

    def __enter__(self) -> Gateway:
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"clawd-test-{secrets.token_hex(8)}"
        notify.bind("\0" + name)
        environment = {**os.environ, "NOTIFY_SOCKET": "@" + name}
        self.process = subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self.process.stderr
        self.log = Log(os.dup(self.process.stderr.fileno()))
        self.process.stderr.close()
        try:
            pidfd = os.pidfd_open(self.process.pid)
            ready, _, _ = select.select([notify, pidfd], [], [], PATIENCE_S)
            os.close(pidfd)
            assert notify in ready, f"it did not come up:\n{self.log}"
            found = re.search(r"gateway ready .*listen=\"?(\S+?)\"? ", self.log.wait("gateway ready"))
            assert found
            self.listen = found[1]
        except BaseException:
            self.release()
            raise
        finally:
            notify.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None and not self.over:
                self.stop()
        finally:
            self.release()

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM; all must have gone well, to the last."""
        self.terminate()
        self.await_stop()

    def await_stop(self) -> None:
        code = self.process.wait(PATIENCE_S)
        self.over = True
        self.log.close()
        assert not [line for line in self.log.lines if FAULT.search(line)], f"a fault of the gateway:\n{self.log}"
        assert code == 0, f"clawd-gateway ended with {code}:\n{self.log}"

    def release(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        print(f"log of clawd-gateway {self.process.pid}:\n{self.log}", file=sys.stderr)

    # --- clients ---

    def dial(self) -> socket.socket:
        if self.listen.startswith("unix:"):
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(PATIENCE_S)
            made.connect(self.listen[5:])
            return made
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def read(self, path: str, **headers: str) -> Events:
        return Events(self.dial(), path, headers)

    def ask(self, method: str, path: str, **headers: str) -> Answer:
        """A whole answer."""
        with self.dial() as dialled:
            send(dialled, method, path, {"Connection": "close", **headers})
            return Answer.parse(read_all(dialled))

    def metrics(self) -> dict[str, float]:
        answer = self.ask("GET", "/metrics")
        assert answer.status == 200, answer
        lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def private_bytes(self) -> int:
        """Memory of the gateway that is not shared: what a reader can cost it."""
        rows = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().split("\n")
        return 1024 * sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))

    def await_figure(self, name: str, value: float) -> None:
        until(lambda: self.metrics().get(name) == value, f"{name} = {value}, which is {self.metrics().get(name)}")

    def is_idle(self) -> bool:
        """Nobody reads, and nothing is attached."""
        figures = self.metrics()
        return not figures["clawd_gateway_readers"] and not figures["clawd_gateway_attachments"]


def send(dialled: socket.socket, method: str, path: str, headers: dict[str, str]) -> None:
    rows = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    rows += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    dialled.sendall("\r\n".join([*rows, "", ""]).encode())


def read_all(dialled: socket.socket) -> bytes:
    parts = []
    while True:
        try:
            part = dialled.recv(65536)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @staticmethod
    def parse(data: bytes) -> Answer:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *rows = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        return Answer(int(first.split()[1]), headers, body)

    def json(self) -> Any:
        return json.loads(self.body)

    def check_problem(self, status: int, code: str) -> None:
        assert self.status == status, self
        assert self.headers["content-type"].startswith("application/problem+json"), self
        problem = self.json()
        assert (problem["status"], problem["code"], problem["type"]) == (status, code, "about:blank")
        assert problem["title"]
        assert problem["detail"]


@dataclass
class Told:
    """One event as a browser would dispatch it; `id` as it is after it."""

    kind: str
    data: str
    id: str

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def position(self) -> Position:
        return position.parse(self.id)


@dataclass(eq=False)
class Events:
    """A request for Server-Sent Events, read by hand: HTTP chunks, then lines, as the standards say."""

    dialled: socket.socket
    path: str
    headers: dict[str, str]
    comments: int = 0
    retry: str = ""
    answer: Answer | None = None
    ended: bool = False
    """The last chunk came: the answer is whole."""
    hints: list[int] = field(default_factory=list)
    _raw: bytes = b""
    _text: bytes = b""
    _id: str = ""
    _fields: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        send(self.dialled, "GET", self.path, self.headers)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.dialled.close()

    def _more(self) -> bool:
        try:
            part = self.dialled.recv(65536)
        except ConnectionResetError:
            part = b""
        self._raw += part
        return bool(part)

    def open(self) -> Answer:
        """Read the headers."""
        while b"\r\n\r\n" not in self._raw:
            assert self._more(), f"no answer: {self._raw!r}"
        head, _, rest = self._raw.partition(b"\r\n\r\n")
        self.answer = Answer.parse(head)
        self._raw = rest
        return self.answer

    def _lines(self) -> Iterator[str]:
        if self.answer is None:
            self.open()
        assert self.answer
        assert self.answer.status == 200, (self.answer, self._raw)
        while True:
            size, found, rest = self._raw.partition(b"\r\n")
            if found:
                length = int(size, 16)
                while len(self._raw) < len(size) + 4 + length:
                    if not self._more():
                        return
                rest = self._raw[len(size) + 2 :]
                self._text += rest[:length]
                assert rest[length : length + 2] == b"\r\n"
                self._raw = rest[length + 2 :]
                if not length:
                    self.ended = True
                    return
                while b"\n" in self._text:
                    line, _, self._text = self._text.partition(b"\n")
                    yield line.decode()  # never half a character in a line
            elif not self._more():
                return

    def __iter__(self) -> Iterator[Told]:
        kind, data = "message", []
        for line in self._lines():
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if kind == "hint":  # comes when this host is busy, which no test decides
                    self.hints.append(json.loads("".join(data))["degrade"])
                elif data:
                    yield Told(kind, "\n".join(data), self._id)
                kind, data = "message", []
            elif not name:
                self.comments += 1
            elif name == "id":
                self._id = value
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            elif name == "retry":
                self.retry = value

    def next(self) -> Told:
        return next(iter(self))

    def text(self) -> str:
        """All of it, to the end."""
        return "".join(told.json()["text"] for told in self if told.kind == "message")
