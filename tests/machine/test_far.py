# SPDX-License-Identifier: Apache-2.0
"""Clients of another host, which is a network namespace behind netem: the installed units, keys, lanes and rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host import OPT, SOURCE, Traffic, entries, figure, pid, run, until

NEAR, FAR, PORT = "10.79.0.1", "10.79.0.2", 7400
THERE = ("ip", "netns", "exec", "claw-far")
KEY = "far-host"


class Way:
    """Between the two, with netem at both ends."""

    def __enter__(self) -> Way:
        run("ip", "netns", "add", "claw-far")
        run("ip", "link", "add", "claw-near", "type", "veth", "peer", "name", "claw-far", "netns", "claw-far")
        run("ip", "address", "add", f"{NEAR}/30", "dev", "claw-near")
        run(*THERE, "ip", "address", "add", f"{FAR}/30", "dev", "claw-far")
        run("ip", "link", "set", "claw-near", "up")
        run(*THERE, "ip", "link", "set", "claw-far", "up")
        run(*THERE, "ip", "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        run("ip", "link", "delete", "claw-near", check=False)
        run("ip", "netns", "delete", "claw-far", check=False)

    def be(self, *quality: str) -> None:
        run("tc", "qdisc", "replace", "dev", "claw-near", "root", "netem", *quality)
        run(*THERE, "tc", "qdisc", "replace", "dev", "claw-far", "root", "netem", *quality)


def said(*parts: str) -> list[str]:
    """What the clawd that runs wrote, of lines that hold all of these."""
    lines = [entry["MESSAGE"] for entry in entries(f"_PID={pid()}")]
    return [line for line in lines if all(part in line for part in parts)]


@pytest.fixture
def way(no_drop_ins: None, tmp_path: Path) -> Iterator[tuple[Way, dict[str, str]]]:
    """clawd listens on it, and what a client there needs."""
    made = run("clawctl", "keys", "relay", "new", KEY, "--out", str(tmp_path / "far.key"), "--json")
    for directory in (tmp_path, *tmp_path.parents):
        if directory.name.startswith(("pytest", "test_")):
            directory.chmod(0o755)
    run("chown", "engine:", str(tmp_path / "far.key"))
    drop_in = Path("/etc/clawd/clawd.conf.d/tcp.conf")
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text(f"[network]\ntcp_listen = {NEAR}:{PORT}\nkeepalive = 5s\n")
    try:
        with Way() as link:
            run("systemctl", "restart", "clawd")
            until(lambda: said("sockets shaped"), "the shaper")
            server_key = json.loads(made.stdout)["server_public"]
            yield link, {"endpoint": f"tcp://{NEAR}:{PORT}", "key": str(tmp_path / "far.key"), "server_key": server_key}
    finally:
        drop_in.unlink()
        run("rm", "-r", "/etc/clawd/keys/relay.key", "/etc/clawd/keys/allow")
        run("systemctl", "restart", "clawd")


def sockets() -> list[dict[str, Any]]:
    told = run("clawctl", "trace", "sockets", "--json", "--duration", "1").stdout.splitlines()[-1]
    return [row for row in json.loads(told)["sockets"] if row["client"].startswith(FAR)]


def test_streams_come_whole_over_a_bad_way_that_goes_and_comes_back(way: tuple[Way, dict[str, str]]) -> None:
    link, client = way
    link.be("delay", "40ms", "5ms", "loss", "8%")
    with Traffic("far", streams=10, interval_s=0.05, within=THERE, **client) as traffic:
        found = entries(f"ADDRESS={FAR}")
        assert found, "clawd knows where its client is"
        assert found[-1]["CLIENT"].startswith(f"{KEY}/")
        rows = sockets()
        assert {row["port"] for row in rows} == {PORT, PORT + 1}
        for row in rows:
            assert row["rtt_us"] >= 75_000, row
        figure("tcp lanes behind 40 ms each way: round trip in trace sockets, ms", round(rows[0]["rtt_us"] / 1000))
        until(lambda: said("way loses much, frames go on both lanes"), "the loss to be seen")
        run("ip", "link", "set", "claw-near", "down")
        until(lambda: said("client gone", f"client={KEY}/"), "its silence")
        run("ip", "link", "set", "claw-near", "up")
        link.be("delay", "5ms")
        traffic.finish()


def test_pacers_know_of_a_way_that_changed_within_two_round_trips(way: tuple[Way, dict[str, str]]) -> None:
    """Of the way as it is then; a round trip passes before the kernel can know."""
    link, client = way
    link.be("delay", "10ms")
    run("clawctl", "pace", "steady")
    with Traffic("known", streams=1, within=THERE, **client) as traffic:
        program = str(SOURCE / "tests/machine/known.py")
        # By what was installed: where the tests' copy of it is, nothing compiled may be loaded
        ran = run("env", "-u", "PYTHONPATH", str(OPT / "bin/python"), "-P", program, str(SOURCE))
        link.be("delay", "5ms")
        traffic.finish()
    told = json.loads(ran.stdout)
    for name, value in told["rtts"].items():
        figure(f"until pacers know of {name}, round trips", value)
    figure("how much later than the kernel, median, ms", told["lag_ms"])
    assert max(told["rtts"].values()) <= 2, told


def test_a_revoked_key_ends_its_clients_and_a_killed_clawd_loses_nothing(way: tuple[Way, dict[str, str]]) -> None:
    link, client = way
    link.be("delay", "5ms")
    with Traffic("kept", streams=5, within=THERE, **client) as traffic:
        before = pid()
        run("systemctl", "kill", "-s", "KILL", "clawd")
        until(lambda: pid() not in (0, before), "the next clawd")
        verdict = traffic.finish()
    figure("killed, clients by tcp: longest silence, ms", round(verdict["silence_ms"]))
    with Traffic("cut", streams=1, within=THERE, **client):
        run("clawctl", "keys", "relay", "revoke", KEY)
        until(lambda: said("tcp client dropped", "key revoked"), "the cut")
