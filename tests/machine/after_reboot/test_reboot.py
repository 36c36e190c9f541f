# SPDX-License-Identifier: Apache-2.0
"""The second boot: what was enabled in the first is there by itself, and whole."""

from __future__ import annotations

from pathlib import Path

from host import RESULT, UNITS, Traffic, cgroup_bytes, entries, figure, run, shown


def test_a_reboot_comes_back_clean() -> None:
    assert len((RESULT / "boots").read_text().splitlines()) == 2
    for unit in UNITS:
        assert (shown(unit, "ActiveState"), shown(unit, "NRestarts")) == ("active", "0")
    well = run("clawctl", "doctor")
    assert not [line for line in well.stdout.splitlines() if line.startswith(("warn", "fail"))], well.stdout
    troubles = [entry["MESSAGE"] for entry in entries("_SYSTEMD_UNIT=clawd.service") if int(entry["PRIORITY"]) < 6]
    assert troubles == []
    instance = Path("/run/clawd/instance").read_text().split()[0]
    assert {path.name.split("-")[1] for path in Path("/dev/shm").glob("clawd-*")} == {instance}
    assert cgroup_bytes("clawd.slice/clawd.service", "shmem") >= 64 << 20
    with Traffic("rebooted") as traffic:
        traffic.finish()


def test_boot_to_ready() -> None:
    ready_us = int(shown("clawd", "ActiveEnterTimestampMonotonic"))
    figure("boot to READY, s after the kernel's start", round(ready_us / 1e6, 1))
    assert ready_us > 0
