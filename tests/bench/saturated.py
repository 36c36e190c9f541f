# SPDX-License-Identifier: Apache-2.0
"""First tokens of a real clawd by tcp, while other clients resume long answers over the one link to them all: with
clawd-kernel beside it, and without. The link is full somewhere beyond this host, where nothing knows a packet's
priority: what helps there is that each client is sent no more than its streams need.
"""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clawd.consumer import Consumer, Reading
from clawd.errors import ClawdError
from clawd.keys import Allowed, allow, make_pair, make_server, write_pair
from clawd.producer import Producer
from tests.cgroups import Cgroup
from tests.daemon import Daemon
from tests.veth import NEAR, Side, link

PORT = 7400
LINK_KBIT = 8_000
CLIENTS = 3
"""That resume: as many as the link has room for when each is paced, for no stream is paced below 256 KiB a second."""
TOKEN_BYTES, TOKENS = 60, 70_000
"""Of a long answer: with their headers 5 MB, of which each client gets 3 at most while we measure."""
PACED_S = 2.5
"""By then clawd has told the kernel the pace of a client that came: it does so each second."""
FULL_S = 1.0
"""Until the link's queue is as long as it gets."""
BETWEEN_S = 0.05
PATIENCE_S = 30.0


class NearDaemon(Daemon):
    """A clawd of that side."""

    def __init__(self, near: Side, directory: Path, *flags: str) -> None:
        super().__init__(directory, *flags)
        self._near = near

    def launch(self) -> None:
        self._near.make(super().launch)

    def release(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # its log is for tests that fail
            super().release()


@contextmanager
def helper(directory: Path, group: Cgroup) -> Iterator[None]:
    """A clawd-kernel that serves this user there."""
    words = [sys.executable, "-m", "clawd.kernel", "--dir", str(directory), "--cgroup", str(group.path)]
    words += ["--user", pwd.getpwuid(os.geteuid()).pw_name, "--bpf-dir", str(directory / "none")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        assert " ready " in process.stderr.readline()
        yield
    finally:
        process.terminate()
        process.communicate()


def first_token_ms(group: Cgroup, *, shaped: bool, tokens: int) -> dict[str, float]:
    """From the write of a stream's first token to its reading."""
    with link() as (near, far), ExitStack() as stack:
        near.run(f"tc qdisc add dev near root tbf rate {LINK_KBIT}kbit burst 16kb limit 1mb")
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clawd-")))
        kernel = directory / "kernel"
        stack.enter_context(_environment("CLAWD_KERNEL_DIR", str(kernel)))
        if shaped:
            stack.enter_context(helper(kernel, group))
        keys, pair = directory / "keys", make_pair()
        keys.mkdir()
        server = make_server(keys)
        write_pair(directory / "client.key", pair, "bench")
        allow(keys, Allowed("client", pair.public, "consumer"))
        flags = ("--tcp-listen", f"{NEAR}:{PORT}", "--keys-dir", str(keys), "--pace", "smooth", "--stream-bytes", "16M")
        daemon = NearDaemon(near, directory / "run", *flags)
        with group.entered():
            stack.enter_context(daemon)
        if shaped:
            daemon.log.wait("sockets shaped", "lanes=2")

        def consumer() -> Consumer:
            made = far.make(
                lambda: Consumer(
                    endpoint=f"tcp://{NEAR}:{PORT}", key=directory / "client.key", server_key=server.public
                )
            )
            return stack.enter_context(made)

        producer = stack.enter_context(Producer("bench", daemon.runtime_dir))
        idle = producer.open("idle")
        idle.write(b"hello")
        resuming = [consumer() for _ in range(CLIENTS)]
        for each in resuming:
            assert each.attach("idle").read(PATIENCE_S)
        asking = consumer()
        _answers(producer)
        time.sleep(PACED_S)
        with _resumed(resuming):
            time.sleep(FULL_S)
            return _firsts(producer, asking, tokens)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _answers(producer: Producer) -> None:
    """Long ones, of which clawd keeps all."""
    dice = random.Random(1)
    for number in range(CLIENTS):
        stream = producer.open(f"long-{number}")
        for _ in range(TOKENS // 100):
            producer.write_many([(stream, dice.randbytes(TOKEN_BYTES)) for _ in range(100)], block=10)


@contextmanager
def _resumed(consumers: list[Consumer]) -> Iterator[None]:
    """Each of them reads one from its beginning, meanwhile."""

    def swallow(reading: Reading) -> None:
        with contextlib.suppress(ClawdError):  # it is closed at the end
            while reading.read_batch():
                pass

    readings = [each.attach(f"long-{number}") for number, each in enumerate(consumers)]
    threads = [threading.Thread(target=swallow, args=(reading,)) for reading in readings]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for reading in readings:
            reading.close()
        for thread in threads:
            thread.join()


def _firsts(producer: Producer, consumer: Consumer, tokens: int) -> dict[str, float]:
    took_ms = []
    for number in range(tokens + 1):
        reading = consumer.attach(f"first-{number}")
        time.sleep(BETWEEN_S)  # the attachment is there
        stream = producer.open(f"first-{number}")
        began = time.monotonic()
        stream.write(b"hello")
        assert reading.read(PATIENCE_S)
        took_ms.append((time.monotonic() - began) * 1000)
        stream.close()
        reading.close()
    took_ms = sorted(took_ms[1:])  # the first one's client had to connect
    return {"p50_ms": took_ms[len(took_ms) // 2], "p99_ms": took_ms[int(len(took_ms) * 0.99)]}
