# SPDX-License-Identifier: Apache-2.0
"""clawd-kernel: answers those it is for, to what is listed, and is harmed by nobody."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawd import protocol
from clawd.ctl import helper as ctl_helper
from clawd.kernel.helper import PEERS_MAX, STRANGER_S, STRANGERS_MAX, abilities

pytestmark = pytest.mark.plain
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
NOBODY = 65534


class Process:
    """A clawd-kernel of its own, whose user is the one who runs the tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        user = pwd.getpwuid(os.geteuid()).pw_name
        command = [sys.executable, "-m", "clawd.kernel", "--dir", str(directory), "--user", user]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        self.first = self.process.stderr.readline()

    def dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(str(self.directory / protocol.KERNEL_SOCKET))
        return connection

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr
        text = self.process.stderr.read()
        self.process.stderr.close()
        return self.process.wait(20), text


@pytest.fixture
def helper() -> Iterator[Process]:
    # Not in pytest's directory, which every pytest that starts shuts to others
    with tempfile.TemporaryDirectory(prefix="clawd-helper-") as directory:
        Path(directory).chmod(0o755)
        process = Process(Path(directory) / "kernel")
        assert " ready " in process.first, process.first
        yield process
        code, text = process.stop()
        assert (code, "Traceback" in text) == (0, False), text
        assert sorted(path.name for path in process.directory.iterdir()) == ["lock"]


def ask(connection: socket.socket, packet: bytes) -> dict[str, Any]:
    connection.send(packet)
    answer = json.loads(connection.recv(65536))
    assert isinstance(answer, dict)
    return answer


def test_it_answers_pings_and_says_what_it_may_do(helper: Process) -> None:
    with helper.dial() as connection:
        for _ in range(3):
            assert ask(connection, b'{"op":"ping"}') == {"op": "pong"}
        answer = ask(connection, b'{"op":"capabilities","version":1}')
    status = Path("/proc/self/status").read_text()
    assert answer == {"op": "capabilities", "version": 1, "abilities": abilities(status)}


def test_abilities_are_those_of_the_kernel() -> None:
    assert abilities(f"Name:\tx\nCapEff:\t{1 << 39 | 1 << 12:016x}\n") == {
        "network": "",
        "tracing": "no CAP_PERFMON",
        "bpf": "",
    }
    assert set(abilities("").values()) == {"no CAP_NET_ADMIN", "no CAP_PERFMON", "no CAP_BPF"}


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (b'{"op":"write","path":"/etc/passwd"}', "no such operation here: 'write'"),
        (b'{"op":"hello","version":1,"role":"admin"}', "no such operation here: 'hello'"),
        (b'{"op":"ping","file":"/etc/passwd"}', "\"ping\" has no field 'file'"),
        (b'{"op":"capabilities","version":"1"}', '"capabilities" has a bad value for "version"'),
        (b'{"op":"capabilities"}', '"capabilities" lacks field "version"'),
        (b'{"op":"ping"' + b" " * 600 + b"}", "message of 513 bytes is longer than 512"),
        (b"[" * 500, "message is not JSON"),
        (b"\xff\xfe", "message is not JSON"),
        (b"7", "message is not a JSON object"),
        (b'{"op":"capabilities","version":2}', "version 2 is not spoken here"),
    ],
)
def test_what_is_not_listed_is_refused_by_name_and_ends_the_connection(
    helper: Process, packet: bytes, text: str
) -> None:
    with helper.dial() as connection:
        answer = ask(connection, packet)
        assert (answer["op"], answer["code"]) == ("error", "bad_request")
        assert text in answer["text"]
        assert connection.recv(10) == b""
    with helper.dial() as connection:
        assert ask(connection, b'{"op":"ping"}') == {"op": "pong"}


def test_no_more_connections_than_its_limit(helper: Process) -> None:
    kept = [helper.dial() for _ in range(PEERS_MAX)]
    for connection in kept:
        assert ask(connection, b'{"op":"ping"}') == {"op": "pong"}
    with helper.dial() as refused:
        assert refused.recv(10) == b""
    kept.pop().close()
    with helper.dial() as connection:
        assert ask(connection, b'{"op":"ping"}') == {"op": "pong"}
    for connection in kept:
        connection.close()


