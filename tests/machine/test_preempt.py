# SPDX-License-Identifier: Apache-2.0
"""First tokens first, with systemd's slices: weights flip and come back, whoever is restarted or killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from host import CGROUP, OPT, SOURCE, Traffic, as_user, figure, pid, run, shown, until

RELAY, BACKGROUND = "clawd.slice", "clawd_background.slice"
REST = {RELAY: 400, BACKGROUND: 25}
FIRST = {RELAY: 3200, BACKGROUND: 1}
CONF = Path("/etc/clawd/clawd.conf.d/50-boost.conf")
WRITES_PER_S = 20
BUSY = "while True: pass"


def weights() -> dict[str, int]:
    return {name: int((CGROUP / name / "cpu.weight").read_text()) for name in REST}


def status() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run("clawctl", "status", "--json").stdout)
    return value


@contextmanager
def unit(name: str, slice_name: str, *command: str) -> Iterator[None]:
    run("systemd-run", f"--unit={name}", f"--slice={slice_name}", "--property=Restart=no", *command)
    try:
        yield
    finally:
        run("systemctl", "kill", "-s", "KILL", name, check=False)
        run("systemctl", "stop", name, check=False)
        run("systemctl", "reset-failed", name, check=False)


@pytest.fixture(autouse=True)
def boosted() -> Iterator[None]:
    """With something in the slice that yields, without which systemd has no cgroup for it."""
    CONF.parent.mkdir(parents=True, exist_ok=True)
    CONF.write_text("[kernel]\nboost = on\n")
    run("systemctl", "restart", "clawd")
    with unit("yields", BACKGROUND, "sleep", "infinity"):
        until(lambda: weights() == REST, "the weights of the units")
        yield
        until(lambda: weights() == REST, "the weights of the units, again")
    CONF.unlink()
    run("systemctl", "reload", "clawd")


class Opens:
    """An engine whose streams wait for their first token as long as the test wants."""

    def __enter__(self) -> Opens:
        command = ["env", f"PYTHONPATH={SOURCE}/tests:{SOURCE}/tests/machine", "PYTHONDONTWRITEBYTECODE=1",
                   str(OPT / "bin/python"), "-P", str(SOURCE / "tests/machine/opens.py")]  # fmt: skip
        self._process = subprocess.Popen(
            [*as_user("engine"), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._done()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _done(self) -> None:
        assert self._process.stdout
        assert self._process.stdout.readline() == "done\n"

    def tell(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._done()

    def keep_waiting(self) -> None:
        """Have one waited for from now on for a while; half a second is short in emulation."""
        self.tell("open 1")


@contextmanager
def held() -> Iterator[Opens]:
    """While the body runs, a first token is waited for: a new stream each time it is asked."""
    with Opens() as engine:
        assert until(lambda: engine.keep_waiting() or weights() == FIRST, "the boost")
        yield engine


def test_from_open_to_first_token_beside_busy_processes() -> None:
    with unit("busy", "system.slice", sys.executable, "-c", BUSY), held() as engine:
        engine.tell("first")
        until(lambda: weights() == REST, "the end of the boost")
        value = status()
    assert value["urgency"]["reason"] is None
    assert value["totals"]["boosts"] >= 1
    boosting = value["kernel"]["boosting"]
    assert (boosting["state"], boosting["kept"], boosting["resting"]) == ("rest", {}, REST)
    writes = boosting["writes"]
    time.sleep(2)  # a span of time is what is asked for: while nothing waits nothing is written
    assert status()["kernel"]["boosting"]["writes"] == writes


def test_threads_have_the_slice() -> None:
    threads = len(list(Path(f"/proc/{pid()}/task").iterdir()))
    assert threads >= 3, "ZeroMQ's too"
    assert status()["slices"]["threads_by_ns"] == {"500000": threads}


def test_a_member_that_is_restarted_in_mid_boost() -> None:
    with unit("member", RELAY, "sleep", "infinity"), held() as engine:
        for command in (("restart", "clawd-gateway"), ("stop", "clawd-gateway"), ("daemon-reload",)):
            run("systemctl", *command)
            assert until(lambda: engine.keep_waiting() or weights() == FIRST, f"the boost after {command}")
        engine.tell("first")
    until(lambda: weights() == REST, "the end of the boost")


def test_what_an_admin_sets_in_mid_boost_is_what_it_goes_back_to() -> None:
    with held() as engine:
        run("systemctl", "set-property", "--runtime", RELAY, "CPUWeight=333")
        engine.tell("first")
        until(lambda: weights() == {**REST, RELAY: 333}, "the end of the boost")
    run("systemctl", "set-property", "--runtime", RELAY, "CPUWeight=400")


def test_tuning_takes_a_boost_for_no_drift() -> None:
    run("clawctl", "tune", "apply")
    try:
        with held() as engine:
            verified = json.loads(run("clawctl", "tune", "verify", "--json", check=False).stdout)
            engine.keep_waiting()
            assert [row for row in verified["drift"] if row["place"]["kind"] == "weight"] == []
    finally:
        run("clawctl", "tune", "revert")


@pytest.mark.parametrize("name", ["clawd-kernel", "clawd"])
def test_one_that_is_killed_in_mid_boost(name: str) -> None:
    with held():
        before = pid(name)
        started = time.monotonic()
        run("systemctl", "kill", "-s", "KILL", name)
        until(lambda: weights() == REST, "the end of the boost")
        figure(f"boost left by a killed {name}, s", round(time.monotonic() - started, 2))
        until(lambda: pid(name) not in (0, before) and shown(name, "ActiveState") == "active", "its next start")
    with held():
        pass


def test_one_that_stands_still_in_mid_boost() -> None:
    with held():
        os.kill(pid(), 19)
        try:
            until(lambda: weights() == REST, "the end of the lease")
        finally:
            os.kill(pid(), 18)


def test_a_helper_that_is_stopped_puts_back() -> None:
    with held():
        run("systemctl", "stop", "clawd-kernel")
        assert weights() == REST
        until(lambda: status()["urgency"]["reason"], "the reason")
    run("systemctl", "start", "clawd-kernel")


def test_a_thousand_opens_in_a_second() -> None:
    before = status()["kernel"]["boosting"]["writes"]
    with Opens() as engine, unit("busy", "system.slice", sys.executable, "-c", BUSY):
        started = time.monotonic()
        engine.tell("open 1000")
        figure("1,000 opens, s", round(time.monotonic() - started, 2))
        engine.tell("first")
        until(lambda: weights() == REST, "the end of the boosts")
        passed = time.monotonic() - started
    writes = status()["kernel"]["boosting"]["writes"] - before
    figure("writes for 1,000 opens", writes)
    assert writes <= WRITES_PER_S * (passed + 1)
    assert shown("clawd", "NRestarts") == "0"


def test_under_pressure_the_relay_gets_more_and_both_go_back() -> None:
    """clawd's slice weighs little beside processes that want all: it suffers, and says so. With a weight of 1 the
    helper, which is in there too, would be ended by its watchdog before it had run.
    """
    run("systemctl", "set-property", "--runtime", RELAY, "CPUWeight=10")
    try:
        with Traffic("pressed", interval_s=0.01) as traffic:
            with unit(
                "busy",
                "system.slice",
                "sh",
                "-c",
                f"for i in 1 2 3 4 5 6 7 8; do {sys.executable} -c '{BUSY}' & done; wait",
            ):
                until(lambda: weights() == {RELAY: 1600, BACKGROUND: 1}, "the weights under pressure")
                value = status()
            figure(
                "under pressure", {name: value["urgency"][name] for name in ("pressure", "some_permille", "wait_us")}
            )
            until(lambda: weights() == {RELAY: 10, BACKGROUND: 25}, "the end of the pressure")
            traffic.finish()
    finally:
        run("systemctl", "set-property", "--runtime", RELAY, "CPUWeight=400")


def test_bench_shows_what_weights_do(tmp_path: Path) -> None:
    """Figures are for the report: emulation is slow, so only ratios, and no bound."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    words = ("-P", "-m", "tests.bench.preempt", "--json", "--streams", "25", "--rounds", "2")
    ran = run(str(OPT / "bin/python"), *words, env=environment, timeout=280)
    value = json.loads(ran.stdout)
    for arm, row in value["preempt"].items():
        figure(f"preempt {arm}", row)
        assert row["lost"] == 0
    assert not list(CGROUP.glob("clawd-bench-*"))
    assert re.search(r"^some avg10=", Path("/proc/pressure/cpu").read_text())
