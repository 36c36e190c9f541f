# SPDX-License-Identifier: Apache-2.0
"""The classifier at a device's egress: marks the lane that asks for it, and is one among others."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from clawd.ctl import helper as ctl_helper
from clawd.server.shaping import lanes
from tests import net
from tests.cgroups import Cgroup
from tests.net import Net
from tests.test_bpf_helper import Helper, ask, shape
from tests.test_bpf_shaper import until
from tests.veth import FAR, NEAR, Side, link

pytestmark = [pytest.mark.root, pytest.mark.plain, pytest.mark.usefixtures("bpf")]
T = TypeVar("T")
EF = 46
NEVER = "1,6 0 0 0,"
"""A program of the classic kind, which matches nothing."""


class Place(Protocol):
    """Where a test's sockets are made."""

    def make(self, what: Callable[[], T]) -> T: ...


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with link() as (near, far):
        near.run(f"ip route add default via {FAR}")
        yield near, far


def inside(side: Side) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{side.holder.pid}/ns/net")


def filters(side: Side) -> list[tuple[int, str, str]]:
    rows = json.loads(side.run("tc -j filter show dev near egress"))
    found = [(row["pref"], row["kind"], row["options"].get("bpf_name", "")) for row in rows if "handle" in
             row.get("options", {})]  # fmt: skip
    return sorted(found)


def other(side: Side, prio: int, handle: int) -> None:
    """Somebody else's filter."""
    words = f"tc filter add dev near egress prio {prio} handle {handle} protocol all bpf bytecode".split()
    subprocess.run([*inside(side), *words, NEVER], check=True)


@contextmanager
def lane(group: Cgroup, near: Place, address: str = NEAR) -> Iterator[socket.socket]:
    with group.entered():
        listener = near.make(lambda: socket.create_server((address, 0)))
    with listener:
        yield listener


def seen_tos(listener: socket.socket, far: Place) -> set[int]:
    """Of the packets with data that the far side gets."""
    with sniffing(far) as sniffed:
        talk(listener, far)
        return sniffed(listener.getsockname()[1])


def talk(listener: socket.socket, far: Place) -> None:
    """Five tokens to a client there."""
    peer = far.make(lambda: socket.create_connection(listener.getsockname(), 20))
    with peer:
        ours, _ = listener.accept()
        with ours:
            for number in range(5):
                ours.send(b"token %d" % number)
                assert peer.recv(100)
            ours.shutdown(socket.SHUT_WR)
            assert peer.recv(100) == b""


@contextmanager
def sniffing(far: Place) -> Iterator[Callable[[int], set[int]]]:
    """What packets with data came there from a port: their TOS byte."""
    sniffer = far.make(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP))
    found: list[tuple[int, int]] = []

    def sniffed(port: int) -> set[int]:
        while True:
            try:
                packet = sniffer.recv(2000)
            except BlockingIOError:
                return {tos for origin, tos in found if origin == port}
            header = (packet[0] & 15) * 4
            assert checksum(packet[:header]) == 0, "the header's checksum is wrong"
            if len(packet) > header + (packet[header + 12] >> 4) * 4:
                found.append((struct.unpack_from("!H", packet, header)[0], packet[1]))

    with sniffer:
        sniffer.setblocking(False)
        yield sniffed


def checksum(header: bytes) -> int:
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


@contextmanager
def helping(
    tmp_path: Path, group: Cgroup, near: Side | None, entry: tuple[str, ...] = ()
) -> Iterator[tuple[Helper, socket.socket]]:
    tmp_path.mkdir(exist_ok=True)
    made = Helper(tmp_path / "kernel", group, within=inside(near) if near else entry)
    try:
        with made.dial() as connection:
            yield made, connection
    finally:
        made.end()


