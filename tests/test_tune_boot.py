# SPDX-License-Identifier: Apache-2.0
"""What the settings say of tuning: clawd-kernel applies it once a boot, and clawd takes its own slice."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clawd.config import Config, Setting
from clawd.errors import ConfigError
from clawd.kernel import sched
from clawd.kernel.helper import ABILITIES
from tests.daemon import Daemon
from tests.network import ENVIRONMENT, NEEDED, Namespace, namespace
from tests.test_kernel_sched import needs_slices

pytestmark = [pytest.mark.plain]


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Namespace]:
    with namespace(tmp_path / "state") as made:
        yield made


class Helper:
    def __init__(self, net: Namespace, process: subprocess.Popen[str]) -> None:
        self.net, self.process, self.lines = net, process, [""]

    def until_ready(self) -> str:
        assert self.process.stderr
        while " ready " not in self.lines[-1]:
            self.lines.append(self.process.stderr.readline())
            assert self.lines[-1], self.lines
        return "".join(self.lines)


@contextmanager
def helper(net: Namespace, text: str) -> Iterator[Helper]:
    config = net.state.parent / "clawd.conf"
    config.write_text(text)
    words = ["--dir", net.state.parent / "run", "--user", "root", "--config", config, "--state-dir", net.state]
    command = [*net.enter, sys.executable, "-m", "clawd.kernel", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        yield Helper(net, process)
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
        assert (process.returncode, "Traceback" in said) == (0, False), said


@NEEDED
def test_it_is_applied_once_a_boot_and_a_restart_neither_reverts_nor_repeats(net: Namespace) -> None:
    before = net.values()
    with helper(net, "[kernel]\ntune = on\n") as first:
        assert "tuned profile=low-latency changed=8 failed=0" in first.until_ready()
        assert net.get("net.ipv4.tcp_fastopen") == "3"
    assert net.get("net.ipv4.tcp_fastopen") == "3", "the end of the helper takes nothing back"
    net.set("net.ipv4.tcp_tw_reuse", 0)
    with helper(net, "[kernel]\ntune = on\n") as second:
        assert "tuned" not in second.until_ready()
    assert net.get("net.ipv4.tcp_tw_reuse") == "0", "what an admin changed since stays"
    with helper(net, "[kernel]\ntune = on\nprofile = shared-host\n") as third:
        assert "tuned profile=shared-host" in third.until_ready()
    assert net.values() == {**before, "net.ipv4.tcp_fastopen": "3", "net.ipv4.tcp_tw_reuse": "0"}
    net.tune("revert")
    assert net.values() == {**before, "net.ipv4.tcp_tw_reuse": "0"}


@NEEDED
def test_without_the_setting_nothing_is_touched_but_what_was_left_unfinished(net: Namespace) -> None:
    before = net.values()
    with helper(net, "[kernel]\ntune = off\n") as one:
        one.until_ready()
    assert net.values() == before
    assert not net.state.exists()
    program = """
import os, signal, sys
from pathlib import Path
from clawd.kernel import profile
from clawd.kernel.tuning import Tuning
count = 0
def step(name):
    global count
    count += name == "written"
    if count == 4:
        os.kill(os.getpid(), signal.SIGKILL)
Tuning("test", Path(sys.argv[1]), step=step).apply(profile.load("low-latency"))
"""
    net.run(sys.executable, "-c", program, net.state, code=-signal.SIGKILL)
    assert net.values() != before
    with helper(net, "[kernel]\ntune = off\n") as two:
        assert two.until_ready().count("tune rolled back") == 8
    assert net.values() == before


@NEEDED
@pytest.mark.parametrize("text", ["[kernel]\ntune = on\nprofile = nosuch\n", "[kernel]\ntune = perhaps\n"])
def test_a_mistake_in_the_settings_is_logged_and_it_serves(net: Namespace, text: str) -> None:
    before = net.values()
    with helper(net, text) as one:
        said = one.until_ready()
    assert 'no profile \\"nosuch\\"' in said or 'tune: \\"perhaps\\" is not a switch' in said
    assert net.values() == before


@NEEDED
def test_afterwards_it_has_what_requests_need_and_no_more(net: Namespace) -> None:
    with helper(net, "[kernel]\ntune = on\n") as one:
        one.until_ready()
        status = Path(f"/proc/{one.process.pid}/status").read_text()
    wanted = sum(1 << bit for bit, _ in ABILITIES.values())
    for row in ("CapEff", "CapPrm", "CapBnd"):
        found = re.search(rf"^{row}:\t([0-9a-f]+)$", status, re.MULTILINE)
        assert found
        assert int(found[1], 16) & ~wanted == 0, row


@needs_slices
def test_clawd_takes_the_slice_of_its_profile(tmp_path: Path) -> None:
    with Daemon(tmp_path / "run", "--spool-bytes", "1M", "--stream-bytes", "64k", "--tune", "on") as daemon:
        places = sched.threads(daemon.pid)
        assert {sched.Slices().read(place) for place in places} == {"500000"}


def test_a_profiles_name_is_no_path() -> None:
    row: Setting = Config.__dataclass_fields__["profile"].metadata["row"]
    for text in ("../x", "", "A", "a" * 40, "a/b"):
        with pytest.raises(ConfigError, match="is not a name"):
            row.parse(text, "--profile")
