# SPDX-License-Identifier: Apache-2.0
"""clawd-kernel with the shaper: lanes by request, rows by descriptor, and what is left when either side dies."""

from __future__ import annotations

import array
import json
import mmap
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd import protocol
from clawd.ctl import helper as ctl_helper
from clawd.kernel import bpf, bpfcall
from tests.cgroups import Cgroup, cgroup
from tests.test_bpf_shaper import attached, carry, connected, cookie, pacing, until

pytestmark = [pytest.mark.root, pytest.mark.plain, pytest.mark.usefixtures("bpf")]
NOBODY = 65534


class Helper:
    """A clawd-kernel; `within`: a command before it."""

    def __init__(
        self, directory: Path, group: Cgroup, *, pins: Path | None = None, within: tuple[str, ...] = ()
    ) -> None:
        self.path = directory / protocol.KERNEL_SOCKET
        user = pwd.getpwuid(os.geteuid()).pw_name
        command = [*within, sys.executable, "-m", "clawd.kernel", "--dir", str(directory), "--user", user]
        command += ["--cgroup", str(group.path), "--bpf-dir", str(pins or directory / "none")]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        assert " ready " in (first := self.process.stderr.readline()), first

    def dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(30)
        connection.connect(str(self.path))
        return connection

    def end(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        assert self.process.stderr
        with self.process.stderr as stream:
            text = stream.read()
        self.process.wait(30)
        assert "Traceback" not in text, text
        return text


@pytest.fixture
def helper(tmp_path: Path, group: Cgroup) -> Iterator[Helper]:
    made = Helper(tmp_path / "kernel", group)
    yield made
    made.end()
    assert not attached(group)


def ask(connection: socket.socket, **request: Any) -> dict[str, Any]:
    connection.send(json.dumps(request).encode())
    answer = json.loads(connection.recv(protocol.ANSWER_MAX))
    assert isinstance(answer, dict)
    return answer


def shape(connection: socket.socket, port: int, **policy: Any) -> dict[str, Any]:
    """Name a lane and wait until it is shaped."""
    answer = ask(connection, op="set_lane", port=port, **policy)
    until(lambda: ask(connection, op="shape")["reason"] != "its program is being compiled", "compiled")
    assert answer["op"] == "shaping"
    return ask(connection, op="shape")


def ask_rows(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    connection.send(b'{"op":"rows"}')
    packet, ancillary, _, _ = connection.recvmsg(protocol.ANSWER_MAX, socket.CMSG_SPACE(8))
    fds = array.array("i")
    for _level, _kind, data in ancillary:
        fds.frombytes(data)
    return json.loads(packet), list(fds)


def test_lanes_are_shaped_as_long_as_their_connection(helper: Helper, group: Cgroup) -> None:
    with group.listen() as lane:
        port = lane.getsockname()[1]
        with helper.dial() as connection:
            assert ask(connection, op="shape")["reason"] == "no lane was named"
            state = shape(connection, port, lane="express", pacing=4_000_000, priority=6, congestion="reno")
            assert (state["state"], state["lanes"], "cannot be pinned" in state["unpinned"]) == ("attached", 1, False)
            with connected(lane) as (ours, _):
                assert pacing(ours) == 4_000_000
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
            assert ask(connection, op="shape")["counters"]["shaped"] == 1
        with helper.dial() as connection:  # it has seen the end of the one before
            until(lambda: ask(connection, op="shape")["lanes"] == 0, "the lane is gone")
            with connected(lane) as (ours, _):
                assert pacing(ours) == 2**64 - 1


@pytest.mark.parametrize(
    "request_",
    [
        {"port": 0, "lane": "express"},
        {"port": 65536, "lane": "express"},
        {"port": 7, "lane": "fast"},
        {"port": 7, "lane": "bulk", "priority": 16},
        {"port": 7, "lane": "bulk", "dscp": 64},
        {"port": 7, "lane": "bulk", "pacing": -1},
        {"port": 7, "lane": "bulk", "congestion": "/etc/passwd"},
        {"port": 7, "lane": "bulk", "thin": 1},
        {"port": 7, "lane": "bulk", "path": "/sys/fs/bpf/x"},
        {"port": 7},
    ],
)
def test_what_is_out_of_bounds_is_refused(helper: Helper, request_: dict[str, Any]) -> None:
    with helper.dial() as connection:
        answer = ask(connection, op="set_lane", **request_)
        assert (answer["op"], answer["code"]) == ("error", "bad_request")


def test_no_more_lanes_than_there_is_room_for(helper: Helper) -> None:
    with helper.dial() as connection:
        for port in range(1, 65):
            assert ask(connection, op="set_lane", port=port, lane="bulk")["op"] == "shaping"
        assert ask(connection, op="set_lane", port=64, lane="express")["op"] == "shaping"
        assert ask(connection, op="set_lane", port=65, lane="bulk")["code"] == "limit"


def test_another_user_maps_the_rows_and_asks_for_pacing(helper: Helper, group: Cgroup) -> None:
    with group.listen() as lane, helper.dial() as connection:
        assert ask_rows(connection) == ({"op": "rows", "entries": 0, "row_bytes": 0, "want_bytes": 0, "row": [],
                                         "want": []}, [])  # fmt: skip
        shape(connection, lane.getsockname()[1], lane="express", pacing=9_000_000)
        answer, fds = ask_rows(connection)
        assert len(fds) == 2
        with connected(lane) as (ours, peer):
            want = {name: at for name, at, _ in answer["want"]}
            row = {name: at for name, at, _ in answer["row"]}
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.setgroups([])
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                    rows = mmap.mmap(fds[0], answer["entries"] * answer["row_bytes"], prot=mmap.PROT_READ)
                    wants = mmap.mmap(fds[1], answer["entries"] * answer["want_bytes"])
                    at = [
                        slot
                        for slot in range(answer["entries"])
                        if read(rows, slot * answer["row_bytes"] + row["cookie"], 8) == cookie(ours)
                    ]
                    place = at[0] * answer["want_bytes"]
                    wants[place + want["pacing"] : place + want["pacing"] + 8] = (5_555_555).to_bytes(8, "little")
                    wants[place + want["cookie"] : place + want["cookie"] + 8] = cookie(ours).to_bytes(8, "little")
                    code = len(at) - 1
                finally:
                    os._exit(code)
            assert os.waitpid(pid, 0)[1] == 0
            until(lambda: carry(ours, peer, 1000) and pacing(ours) == 5_555_555, "pacing as wanted")
        for fd in fds:
            os.close(fd)


def read(memory: mmap.mmap, at: int, size: int) -> int:
    return int.from_bytes(memory[at : at + size], "little")


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[tuple[tuple[str, ...], Path]]:
    """A mount namespace with a BPF file system: the command to enter it, and where that is."""
    pins = tmp_path / "bpf"
    pins.mkdir()
    script = f"mount -t bpf -o mode=0700 bpf {pins} && echo up && exec sleep 600"
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "up\n"
    yield ("nsenter", "-t", str(holder.pid), "-m"), pins
    holder.kill()
    holder.stdout.close()
    holder.wait(30)


def within(entry: tuple[str, ...], *command: str) -> str:
    return subprocess.run([*entry, *command], capture_output=True, text=True, check=True).stdout


def test_a_killed_helper_leaves_shaping_in_force_and_the_next_sweeps_it(
    tmp_path: Path, group: Cgroup, namespace: tuple[tuple[str, ...], Path]
) -> None:
    entry, pins = namespace
    with group.listen() as lane:
        first = Helper(tmp_path / "kernel", group, pins=pins, within=entry)
        with first.dial() as connection:
            assert shape(connection, lane.getsockname()[1], lane="bulk", pacing=4_000_000)["unpinned"] is None
            first.end(signal.SIGKILL)
        left = attached(group)
        assert len(left) == 1
        assert within(entry, "ls", str(pins / "clawd")).split() == ["shaper-link", "shaper-policies", "shaper-rows"]
        with connected(lane) as (ours, _):
            assert pacing(ours) == 4_000_000
        within(entry, "mkdir", str(pins / "others"), str(pins / "clawd" / "others"))
        second = Helper(tmp_path / "kernel", group, pins=pins, within=entry)
        with second.dial() as connection:
            shape(connection, lane.getsockname()[1], lane="bulk", pacing=3_000_000)
            assert len(attached(group)) == 1
            assert attached(group) != left
            with connected(lane) as (ours, _):
                assert pacing(ours) == 3_000_000
        second.end()
        assert not attached(group)
        assert within(entry, "ls", str(pins / "clawd")).split() == ["others"]
        within(entry, "test", "-d", str(pins / "others"))  # raises where it is not


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_a_killed_helper_left_ends_with_one_that_nobody_names_a_lane(
    tmp_path: Path, group: Cgroup, namespace: tuple[tuple[str, ...], Path], is_stopped: bool
) -> None:
    entry, pins = namespace
    first = Helper(tmp_path / "kernel", group, pins=pins, within=entry)
    with first.dial() as connection:
        shape(connection, 7, lane="bulk", pacing=4_000_000)
        first.end(signal.SIGKILL)
    assert len(attached(group)) == 1
    second = Helper(tmp_path / "kernel", group, pins=pins, within=entry)
    try:
        if not is_stopped:
            until(lambda: not attached(group), "swept by itself")
    finally:
        second.end()
    assert not attached(group)
    assert "clawd" not in within(entry, "ls", str(pins)).split()


def test_a_second_helper_leaves_what_the_first_pinned(
    tmp_path: Path, group: Cgroup, namespace: tuple[tuple[str, ...], Path]
) -> None:
    entry, pins = namespace
    with cgroup("-second") as other:
        first = Helper(tmp_path / "first", group, pins=pins, within=entry)
        second = Helper(tmp_path / "second", other, pins=pins, within=entry)
        try:
            with first.dial() as connection, second.dial() as beside:
                assert shape(connection, 7, lane="bulk")["unpinned"] is None
                before = within(entry, "ls", "-i", str(pins / "clawd"))
                state = shape(beside, 8, lane="bulk")
                assert state["state"] == "attached"
                assert state["unpinned"] == f'another clawd-kernel has "{pins}/clawd"; it ends with clawd-kernel'
                second.end()
                assert within(entry, "ls", "-i", str(pins / "clawd")) == before
                assert len(attached(group)) == 1
        finally:
            for each in (first, second):
                if each.process.returncode is None:
                    each.end()
        assert "clawd" not in within(entry, "ls", str(pins)).split()


def test_pins_in_a_directory_that_others_may_write_are_refused(
    tmp_path: Path, group: Cgroup, namespace: tuple[tuple[str, ...], Path]
) -> None:
    entry, pins = namespace
    within(entry, "sh", "-c", f"mkdir {pins}/clawd && chmod 777 {pins}/clawd")
    made = Helper(tmp_path / "kernel", group, pins=pins, within=entry)
    with made.dial() as connection:
        state = shape(connection, 7, lane="bulk")
        assert state["state"] == "attached"
        assert "is not for root alone" in state["unpinned"]
    made.end()
    assert not attached(group)


def test_a_helper_killed_where_nothing_is_pinned_leaves_nothing(tmp_path: Path, group: Cgroup) -> None:
    made = Helper(tmp_path / "kernel", group)
    with made.dial() as connection:
        assert shape(connection, 7, lane="bulk")["state"] == "attached"
        made.end(signal.SIGKILL)
    until(lambda: not attached(group), "detached")


def test_where_it_cannot_load_it_says_why_and_serves_on(tmp_path: Path) -> None:
    made = Helper(tmp_path / "kernel", Cgroup(Path("/proc")))
    with made.dial() as connection:
        state = shape(connection, 7, lane="bulk")
        assert state["state"] == "off"
        assert state["reason"].startswith('cannot attach to "/proc"')
        assert ask(connection, op="ping") == {"op": "pong"}
    assert "no shaping" in made.end()


def test_status_and_doctor_say_what_is_attached(helper: Helper, group: Cgroup) -> None:
    directory = helper.path.parent
    with group.listen() as lane, helper.dial() as connection:
        shape(connection, lane.getsockname()[1], lane="express", pacing=4_000_000)
        with connected(lane):
            found = ctl_helper.look(directory)
            assert "shapes sockets of 1 lanes since" in ctl_helper.told(found)
            assert found["shaping"]["counters"]["shaped"] == 1
            assert ctl_helper.check_helper(directory).fix is None
        with shaping_beside(group) as number:
            finding = ctl_helper.check_helper(directory)
            assert f"may set the same: {number}" in finding.what
            assert finding.fix == "see who attached them: bpftool cgroup tree effective"


@contextmanager
def shaping_beside(group: Cgroup) -> Iterator[int]:
    """Another program on the same group: its id."""
    loaded = bpf.load("shaper.bpf.c", {"claw_sockops": "SOCK_OPS"}, ["-DCLAW_ROWS=8"])
    fd = os.open(group.path, os.O_RDONLY)
    link = bpfcall.attach(loaded.programs["claw_sockops"], fd, bpfcall.SOCK_OPS)
    try:
        yield bpfcall.program_id(loaded.programs["claw_sockops"])
    finally:
        os.close(link)
        os.close(fd)
        loaded.close()
