# SPDX-License-Identifier: Apache-2.0
"""What `clawctl doctor` makes of what operators see: each symptom is caused, found, and named with what to do."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawd.consumer import Consumer
from clawd.core import lib
from clawd.ctl import symptoms
from clawd.page import Page
from clawd.producer import Producer
from tests.daemon import Daemon, until
from tests.network import NEEDED, Namespace, namespace

pytestmark = pytest.mark.plain
SLOW_NS = 400_000_000
COUNT = symptoms.ENOUGH + 5


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Namespace]:
    with namespace(tmp_path / "state") as made:
        yield made


def stream(daemon: Daemon, requested_ago_ns: int) -> None:
    with Producer("engine", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        for number in range(COUNT):
            made = producer.open(f"s{number}", requested_ns=time.monotonic_ns() - requested_ago_ns, block=20)
            made.write("token", block=20)
            made.close("stop", block=20)
            assert "".join(token.text for token in consumer.attach(f"s{number}")) == "token"


def test_a_slow_first_token_is_the_models_when_little_of_it_is_ours(victim: Daemon) -> None:
    stream(victim, SLOW_NS)
    with Page(victim.runtime_dir) as page:
        until(lambda: page.quantiles(2, (0.95,))[0] >= COUNT, "the figures")
        finding = symptoms.check_first_token(page)
        assert (finding.level, symptoms.check_stalls(page).level) == ("warn", "ok"), finding
    assert "the model is cold" in finding.what
    assert finding.fix
    assert finding.fix.startswith("warm the model")
    assert "clawctl(1)" in finding.fix


def test_quick_first_tokens_are_fine(victim: Daemon) -> None:
    stream(victim, 1_000_000)
    with Page(victim.runtime_dir) as page:
        assert symptoms.check_first_token(page).level == "ok"


def test_tokens_that_wait_in_their_ring_ask_for_a_larger_one(victim: Daemon) -> None:
    with Producer("engine", victim.runtime_dir) as producer:
        made = producer.open("s", block=20)
        made.write("token", block=20)
        with Page(victim.runtime_dir) as page:
            until(lambda: page.totals().tokens == 1, "the first token")
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                for _ in range(COUNT):
                    made.write("token")
                time.sleep(2 * symptoms.STALL_NS / 1e9)  # what they wait is what is measured
            finally:
                os.kill(victim.pid, signal.SIGCONT)
            until(lambda: page.totals().tokens > COUNT, "all tokens")
            finding = symptoms.check_stalls(page)
        assert finding.level == "warn"
        assert finding.fix
        assert finding.fix.startswith("put buffer_size = 256k below [stream], clawctl reload")


def test_what_waited_for_a_clawd_that_was_away_asks_for_nothing(victim: Daemon) -> None:
    with Producer("engine", victim.runtime_dir) as producer:
        made = producer.open("s", block=20)
        made.write("token", block=20)
        with Page(victim.runtime_dir) as page:
            until(lambda: page.totals().tokens == 1, "the first token")
        victim.kill()
        for _ in range(COUNT):
            made.write("token")
        time.sleep(2 * symptoms.STALL_NS / 1e9)  # what they wait is what is measured
        victim.start()
        with Page(victim.runtime_dir) as page:
            until(lambda: page.totals().tokens == COUNT, "all tokens")
            assert page.quantiles(lib.CLAW_HIST_COMMIT, (0.5,))[1][0] > symptoms.STALL_NS
            assert symptoms.check_stalls(page).level == "ok"


def checks(net: Namespace) -> dict[str, dict[str, Any]]:
    program = (
        "import json; from clawd.ctl import symptoms;"
        "print(json.dumps([vars(f()) for f in (symptoms.check_disconnects, symptoms.check_ports)]))"
    )
    return {row["check"]: row for row in json.loads(net.run(sys.executable, "-c", program))}


LOSE = """
import socket, subprocess, sys
TCP_USER_TIMEOUT = 18
subprocess.run(["sh", "-ec", "ip route add blackhole 10.9.0.0/16 || true"], check=True)
server = socket.create_server(("127.0.0.1", 0), backlog=64)
pairs = []
for _ in range(12):
    client = socket.create_connection(server.getsockname())
    client.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 300)
    pairs.append((client, server.accept()[0]))
# what is on the way forgets the connections
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
for client, _ in pairs:
    client.send(b"x")
for client, _ in pairs:
    client.settimeout(20)
    try:
        client.recv(1)
    except (TimeoutError, OSError) as error:
        pass
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
"""


@NEEDED
def test_connections_that_time_out_ask_for_keepalive(net: Namespace) -> None:
    assert checks(net)["disconnects"]["level"] == "ok"
    net.python(LOSE)
    finding = checks(net)["disconnects"]
    assert finding["level"] == "warn", finding
    assert finding["fix"].startswith("put keepalive = 10s below [network]")
    assert "clawd.conf(5)" in finding["fix"]


USE_UP = """
import socket
server = socket.create_server(("127.0.0.1", 7000), backlog=64)
for _ in range(7):
    client = socket.create_connection(("127.0.0.1", 7000))
    got = server.accept()[0]
    client.close(); got.recv(1); got.close()
"""


@NEEDED
def test_ports_that_run_out_ask_for_reuse(net: Namespace) -> None:
    net.set("net.ipv4.ip_local_port_range", "40000 40007")
    net.set("net.ipv4.tcp_tw_reuse", 0)
    assert checks(net)["ports"]["level"] == "ok"
    net.python(USE_UP)
    finding = checks(net)["ports"]
    assert finding["level"] == "warn", finding
    assert finding["what"].startswith("7 of 8 ports are taken towards one peer, 7 of them only wait")
    assert finding["fix"].startswith("clawctl tune apply sets net.ipv4.tcp_tw_reuse = 1")
    net.tune("apply")
    net.set("net.ipv4.tcp_timestamps", 0)
    assert checks(net)["ports"]["fix"].startswith("sysctl -w net.ipv4.tcp_timestamps=1")
    net.set("net.ipv4.tcp_timestamps", 1)
    assert checks(net)["ports"]["fix"].startswith("keep connections open, or widen")
    # as the command shows it
    said = " ".join(net.run(sys.executable, "-m", "clawd.ctl.main", "doctor", "--runtime-dir", "/x", code=1).split())
    assert "7 of 8 ports are taken" in said