def test_the_express_lane_is_marked_and_the_other_is_not(
    tmp_path: Path, group: Cgroup, sides: tuple[Side, Side]
) -> None:
    near, far = sides
    with lane(group, near) as express, lane(group, near) as bulk, helping(tmp_path, group, near) as (_, connection):
        shape(connection, bulk.getsockname()[1], lane="bulk", priority=2)
        assert filters(near) == []
        state = shape(connection, express.getsockname()[1], lane="express", priority=6, dscp=EF)
        assert (state["devices"], state["unmarked"], state["ahead"]) == (["near"], None, [])
        assert state["pacers"] == {"near": "tcp"}
        assert seen_tos(express, far) == {EF << 2}
        assert seen_tos(bulk, far) == {0}
    assert filters(near) == []
    assert "clsact" in near.run("tc qdisc show dev near"), "others may use it by now"


def test_others_filters_stay_and_are_told(tmp_path: Path, group: Cgroup, sides: tuple[Side, Side]) -> None:
    near, far = sides
    near.run("tc qdisc add dev near clsact")
    other(near, 7, 1)
    assert [row[:2] for row in filters(near)] == [(7, "bpf")]
    with lane(group, near) as express, helping(tmp_path, group, near) as (helper, connection):
        state = shape(connection, express.getsockname()[1], lane="express", dscp=EF)
        assert state["ahead"] == ["filter bpf at prio 7 of near"]
        assert "before it come filter bpf at prio 7 of near" in ctl_helper.told(ctl_helper.look(helper.path.parent))
        assert [row[:2] for row in filters(near)] == [(7, "bpf"), (0xC1A0, "bpf")]
        assert seen_tos(express, far) <= {EF << 2, 0}
    assert [row[:2] for row in filters(near)] == [(7, "bpf")]


def test_what_a_killed_helper_left_is_swept(tmp_path: Path, group: Cgroup, sides: tuple[Side, Side]) -> None:
    near, _far = sides
    first = Helper(tmp_path / "kernel", group, within=inside(near))
    with first.dial() as connection:
        shape(connection, 7, lane="express", dscp=EF)
        first.end(signal.SIGKILL)
    assert len(filters(near)) == 1
    with helping(tmp_path, group, near) as (_, connection):
        shape(connection, 7, lane="bulk")
        assert filters(near) == []


def test_a_second_helper_leaves_the_firsts_filter(tmp_path: Path, group: Cgroup, sides: tuple[Side, Side]) -> None:
    near, _far = sides
    with helping(tmp_path, group, near) as (first, connection):
        assert shape(connection, 7, lane="express", dscp=EF)["devices"] == ["near"]
        before = filters(near)
        with helping(tmp_path / "beside", group, near) as (_, beside):
            state = shape(beside, 8, lane="express", dscp=EF)
            # nsenter became it
            assert state["unmarked"] == f'another clawd-kernel, process {first.process.pid}, marks at "near"'
            assert state["devices"] == []
        assert filters(near) == before
        assert len(before) == 1
    assert filters(near) == []


def test_a_place_that_somebody_has_is_left_to_him(tmp_path: Path, group: Cgroup, sides: tuple[Side, Side]) -> None:
    near, _far = sides
    near.run("tc qdisc add dev near clsact")
    other(near, 0xC1A0, 0xC1A)
    with helping(tmp_path, group, near) as (_, connection):
        state = shape(connection, 7, lane="express", dscp=EF)
        assert state["devices"] == []
        assert state["unmarked"] == f'a filter of somebody else is at prio {0xC1A0} of "near"'
    assert [row[:2] for row in filters(near)] == [(0xC1A0, "bpf")]


TCX = """
import os, socket, sys
from clawd.kernel import bpf, bpfcall
loaded = bpf.load("shaper.bpf.c", {"claw_egress": "SCHED_CLS"}, ["-DCLAW_ROWS=8"])
link = bpfcall.attach(loaded.programs["claw_egress"], socket.if_nametoindex("near"), bpfcall.TCX_EGRESS)
print(bpfcall.program_id(loaded.programs["claw_egress"]), flush=True)
sys.stdin.read()
"""


