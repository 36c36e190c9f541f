# SPDX-License-Identifier: Apache-2.0
"""What is in systemd/, without systemd as PID 1: nothing that breaks clawd, sound, and little exposed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from clawd.config import ROWS
from clawd.descriptors import files_needed

pytestmark = pytest.mark.plain
UNITS = Path(__file__).parent.parent / "systemd"
SERVICES = ("clawd.service", "clawd-kernel.service")
BREAKS = ("PrivateUsers", "RemoveIPC", "ProcSubset", "DynamicUser")
EXPOSURE = {"clawd.service": 1.6, "clawd-gateway.service": 1.7, "clawd-kernel.service": 3.0}
ANALYZE = shutil.which("systemd-analyze")
needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")


def settings(name: str) -> list[tuple[str, str]]:
    lines = (UNITS / name).read_text().splitlines()
    return [(key, value) for key, _, value in (line.partition("=") for line in lines if re.match(r"\w+=", line))]


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_that_breaks_clawd_and_a_comment_says_why(name: str) -> None:
    assert not [key for key, _ in settings(name) if key in BREAKS]
    comments = "".join(line for line in (UNITS / name).read_text().splitlines() if line.startswith("#"))
    for key in BREAKS if name == "clawd.service" else ("PrivateUsers", "ProcSubset"):
        assert key in comments


def test_what_the_helper_must_reach_is_not_hidden_and_each_is_explained() -> None:
    text = (UNITS / "clawd-kernel.service").read_text()
    for key in (
        "ProtectKernelTunables",
        "ProtectControlGroups",
        "ProtectKernelModules",
        "PrivateNetwork",
        "MemoryDenyWriteExecute",
    ):
        assert key not in dict(settings("clawd-kernel.service"))
        assert re.search(rf"^#.*{key}=", text, re.MULTILINE), key


def test_the_relay_keeps_what_a_next_start_needs_and_no_privilege() -> None:
    relay = dict(settings("clawd.service"))
    assert relay["RuntimeDirectoryPreserve"] == "yes"
    assert relay["CapabilityBoundingSet"] == relay["AmbientCapabilities"] == ""
    assert relay["User"] == "clawd"
    assert relay["Type"] == "notify"
    assert int(relay["WatchdogSec"]) >= 10
    most = files_needed(int(ROWS["max_producers"].high or 0), int(ROWS["max_clients"].high or 0))
    assert int(relay["LimitNOFILE"]) >= most


@needs_analyze
@pytest.mark.parametrize("name", EXPOSURE)
def test_exposure(name: str) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNITS / name)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", run.stdout)
    assert found, run
    assert float(found[1]) <= EXPOSURE[name]


@needs_analyze
def test_systemd_finds_nothing_to_say(tmp_path: Path) -> None:
    for path in UNITS.glob("*.s*"):
        # the programs are not on this host, and their manual pages neither
        text = re.sub(r"/opt/clawd/bin/\S+", "/bin/true", path.read_text())
        (tmp_path / path.name).write_text(text)
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_the_same_names_in_units_and_scripts() -> None:
    host = (UNITS.parent / "scripts/host.sh").read_text()
    named = subprocess.run(["bash", "-c", f"{host}\necho ${{UNITS[@]}}"], capture_output=True, text=True, check=True)
    assert sorted(named.stdout.split()) == sorted(
        path.name for path in UNITS.iterdir() if path.suffix in (".service", ".slice")
    )
