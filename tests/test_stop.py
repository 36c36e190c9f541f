# SPDX-License-Identifier: Apache-2.0
"""`clawctl stop`: at once, after the live streams, not for everybody, and what it says when nothing stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawd.consumer import Consumer
from clawd.errors import ClawdError, StreamRefused
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon
from tests.test_ctl import clawctl, command, let_in, told


def test_stop_ends_it_in_order_and_waits_for_that(victim: Daemon) -> None:
    status = victim.status()
    value = told(victim.runtime_dir, "stop")
    assert (value["stopped"], value["pid"], value["dry_run"], value["drain_s"]) == (True, victim.pid, False, 0)
    assert value["took_ns"] > 0
    assert victim.process.poll() == 0, "it is over when clawctl says so"
    victim.await_stop(status)
    assert "stopped" in victim.log.lines[-1]
    run = clawctl(victim.runtime_dir, "stop")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (3, "", 1)


def test_a_dry_run_says_what_would_be_stopped_and_leaves_it(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").write("a")
        daemon.await_total("streams_live", 1)
        value = told(daemon.runtime_dir, "stop", "--dry-run")
        assert (value["stopped"], value["streams_live"], value["producers"], value["clients"]) == (False, 1, 1, 0)
        run = clawctl(daemon.runtime_dir, "stop", "--dry-run", "--drain", columns=20)
        assert "would stop clawd" in run.stdout
        assert [line for line in run.stdout.splitlines() if len(line) > 20] == []
        assert daemon.process.poll() is None


def test_a_drain_waits_for_live_streams_and_refuses_new_ones(victim: Daemon) -> None:
    with Producer("p", victim.runtime_dir) as producer, Consumer(victim.runtime_dir) as consumer:
        stream = producer.open("s")
        stream.write("a")
        victim.await_total("tokens", 1)
        status = victim.status()
        run = subprocess.Popen(
            command(victim.runtime_dir, "stop", "--drain=60", "--json"), stdout=subprocess.PIPE, text=True
        )
        victim.log.wait("told to stop", "drain_ms=60000")
        with pytest.raises(ClawdError, match="about to stop"):
            Producer("late", victim.runtime_dir)
        refused = producer.open("t")
        victim.log.wait("stream refused", "reason=stopping")
        with pytest.raises(StreamRefused, match="about to stop"):
            refused.write("x")
        reading = consumer.attach("s")  # new readers are welcome
        assert reading.read(PATIENCE_S).text == "a"
        assert run.poll() is None
        stream.write("b")
        stream.close("stop")
        assert [token.text for token in reading] == ["b"]
        out, _ = run.communicate(timeout=PATIENCE_S)
        value = json.loads(out)
        assert (run.returncode, value["stopped"], value["streams_live"]) == (0, True, 1)
    victim.process.wait(PATIENCE_S)
    victim.over = True
    assert status["pid"] == victim.pid


def test_a_drain_ends_when_its_time_is_up(victim: Daemon) -> None:
    with Producer("p", victim.runtime_dir) as producer:
        producer.open("s").write("a")
        victim.await_total("streams_live", 1)
        value = told(victim.runtime_dir, "stop", "--drain=1")
        assert value["stopped"]
        assert value["took_ns"] >= 1e9
        assert victim.process.wait(PATIENCE_S) == 0
    victim.over = True


def test_a_drain_with_nothing_live_is_over_at_once(victim: Daemon) -> None:
    assert told(victim.runtime_dir, "stop", "--drain")["took_ns"] < 10e9
    assert victim.process.wait(PATIENCE_S) == 0
    victim.over = True


@pytest.mark.parametrize("end", [signal.SIGTERM, None])
def test_a_drain_is_cut_short_by_a_stop(victim: Daemon, end: int | None) -> None:
    with Producer("p", victim.runtime_dir) as producer:
        producer.open("s").write("a")
        victim.await_total("streams_live", 1)
        run = subprocess.Popen(command(victim.runtime_dir, "stop", "--drain=600"), stdout=subprocess.PIPE)
        victim.log.wait("told to stop")
        if end:
            victim.process.send_signal(end)
        else:
            assert told(victim.runtime_dir, "stop")["stopped"]
        out, _ = run.communicate(timeout=PATIENCE_S)
        assert (run.returncode, out.startswith(b"stopped clawd")) == (0, True)
        assert victim.process.wait(PATIENCE_S) == 0
    victim.over = True


def test_a_stopped_daemon_is_unreachable_and_one_that_hangs_on_is_exit_1(victim: Daemon) -> None:
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        run = clawctl(victim.runtime_dir, "stop")
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (3, "", 1)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    # Told, and stopped before it could: clawctl's patience is made short so that the test's need not be long
    program = (
        "import os, signal, sys\nfrom clawd.ctl import client, stop\nfrom clawd.ctl.main import main\n"
        "ask = client.Client.ask\n"
        "def then_freeze(self, request, answer):\n"
        "    found = ask(self, request, answer)\n"
        "    os.kill(int(sys.argv[2]), signal.SIGSTOP)\n"
        "    return found\n"
        "client.Client.ask = then_freeze\nstop.PATIENCE_S = 0.2\n"
        "sys.exit(main(['stop', '--drain=1', '--runtime-dir', sys.argv[1]]))"
    )
    with Producer("p", victim.runtime_dir) as producer:
        producer.open("s").write("a")
        victim.await_total("streams_live", 1)
        run = subprocess.run(
            [sys.executable, "-c", program, str(victim.runtime_dir), str(victim.pid)],
            capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        os.kill(victim.pid, signal.SIGCONT)
        assert (run.returncode, run.stdout) == (1, "")
        assert "was told to stop and has not within" in run.stderr
        assert victim.process.wait(PATIENCE_S) == 0
    victim.over = True


def test_somebody_else_may_not_stop_it(daemon: Daemon) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    (daemon.runtime_dir / "control.sock").chmod(0o666)
    let_in(daemon)
    program = (
        "import os, sys; from clawd import protocol; from clawd.ctl.client import Client; from pathlib import Path\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "Client(Path(sys.argv[1])).ask(protocol.Stop(int(sys.argv[2])), protocol.Stopping)"
    )
    for drain_ms in ("0", "5000"):
        run = subprocess.run(
            [sys.executable, "-c", program, str(daemon.runtime_dir), drain_ms],
            capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert "only root, clawd's own user and admins may stop clawd (denied)" in run.stderr
    assert daemon.process.poll() is None


@pytest.mark.parametrize("flag", ["--drain=0", "--drain=x", "--drain=99999999", "--drain=-1"])
def test_bad_seconds_are_one_line_and_exit_2(tmp_path: Path, flag: str) -> None:
    run = clawctl(tmp_path, "stop", flag)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
