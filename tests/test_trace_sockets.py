# SPDX-License-Identifier: Apache-2.0
"""`clawctl trace sockets`: what the kernel has of a process's tcp clients, taken without disturbing them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Iterator

import pytest

from clawd.ctl import trace_sockets
from clawd.ctl.trace_target import Target
from clawd.errors import HostError
from tests.test_bpf_shaper import carry, connected, cookie

pytestmark = [pytest.mark.root, pytest.mark.plain]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, connected(listener) as both:
        yield both


def test_a_client_is_told_as_ss_tells_it(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, peer = pair
    port = ours.getsockname()[1]
    ours.setsockopt(socket.SOL_SOCKET, 47, 7_000_000)
    carry(ours, peer, 500_000)
    ours.send(b"unread")
    before = len(os.listdir("/proc/self/fd"))
    [row] = [each for each in trace_sockets.sockets_of(os.getpid(), {port: "bulk"}) if each.port == port]
    assert len(os.listdir("/proc/self/fd")) == before
    told = subprocess.run(["ss", "-tinH", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    host, number = peer.getsockname()
    assert (row.client, row.lane, row.pacing, row.cookie) == (f"{host}:{number}", "bulk", 7_000_000, cookie(ours))
    rtt = re.search(r"rtt:([\d.]+)/([\d.]+)", told)
    assert rtt, told
    assert abs(row.rtt_us - float(rtt[1]) * 1000) <= max(500, row.rtt_us / 2)
    assert f"cwnd:{row.cwnd}" in told
    again = re.search(r"retrans:\d+/(\d+)", told)  # on a busy host a probe may have been sent for nothing
    assert row.retrans == (int(again[1]) if again else 0)
    assert (row.loss_ppm > 0) == (row.retrans > 0)
    assert ours.send(b"still ours") == 10


def test_a_full_connection_shows_its_queue(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _peer = pair
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(65536))
    [row] = [each for each in trace_sockets.sockets_of(os.getpid(), {}) if each.cookie == cookie(ours)]
    assert row.queue_bytes >= row.notsent_bytes > 0
    assert (row.lane, row.pacing) == (None, None)
    text = trace_sockets.show(trace_sockets.collect(Target(os.getpid(), {}, "it sleeps")))
    assert text.splitlines()[0].split() == [
        "CLIENT",
        "LANE",
        "RTT",
        "JITTER",
        "LOSS",
        "PACING",
        "QUEUE",
        "UNSENT",
        "CWND",
    ]
    assert row.client in text
    assert text.splitlines()[-1] == "note: which port is which lane is not known: it sleeps"


def test_listeners_and_others_are_no_clients() -> None:
    before = len(trace_sockets.sockets_of(os.getpid(), {}))
    with socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(type=socket.SOCK_DGRAM):
        assert len(trace_sockets.sockets_of(os.getpid(), {})) == before
    assert trace_sockets.show({"sockets": []}) == "no client is connected by tcp"


def test_a_process_that_is_gone_is_told() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(HostError, match=f"cannot look at process {child.pid}: No such process"):
        trace_sockets.sockets_of(child.pid, {})
