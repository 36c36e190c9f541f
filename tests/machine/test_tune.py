# SPDX-License-Identifier: Apache-2.0
"""Tuning a host whose kernel has it all: fq, several queues, weights, systemd's own settings, other tools' writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host import CGROUP, entries, pid, run, shown, until

STATE = Path("/var/lib/clawd-kernel/tune.journal")
CONF = Path("/etc/clawd/clawd.conf.d/50-tune.conf")
FOREIGN = Path("/etc/sysctl.d/70-other.conf")
# but the key, which the kernel makes when the first listener asks for TCP Fast Open, as verify's does
SYSCTLS = "cd /proc/sys/net && grep -rs '' ipv4/tcp_* core/somaxconn | grep -v tcp_fastopen_key"
MULTI, SINGLE = "ifb7", "ifb8"


def tune(*words: str, check: bool = True) -> dict[str, Any]:
    ran = run("clawctl", "tune", *words, "--json", check=False)
    assert not check or ran.returncode == 0, ran
    value: dict[str, Any] = json.loads(ran.stdout)
    return value


def named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["place"]["name"]: row for row in rows}


def queues(device: str) -> list[str]:
    return run("tc", "qdisc", "show", "dev", device).stdout.splitlines()


def get(key: str) -> str:
    return Path("/proc/sys", key.replace(".", "/")).read_text().strip()


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    """Devices with queues, of which the machine has none: one with four, one with one. All is as it was afterwards."""
    before = run("sh", "-c", SYSCTLS).stdout
    weight = (CGROUP / "clawd.slice/cpu.weight").read_text()
    run("sh", "-ec", f"ip link add {MULTI} numtxqueues 4 type ifb; ip link set {MULTI} up;"
                     f"ip link add {SINGLE} type ifb; ip link set {SINGLE} up")  # fmt: skip
    yield
    run("clawctl", "tune", "revert")
    run("sh", "-c", f"ip link del {MULTI}; ip link del {SINGLE}; rm -f {CONF} {FOREIGN}", check=False)
    assert run("sh", "-c", SYSCTLS).stdout == before
    assert (CGROUP / "clawd.slice/cpu.weight").read_text() == weight


def test_each_queue_gets_fq_and_back() -> None:
    before = {device: queues(device) for device in (MULTI, SINGLE)}
    assert before[MULTI][0].startswith("qdisc mq 0: root"), before
    plan = tune("plan", "--device", MULTI, "--device", SINGLE)
    disruptive = [change["place"]["name"] for change in plan["changes"] if change["is_disruptive"]]
    assert disruptive == [MULTI, SINGLE]
    assert {device: queues(device) for device in (MULTI, SINGLE)} == before
    tune("apply", "--device", MULTI, "--device", SINGLE)
    leaves = [line for line in queues(MULTI) if " parent c1a0:" in line]
    assert len(leaves) == 4
    assert all(line.startswith("qdisc fq ") for line in leaves), leaves
    assert queues(SINGLE)[0].startswith("qdisc fq c1a0: root")
    assert tune("verify", "--device", MULTI, "--device", SINGLE)["drift"] == []
    tune("revert")
    assert {device: queues(device) for device in (MULTI, SINGLE)} == before


def test_an_express_class_has_fair_leaves() -> None:
    admins = Path("/etc/clawd/profiles")
    admins.mkdir()
    try:
        (admins / "express.conf").write_text("[profile]\nbase = shared-host\n[qdisc]\nkind = htb\nrate = 100mbit\n")
        tune("apply", "--profile", "express", "--device", SINGLE)
        assert sum("qdisc fq " in line for line in queues(SINGLE)) == 2
        assert tune("verify", "--device", SINGLE)["drift"] == []
        tune("revert")
    finally:
        (admins / "express.conf").unlink()
        admins.rmdir()


def test_what_others_made_survives() -> None:
    run("sh", "-ec", f"""
        tc qdisc add dev {SINGLE} root handle 7: tbf rate 1mbit burst 10k latency 50ms
        tc qdisc add dev {MULTI} clsact
        tc filter add dev {MULTI} egress protocol ip prio 7 u32 match ip dst 10.9.9.9/32 action drop
    """)  # fmt: skip
    filters = run("tc", "filter", "show", "dev", MULTI, "egress").stdout
    assert "gact action drop" in filters
    value = tune("apply", "--device", MULTI, "--device", SINGLE)
    assert named(value["rows"])[SINGLE]["why"] == "its root queue, tbf 7:, is somebody else's and stays"
    assert run("tc", "filter", "show", "dev", MULTI, "egress").stdout == filters
    tune("revert")
    assert run("tc", "filter", "show", "dev", MULTI, "egress").stdout == filters
    assert queues(SINGLE)[0].startswith("qdisc tbf 7: root")


def test_what_another_tool_wrote_is_named_and_kept() -> None:
    FOREIGN.write_text("net.ipv4.tcp_autocorking = 1\nnet.ipv4.tcp_tw_reuse = 0\n")
    tune("apply")
    shown_row = named(tune("show")["rows"])["net.ipv4.tcp_tw_reuse"]
    assert shown_row["boot"] == f"0 by {FOREIGN}:2"
    run("systemctl", "restart", "systemd-sysctl")
    drift = named(tune("verify", check=False)["drift"])
    assert drift["net.ipv4.tcp_tw_reuse"]["by"] == f"{FOREIGN}:2 says so"
    assert run("clawctl", "tune", "verify", check=False).returncode == 4
    outcomes = named(tune("revert")["outcomes"])
    assert outcomes["net.ipv4.tcp_tw_reuse"]["result"] == "kept"
    assert get("net.ipv4.tcp_tw_reuse") == "0"
    run("sysctl", "-w", "net.ipv4.tcp_tw_reuse=2")


def test_weights_and_slices_hold_and_outlive_a_restart() -> None:
    tune("apply", "--profile", "shared-host")
    weight = CGROUP / "clawd.slice/cpu.weight"
    assert weight.read_text().strip() == "200"
    for thread in Path(f"/proc/{pid()}/task").iterdir():
        place = named(tune("show")["rows"])[thread.name]
        assert (place["live"], place["state"]) == ("1000000", "ok")
    run("systemctl", "restart", "clawd")
    run("systemctl", "daemon-reload")
    assert weight.read_text().strip() == "200"
    assert tune("revert")["outcomes"]
    assert weight.read_text().strip() == "400"


def test_the_helper_tunes_once_a_boot_within_its_sandbox() -> None:
    run("clawctl", "tune", "revert")
    STATE.unlink(missing_ok=True)
    # the device that carries the default route is the one that is meant
    run("sh", "-ec", f"ip addr add 10.77.0.1/24 dev {MULTI}; ip route add default dev {MULTI}")
    CONF.parent.mkdir(exist_ok=True)
    CONF.write_text("[kernel]\ntune = on\n")
    run("systemctl", "restart", "clawd-kernel", "clawd")
    said = until(lambda: [entry for entry in entries("_SYSTEMD_UNIT=clawd-kernel.service") if
                          str(entry["MESSAGE"]).startswith("tuned ")], "the helper's word")  # fmt: skip
    assert said[-1]["FAILED"] == "0", said[-1]["MESSAGE"]
    assert get("net.ipv4.tcp_fastopen") == "3"
    assert sum("qdisc fq " in line for line in queues(MULTI)) == 4
    assert tune("verify")["drift"] == []
    assert {row["live"] for row in tune("show")["rows"] if row["place"]["kind"] == "slice"} == {"500000"}
    # neither its end nor a restart undoes or repeats it
    run("sysctl", "-w", "net.ipv4.tcp_autocorking=1")
    run("systemctl", "restart", "clawd-kernel")
    assert get("net.ipv4.tcp_fastopen") == "3"
    assert get("net.ipv4.tcp_autocorking") == "1"
    assert (shown("clawd-kernel", "ActiveState"), shown("clawd-kernel", "NRestarts")) == ("active", "0")
    run("sysctl", "-w", "net.ipv4.tcp_autocorking=0")
    CONF.unlink()
    run("systemctl", "restart", "clawd")


def test_an_uninstall_takes_it_back() -> None:
    tune("apply", "--device", SINGLE)
    assert get("net.ipv4.tcp_fastopen") == "3"
    run("bash", "-ec", ". /source/scripts/host.sh; deactivate")
    assert get("net.ipv4.tcp_fastopen") == "1"
    assert queues(SINGLE)[0].startswith("qdisc fq_codel 0: root")
    assert not STATE.exists()
    run("systemctl", "start", "clawd", "clawd-kernel")
