# SPDX-License-Identifier: Apache-2.0
"""What one user may have, and what all may: refused by the setting's name, and the others have theirs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from clawd import link, protocol
from clawd.consumer import Consumer
from clawd.core import Label, lib
from clawd.ctl.client import Client
from clawd.errors import AttachRefused, ClawdError, ControlError
from clawd.producer import Producer
from rig import Rig
from tests.daemon import PATIENCE_S, Daemon, until
from tests.rogue.producer import dial

Start = Callable[..., Daemon]
NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def as_other(daemon: Daemon, code: str) -> subprocess.Popen[str]:
    """A process of another user that may reach the sockets by a supplementary group. It prints lines."""
    begin = (
        "import os, sys\n"
        "from clawd.consumer import Consumer; from clawd.producer import Producer; from clawd.errors import *\n"
        f"os.setgroups([0]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)\n"
        "directory = sys.argv[1]\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", begin + code, str(daemon.runtime_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def reach(tmp_path: Path) -> None:
    """Let pytest's directories not be what keeps others out."""
    for path in (tmp_path, *tmp_path.parents):
        if path.name.startswith(("test_", "pytest-", "popen-")):
            path.chmod(path.stat().st_mode | 0o011)


def test_rings_are_refused_by_the_bytes_of_a_user_and_of_all(start: Start) -> None:
    daemon = start("--max-ring-bytes", "96k", "--user-ring-bytes", "64k", "--spool-bytes", "4M")
    with ExitStack() as stack:
        stack.enter_context(Producer("a", daemon.runtime_dir, 32768))
        with pytest.raises(AttachRefused, match="user_ring_bytes: a ring of 64k is more than the 32k") as caught:
            Producer("b", daemon.runtime_dir, 65536)
        assert caught.value.code == "limit"
        with pytest.raises(AttachRefused, match="max_ring_bytes: a ring of 128k is more than the 64k"):
            Producer("b", daemon.runtime_dir)  # of the settings' size
        stack.enter_context(Producer("b", daemon.runtime_dir, 32768))
        with pytest.raises(AttachRefused, match="user_ring_bytes"):
            Producer("c", daemon.runtime_dir, 4096)


@root
@pytest.mark.usefixtures("reach")
def test_a_user_at_its_limits_leaves_the_others_theirs(start: Start) -> None:
    daemon = start("--user-producers", "2", "--user-clients", "2", "--user-streams", "3", "--user-attachments", "3",
                   "--spool-bytes", "4M")  # fmt: skip
    daemon.runtime_dir.chmod(0o711)
    code = """
from clawd import link
link._ANSWER_S = 0.5
producers = [Producer("p", directory) for _ in range(2)]
try: Producer("p", directory)
except AttachRefused as error: print(error.code, error, flush=True)
streams = [producers[n % 2].open(f"o{n}") for n in range(3)]
for each in streams: each.write("x")
consumers = [Consumer(directory) for _ in range(2)]
readings = [consumers[n % 2].attach(f"o{n}") for n in range(3)]
for each in readings: each.read(30)
try: consumers[0].attach("o0").read(30)
except AttachError as error: print(error.code, error, flush=True)
late = Consumer(directory)
try: late.attach("o0", wait=0).read(30)
except ControlError as error: print("no room", error, flush=True)
more = producers[0].open("more")
while not more.refused: os.sched_yield()
print("refused", more.refused, flush=True)
sys.stdin.read()
"""
    with as_other(daemon, code) as other:
        assert other.stdout
        said = [other.stdout.readline() for _ in range(4)]
        assert re.match("limit .*user_producers: 2 producers of user 65534", said[0]), said
        assert re.match("limit .*user_attachments", said[1]), said
        assert re.match("no room .*user_clients", said[2]), said
        assert said[3] == "refused limit\n", said
        with Consumer(daemon.runtime_dir) as one, Consumer(daemon.runtime_dir) as two, ExitStack() as stack:
            producers = [stack.enter_context(Producer("mine", daemon.runtime_dir)) for _ in range(2)]
            streams = [producers[number % 2].open(f"mine-{number}") for number in range(3)]
            for stream in streams:
                stream.write("y")
            for number, consumer in enumerate((one, two, one)):
                token = consumer.attach(f"mine-{number}").read(PATIENCE_S)
                assert token is not None
                assert token.text == "y"
        other.kill()
    until(lambda: daemon.status()["producers"] == 0, "the other's end")
    with as_other(daemon, "Producer('p', directory)\nprint('again')") as again:
        assert again.communicate(timeout=PATIENCE_S)[0] == "again\n"


