# SPDX-License-Identifier: Apache-2.0
"""The units as systemd has them: hardened, sound, limited; and the service can live with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from host import CGROUP, UNITS, Traffic, cgroup_bytes, figure, pid, run, shown

SPOOL_BYTES = 64 << 20
PSS_MAX = 60 << 20


def exposure(unit: str) -> float:
    text = run("systemd-analyze", "security", "--no-pager", unit).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", text)
    assert found, text
    figure(f"exposure of {unit}", found[1])
    return float(found[1])


def test_systemd_finds_nothing_to_say() -> None:
    checked = run("systemd-analyze", "verify", *UNITS, "clawd.slice", "clawd_background.slice")
    assert (checked.stdout, checked.stderr) == ("", "")


def test_the_relay_is_exposed_to_little() -> None:
    assert exposure("clawd.service") <= 1.6
    assert exposure("clawd-kernel.service") <= 3.0


def test_the_relay_has_no_capability_and_the_helper_its_three() -> None:
    for unit, name, wanted in (("clawd", "clawd", 0), ("clawd-kernel", "root", 1 << 12 | 1 << 38 | 1 << 39)):
        status = Path(f"/proc/{pid(unit)}/status").read_text()
        for row in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
            found = re.search(rf"^{row}:\t([0-9a-f]+)$", status, re.MULTILINE)
            assert found
            assert int(found[1], 16) == (0 if row == "CapAmb" else wanted), (unit, row)
        assert run("ps", "-o", "user=", "-p", str(pid(unit))).stdout.strip() == name
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)


def test_both_are_in_the_slice_whose_weight_counts() -> None:
    for unit in UNITS:
        assert shown(unit, "ControlGroup") == f"/clawd.slice/{unit}"
    assert (CGROUP / "clawd.slice/cpu.weight").read_text().strip() == "400"


def test_rings_and_spool_are_charged_to_the_daemon_and_stay_in_the_slice() -> None:
    run("systemctl", "stop", "clawd")
    instance = Path("/run/clawd/instance").read_text().split()[0]
    for path in Path("/dev/shm").glob(f"clawd-{instance}-*"):
        path.unlink()
    before = cgroup_bytes("clawd.slice", "shmem")
    run("systemctl", "start", "clawd")
    spool = cgroup_bytes("clawd.slice/clawd.service", "shmem")
    assert spool >= SPOOL_BYTES
    with Traffic("charged") as traffic:
        ring = cgroup_bytes("clawd.slice/clawd.service", "shmem") - spool
        assert ring >= 128 << 10, "the producer touched it first, and clawd is charged"
        traffic.finish()
    run("systemctl", "stop", "clawd")
    assert cgroup_bytes("clawd.slice", "shmem") - before >= SPOOL_BYTES, "what stays for the next start"
    run("systemctl", "start", "clawd")


def test_the_daemon_is_small_without_ring_and_spool() -> None:
    run("systemctl", "restart", "clawd")
    rollup = Path(f"/proc/{pid()}/smaps_rollup").read_text()
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB$", rollup, re.MULTILINE))
    shared = int(rows.get("Pss_Shmem", 0))
    pss = (int(rows["Pss"]) - shared) << 10
    figure("Pss at start without shared memory, MB", round(pss / 1e6, 1))
    assert pss <= PSS_MAX


def test_limits_are_those_of_the_units() -> None:
    limits = Path(f"/proc/{pid()}/limits").read_text()
    assert re.search(r"^Max open files +524288 +524288 ", limits, re.MULTILINE)
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)
    assert Path(f"/proc/{pid()}/oom_score_adj").read_text().strip() == "-900"
    assert (CGROUP / "clawd.slice/clawd.service/memory.swap.max").read_text().strip() == "0"
    assert (CGROUP / "clawd.slice/memory.max").read_text().strip() != "max"


def test_what_the_relay_must_not_touch_it_cannot() -> None:
    """From inside its namespaces, as its user: the restrictions are there, and not only written down."""
    enter = (
        "nsenter",
        "-t",
        str(pid()),
        "-m",
        "--",
        "setpriv",
        "--reuid",
        "clawd",
        "--regid",
        "clawd",
        "--clear-groups",
    )
    for path in ("/etc/x", "/usr/x", "/proc/sys/net/core/somaxconn", "/sys/fs/cgroup/clawd.slice/cpu.weight"):
        assert run(*enter, "sh", "-c", f"echo 1 >{path}", check=False).returncode != 0, path
    assert run(*enter, "ls", "/home/", check=False).stdout == ""
    devices = run(*enter, "ls", "/dev").stdout.split()
    assert "null" in devices
    assert "vda" not in devices


def test_the_helper_answers_clawds_user_and_root_alone() -> None:
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        's.connect(\'/run/clawd-kernel/kernel.sock\'); s.send(b\'{"op":"capabilities","version":1}\');'
        "print(s.recv(4096).decode())"
    )
    python = ("/usr/bin/python3", "-I", "-c", code)
    for user in (None, "clawd"):
        answer = json.loads(run(*python, user=user).stdout)
        assert answer["abilities"] == {"network": "", "tracing": "", "bpf": ""}
    assert json.loads(run(*python, user="engine").stdout)["code"] == "denied"
    assert "Permission denied" in run(*python, user="stranger", check=False).stderr


def test_the_helper_holds_no_descriptor_of_tokens() -> None:
    links = [str(path.readlink()) for path in Path(f"/proc/{pid('clawd-kernel')}/fd").iterdir()]
    maps = Path(f"/proc/{pid('clawd-kernel')}/maps").read_text()
    assert not [link for link in links if "/dev/shm" in link]
    assert "/dev/shm" not in maps


def test_boot_to_ready() -> None:
    run("systemctl", "restart", "clawd")
    started = int(shown("clawd", "ExecMainStartTimestampMonotonic"))
    ready = int(shown("clawd", "ActiveEnterTimestampMonotonic"))
    figure("start to READY, ms", round((ready - started) / 1000))
    assert ready > started