def test_a_tcx_program_is_told(tmp_path: Path, group: Cgroup, sides: tuple[Side, Side]) -> None:
    near, far = sides
    command: list[Any] = [*inside(near), sys.executable, "-c", TCX]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin
    assert other.stdout
    number = other.stdout.readline().strip()
    try:
        with lane(group, near) as express, helping(tmp_path, group, near) as (_, connection):
            state = shape(connection, express.getsockname()[1], lane="express", dscp=EF)
            assert state["ahead"] == [f"tcx program {number} of near"]
            assert seen_tos(express, far) == {EF << 2}
        assert other.poll() is None
    finally:
        other.stdin.close()
        other.wait(20)
        other.stdout.close()


def test_without_a_way_out_it_says_so(tmp_path: Path, group: Cgroup) -> None:
    with link() as (near, _far), helping(tmp_path, group, near) as (_, connection):
        assert shape(connection, 7, lane="express", dscp=EF)["unmarked"] == "no device has a default route"


HTB = """
import sys
from clawd.kernel import netns, tc
from clawd.kernel.change import Place
tc.Queues().write(Place(tc.KIND, "near", netns.current().cookie, tc.find_device("near").identity), "htb 80000000 30")
"""


def sent_by(side: Side, group: str) -> int:
    """Bytes that a class of near's queue let go."""
    told = side.run(f"tc -s class show dev near classid {group}")
    return int(re.search(rf"class htb {group} .*\n Sent (\d+) bytes", told)[1])  # type: ignore[index]


def test_the_express_lane_goes_to_the_express_class_of_the_profiles_htb(
    tmp_path: Path, group: Cgroup, sides: tuple[Side, Side]
) -> None:
    near, far = sides
    with (
        lane(group, near) as express,
        lane(group, near) as bulk,
        helping(tmp_path, group, near) as (helper, connection),
    ):
        ports = [(bulk.getsockname()[1], "bulk"), (express.getsockname()[1], "express")]
        for asked in lanes(ports):
            wanted = asdict(asked)
            state = shape(connection, wanted.pop("port"), **wanted)
        assert state["devices"] == []
        subprocess.run([*inside(near), sys.executable, "-c", HTB], check=True)
        until(lambda: ask(connection, op="shape")["classes"] == {"near": "c1a0:10"}, "the class is found")
        line = ctl_helper.told(ctl_helper.look(helper.path.parent))
        assert "express packets go to class c1a0:10 of near" in line
        talk(express, far)
        first, rest = sent_by(near, "c1a0:10"), sent_by(near, "c1a0:20")
        assert first > 5 * 52, "all of it but the handshake, whose socket is none yet"
        talk(bulk, far)
        assert sent_by(near, "c1a0:10") == first
        assert sent_by(near, "c1a0:20") - rest > 5 * 52
        near.run("tc qdisc del dev near root")
        until(lambda: ask(connection, op="shape")["classes"] == {}, "the class is gone")


@dataclass
class End:
    """One end of a link without Ethernet headers."""

    way: Net
    near: bool

    def make(self, what: Callable[[], T]) -> T:
        return self.way.there(what, near=self.near)


@pytest.mark.skipif(bool(net.reason()), reason=net.reason() or "can")
def test_a_device_without_ethernet_headers_is_marked_too(tmp_path: Path, group: Cgroup, seed: int) -> None:
    with Net(seed) as way:
        near, far = End(way, near=True), End(way, near=False)
        near.make(lambda: subprocess.run(["ip", "route", "add", "default", "dev", "clawd0"], check=True))
        entry = ("nsenter", f"--net={way._near}")
        with lane(group, near, net.NEAR) as express, helping(tmp_path, group, None, entry) as (_, connection):
            state = shape(connection, express.getsockname()[1], lane="express", dscp=EF)
            assert state["devices"] == ["clawd0"]
            assert seen_tos(express, far) == {EF << 2}
            counters = ask(connection, op="shape")["counters"]
            assert counters["marked"] >= 5
            assert counters["unmarkable"] == 0