def test_a_user_without_connections_left_can_be_put_in_order(start: Start) -> None:
    """Root's and clawd's own orders are taken beyond every limit; what else they ask for is not."""
    daemon = start("--max-clients", "4", "--max-producers", "2", "--user-clients", "2", "--user-producers", "1",
                   "--spool-bytes", "4M")  # fmt: skip
    with ExitStack() as stack:
        for _ in range(3 + 20):
            stack.enter_context(dial(daemon.runtime_dir))
        over = stack.enter_context(dial(daemon.runtime_dir))
        over.send(protocol.encode(protocol.Hello(protocol.VERSION, "consumer")))
        assert json.loads(over.recv(4096))["code"] == "limit"
        with Client(daemon.runtime_dir) as client:
            client.ask(protocol.Settings(), protocol.InEffect)
            with pytest.raises(ClawdError, match="no stream"):
                client.ask(protocol.CancelStream("none"), protocol.StreamCancelled)


def test_a_client_that_gets_no_room_says_so_in_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_ANSWER_S", 0.3)
    daemon = start("--user-clients", "1", "--spool-bytes", "4M")
    with Consumer(daemon.runtime_dir) as first, Consumer(daemon.runtime_dir) as second:
        with pytest.raises(ControlError, match="no room for this client: user_clients: 1 clients of user"):
            second.attach("s", wait=0).read(PATIENCE_S)
        waiting = second.attach("s", wait=PATIENCE_S)
        first.close()
        with Producer("p", daemon.runtime_dir) as producer:
            producer.open("s").write("x")
            assert waiting.read(PATIENCE_S).text == "x"  # type: ignore[union-attr]


def labelled(rig: Rig, uid: int, role: int) -> Any:
    return Label("test", 1, uid, role)


def test_live_streams_are_counted_over_a_users_rings_and_ended_ones_are_not() -> None:
    with Rig({"user_streams": 3}) as rig:
        rings = [rig.ring() for _ in range(3)]
        for ring, uid in zip(rings, (1, 1, 2), strict=True):
            rig.core.label_ring(ring.index, labelled(rig, uid, lib.CLAW_ROLE_PRODUCER))
        for handle in range(2):
            rings[0].open(handle, f"a{handle}")
            rings[1].open(handle, f"b{handle}")
            rings[2].open(handle, f"c{handle}")
        rig.turn()
        limit = int(lib.CLAW_STOPPED_LIMIT)
        stopped = [[ring.stopped(handle)[1] for handle in range(2)] for ring in rings]
        assert sorted(stopped[0] + stopped[1]) == [0, 0, 0, limit]
        assert stopped[2] == [0, 0]
        rings[0].close(0)
        rings[0].open(5, "again")
        rig.turn()
        assert rings[0].stopped(5)[1] == 0


def test_attachments_are_counted_over_a_users_connections() -> None:
    with Rig({"user_attachments": 3}) as rig:
        ring = rig.ring()
        ring.open(0, "s")
        rig.turn()
        clients = [rig.core.connect() for _ in range(3)]
        for client, uid in zip(clients, (1, 1, 2), strict=True):
            rig.core.label_connection(client, labelled(rig, uid, lib.CLAW_ROLE_CONSUMER))

        def attach(client: int, id: int) -> int:
            return rig.core.attach(client, id, b"s", credit=1000)

        assert [attach(clients[0], 1), attach(clients[1], 1), attach(clients[0], 2)] == [0, 0, 0]
        assert attach(clients[1], 2) == -122
        assert attach(clients[0], 2) == 0  # said again, it is no more
        assert [attach(clients[2], id) for id in (1, 2)] == [0, 0]
        rig.core.detach(clients[0], 1)
        assert attach(clients[1], 2) == 0