def as_nobody(job: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `job` in a fork that is another user, of the directory's group as engines are."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([directory.stat().st_gid])
            os.setresuid(NOBODY, NOBODY, NOBODY)
            scope: dict[str, Any] = {"path": str(directory / protocol.KERNEL_SOCKET), "socket": socket}
            exec(job, scope)
            os.write(writing, str(scope["result"]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as stream:
        text = stream.read()
    return subprocess.CompletedProcess(job, os.waitpid(pid, 0)[1], text)


DIAL = "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20); s.connect(path)\n"


@ROOT_ONLY
def test_another_user_is_told_no(helper: Process) -> None:
    run = as_nobody(DIAL + 's.send(b\'{"op":"ping"}\'); result = s.recv(1000).decode()', helper.directory)
    assert json.loads(run.stdout) == {
        "op": "error",
        "code": "denied",
        "text": "only root and clawd's own user may ask clawd-kernel",
        "id": 0,
    }


@ROOT_ONLY
def test_others_keep_nobody_out_and_are_let_go(helper: Process) -> None:
    job = f"""
all = []
for _ in range({STRANGERS_MAX} + 1):
    {DIAL.strip()}
    all.append(s)
result = [s.recv(10) for s in reversed(all)]
"""
    # silent ones: that beyond the limit is let go at once, the rest when their time is up
    run = as_nobody(job, helper.directory)
    assert run.stdout == str([b""] * (STRANGERS_MAX + 1)), f"within {STRANGER_S} s"
    with helper.dial() as connection:
        assert ask(connection, b'{"op":"ping"}') == {"op": "pong"}


def test_a_second_one_is_refused_and_the_first_goes_on(helper: Process) -> None:
    second = Process(helper.directory)
    assert second.first == f'clawd-kernel: another clawd-kernel serves "{helper.directory}"; stop it, or use --dir\n'
    assert second.process.wait(20) == 1
    assert second.process.stderr
    second.process.stderr.close()
    with helper.dial() as connection:
        assert ask(connection, b'{"op":"ping"}') == {"op": "pong"}


def test_it_starts_over_what_a_killed_one_left(tmp_path: Path) -> None:
    first = Process(tmp_path / "kernel")
    first.process.kill()
    first.process.wait(20)
    assert first.process.stderr
    first.process.stderr.close()
    second = Process(tmp_path / "kernel")
    assert " ready " in second.first
    assert second.stop()[0] == 0


def test_without_such_a_user_it_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clawd.kernel", "--dir", str(tmp_path), "--user", "nobody-of-that-name"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert run.returncode == 1
    assert run.stderr == (
        'clawd-kernel: there is no user "nobody-of-that-name"; make it with systemd-sysusers, or give --user\n'
    )


def test_clawctl_says_whether_it_is_there_and_why_not(tmp_path: Path, helper: Process) -> None:
    found = ctl_helper.look(helper.directory)
    assert (found["state"], found["reason"]) == ("running", None)
    assert ctl_helper.told(found).startswith("clawd-kernel runs")
    assert ctl_helper.told(found).endswith("; sockets are not shaped: no lane was named")
    absent = ctl_helper.look(tmp_path / "none")
    assert absent == {
        "state": "absent",
        "reason": "it is not running: systemctl enable --now clawd-kernel",
        "abilities": None,
        "shaping": None,
        "boosting": None,
    }
    assert ctl_helper.check_helper(tmp_path / "none").fix == "systemctl enable --now clawd-kernel"
    helper.process.send_signal(signal.SIGSTOP)
    try:
        broken = ctl_helper.look(helper.directory)
        assert (broken["state"], broken["reason"]) == ("broken", "it does not answer: timed out")
    finally:
        helper.process.send_signal(signal.SIGCONT)


def test_what_is_attached_is_told_with_what_is_wrong_of_it() -> None:
    shaping = {"state": "attached", "reason": None, "lanes": 2, "since_ns": None, "is_proved": True, "others": [17, 4],
               "devices": [], "pacers": {}, "ahead": [], "unmarked": None, "policies": [], "missing": [],
               "counters": {"runs": 90, "shaped": 3, "refused": 1, "refused_congestion": 1, "refused_thin": 0,
                            "full": 0}}  # fmt: skip
    assert ctl_helper.told_shaping(shaping) == (
        "shapes sockets of 2 lanes since -: 3 so far, 90 runs, 1 options refused by the kernel: congestion,"
        " programs beside it that may set the same: 17, 4"
    )
    unseen = {**shaping, "is_proved": False, "others": [], "counters": {}}
    assert ctl_helper.told_shaping(unseen).endswith("0 so far, it was not seen to run yet")
    policies = [{"port": 1, "lane": "bulk", "dscp": 0, "congestion": ""},
                {"port": 2, "lane": "express", "dscp": 46, "congestion": "dctcp"}]  # fmt: skip
    lacking = {**unseen, "policies": policies, "missing": ["this kernel has no congestion control dctcp"]}
    assert ctl_helper.told_shaping(lacking).endswith(
        ", express lanes with DSCP ef and congestion control dctcp, this kernel has no congestion control dctcp"
    )
    off = {**shaping, "state": "off", "reason": "no kernel headers\x1b"}
    assert ctl_helper.told_shaping(off) == "sockets are not shaped: no kernel headers?"


@pytest.mark.parametrize(
    ("changed", "flaw"),
    [
        ({}, None),
        ({"state": "off"}, ("info", "systemctl restart clawd-kernel")),
        ({"missing": ["no dctcp"]}, ("warn", "set another congestion")),
        ({"unmarked": "no device has a default route"}, ("warn", "ip route")),
        ({"ahead": ["tcx program 7 of eth0"]}, ("warn", "bpftool net")),
        ({"policies": [], "ahead": ["tcx program 7 of eth0"], "unmarked": "x"}, None),
        ({"is_proved": False}, None),
        ({"is_proved": False, "since_ns": 1}, ("warn", "run clawd in /x")),
        ({"others": [7]}, ("info", "bpftool cgroup")),
    ],
)
def test_the_worst_of_the_shaping_is_found(changed: dict[str, Any], flaw: tuple[str, str] | None) -> None:
    good = {"state": "attached", "cgroup": "/x", "since_ns": time.monotonic_ns(), "is_proved": True, "others": [],
            "ahead": [], "unmarked": None, "missing": [], "policies": [{"lane": "express", "dscp": 46}]}  # fmt: skip
    found = ctl_helper._flaw({**good, **changed}, "info")
    assert (found is None) == (flaw is None)
    if found and flaw:
        assert found[0] == flaw[0]
        assert flaw[1] in found[1]
