# SPDX-License-Identifier: Apache-2.0
"""The shaper in this kernel: what it does to sockets of its cgroup and lanes, and that it leaves all others alone."""

from __future__ import annotations

import mmap
import os
import re
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd.errors import HostError
from clawd.kernel import bpf, bpfcall
from clawd.kernel.shaper import Policy, Shaper
from tests.cgroups import Cgroup, cgroup

pytestmark = [pytest.mark.root, pytest.mark.plain, pytest.mark.usefixtures("bpf")]

PACING = (socket.SOL_SOCKET, 47)
PRIORITY = (socket.SOL_SOCKET, socket.SO_PRIORITY)
LOWAT = (socket.IPPROTO_TCP, 25)
THIN = (socket.IPPROTO_TCP, 16)
CONGESTION = (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
SOME = Policy(lane=2, pacing=20_000_000, lowat=16384, priority=5, thin=1, congestion=b"reno")
UNPACED = 2**64 - 1


@contextmanager
def shaping(group: Cgroup, lanes: dict[int, Policy], **how: Any) -> Iterator[Shaper]:
    shaper = Shaper(group.path, **how)
    for port, policy in lanes.items():
        shaper.set_lane(port, policy)
    try:
        assert shaper.wait(60), shaper.state()
        yield shaper
    finally:
        shaper.close()
        assert not attached(group), "it left its program behind"


def attached(group: Cgroup) -> list[int]:
    fd = os.open(group.path, os.O_RDONLY)
    try:
        return bpfcall.programs_at(fd, bpfcall.SOCK_OPS)
    finally:
        os.close(fd)


class Rows:
    def __init__(self, shaper: Shaper) -> None:
        maps = shaper.maps()
        assert maps
        self.row, self.want = maps
        self.rows = bpfcall.mapped(self.row)
        self.wants = bpfcall.mapped(self.want, is_written=True)

    def all(self) -> dict[int, dict[str, int]]:
        size = self.row.value_size
        found = [bpfcall.unpack(self.row, self.rows[at * size : (at + 1) * size]) for at in range(self.row.entries)]
        return {row["cookie"]: {**row, "slot": slot} for slot, row in enumerate(found) if row["cookie"]}

    def of(self, connection: socket.socket) -> dict[str, int]:
        return self.all()[cookie(connection)]

    def ask(self, slot: int, **values: int) -> None:
        at = slot * self.want.value_size
        self.wants[at : at + self.want.value_size] = bpfcall.packed(self.want, values)


def cookie(connection: socket.socket) -> int:
    return int(struct.unpack("Q", connection.getsockopt(socket.SOL_SOCKET, 57, 8))[0])


def pacing(connection: socket.socket) -> int:
    return int(struct.unpack("Q", connection.getsockopt(*PACING, 8))[0])


@contextmanager
def connected(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The accepted socket and its peer."""
    with socket.create_connection(listener.getsockname()) as peer:
        ours, _ = listener.accept()
        with ours:
            yield ours, peer


def until(is_so: Any, what: str) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end, f"not within 20 s: {what}"
        select.select([], [], [], 0.005)


def carry(ours: socket.socket, peer: socket.socket, size: int) -> float:
    """Seconds until the peer has `size` bytes."""
    began = time.monotonic()
    sender = threading.Thread(target=ours.sendall, args=(bytes(size),))
    sender.start()
    left = size
    while left:
        left -= len(peer.recv(1 << 16))
    sender.join()
    return time.monotonic() - began


def test_the_kernel_has_what_the_lane_asks_for(group: Cgroup) -> None:
    with group.listen() as lane, shaping(group, {lane.getsockname()[1]: SOME}), connected(lane) as (ours, peer):
        assert [ours.getsockopt(*option) for option in (PRIORITY, LOWAT, THIN)] == [5, 16384, 1]
        assert pacing(ours) == 20_000_000
        assert ours.getsockopt(*CONGESTION, 16).rstrip(b"\0") == b"reno"
        assert pacing(peer) == UNPACED


def test_what_is_no_lane_is_left_alone(group: Cgroup) -> None:
    with group.listen() as lane, group.listen() as other, socket.create_server(("127.0.0.1", 0)) as outside:
        ports = {each.getsockname()[1]: SOME for each in (lane, outside)}
        with shaping(group, ports) as shaper:
            for listener in (other, outside):  # another port of this cgroup; a lane's port of another cgroup
                with connected(listener) as (ours, _):
                    assert (pacing(ours), ours.getsockopt(*PRIORITY)) == (UNPACED, 0)
            with group.entered(), socket.socket() as caller:  # a lane's number, where it was only called from
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                caller.bind(("127.0.0.2", lane.getsockname()[1]))
                caller.connect(outside.getsockname())
                assert pacing(caller) == UNPACED
            assert shaper.counters()["shaped"] == 0
            assert shaper.counters()["runs"] > 0


def test_pacing_limits(group: Cgroup) -> None:
    size = 3_000_000
    with group.listen() as lane:
        with connected(lane) as (ours, peer):
            free_s = carry(ours, peer, size)
        with shaping(group, {lane.getsockname()[1]: Policy(1, pacing=5_000_000)}), connected(lane) as (ours, peer):
            paced_s = carry(ours, peer, size)
    assert 0.4 < paced_s < 2.0, f"{size / paced_s:.0f} bytes/s of 5000000"
    assert paced_s > 5 * free_s, f"{paced_s:.3f} s paced, {free_s:.3f} s without"


def test_rows_tell_what_ss_tells_and_end_with_their_socket(group: Cgroup) -> None:
    with group.listen() as lane, shaping(group, {lane.getsockname()[1]: SOME}) as shaper:
        rows = Rows(shaper)
        with connected(lane) as (ours, peer):
            carry(ours, peer, 2_000_000)
            until(lambda: rows.of(ours)["bytes_acked"] > 1_000_000, "acknowledged")
            port = lane.getsockname()[1]
            told = subprocess.run(
                ["ss", "-tinH", f"sport = :{port}"], capture_output=True, text=True, check=True
            ).stdout
            row = rows.of(ours)
            assert (row["port"], row["lane"], row["pacing"], row["refused"]) == (port, 2, 20_000_000, 0)
            srtt_ms, _ = map(float, re.search(r"rtt:([\d.]+)/([\d.]+)", told).groups())  # type: ignore[union-attr]
            assert abs(row["srtt_us"] - srtt_ms * 1000) <= max(2000, srtt_ms * 500), told
            segments = int(re.search(r"segs_out:(\d+)", told)[1])  # type: ignore[index]
            assert abs(row["segments"] - segments) <= 30, (row, told)
            assert row["retrans"] == 0
        until(lambda: not rows.all(), "rows gone with their socket")
        counters = shaper.counters()
        assert (counters["shaped"], counters["ended"], counters["full"]) == (1, 1, 0)


def test_a_prime_number_of_sockets_is_counted(group: Cgroup) -> None:
    with group.listen() as lane, shaping(group, {lane.getsockname()[1]: SOME}) as shaper:
        for _ in range(53):
            with connected(lane) as (ours, peer):
                ours.send(b"token")
                assert peer.recv(10) == b"token"
        until(lambda: shaper.counters()["ended"] == 53, "all 53 ended")
        assert shaper.counters()["shaped"] == 53
        assert not Rows(shaper).all()


def test_the_pacing_that_clawd_wants_is_taken_up(group: Cgroup) -> None:
    with group.listen() as lane, shaping(group, {lane.getsockname()[1]: SOME}) as shaper:
        rows = Rows(shaper)
        with connected(lane) as (ours, peer):
            slot = rows.of(ours)["slot"]
            rows.ask(slot, cookie=cookie(ours) + 1, pacing=111_111)  # of a socket that was here before
            carry(ours, peer, 500_000)
            assert pacing(ours) == 20_000_000
            rows.ask(slot, cookie=cookie(ours), pacing=3_333_333)
            until(lambda: carry(ours, peer, 1000) and pacing(ours) == 3_333_333, "pacing as wanted")
            rows.ask(slot, cookie=cookie(ours), pacing=0)
            until(lambda: carry(ours, peer, 1000) and pacing(ours) >= 2**32 - 1, "unpaced as wanted")
            assert shaper.counters()["repaced"] == 2


def test_sockets_without_room_are_shaped_and_counted(group: Cgroup) -> None:
    with group.listen() as lane, shaping(group, {lane.getsockname()[1]: SOME}, rows=8) as shaper:
        kept = []
        for _ in range(11):
            kept.append(socket.create_connection(lane.getsockname()))
            kept.append(lane.accept()[0])
        assert [pacing(ours) for ours in kept[1::2]] == [20_000_000] * 11
        assert (shaper.counters()["shaped"], shaper.counters()["full"]) == (8, 3)
        assert len(Rows(shaper).all()) == 8
        for connection in kept:
            connection.close()
        until(lambda: not Rows(shaper).all(), "room again")
        with connected(lane) as (ours, _):
            assert Rows(shaper).of(ours)["lane"] == 2


def test_a_socket_older_than_the_shaper_has_no_row(group: Cgroup) -> None:
    with (
        group.listen() as lane,
        connected(lane) as (ours, peer),
        shaping(group, {lane.getsockname()[1]: SOME}) as shaper,
    ):
        carry(ours, peer, 100_000)
        assert (pacing(ours), shaper.counters()["shaped"]) == (UNPACED, 0)
        assert shaper.state().unshaped == 1
        with connected(lane) as (later, _):
            assert pacing(later) == 20_000_000
            assert shaper.state().unshaped == 1
        ours.close()
        assert shaper.state().unshaped == 0


def test_a_next_shaper_takes_up_the_sockets_of_one_before(group: Cgroup) -> None:
    with group.listen() as lane:
        lanes = {lane.getsockname()[1]: SOME}
        with shaping(group, lanes):
            peer = socket.create_connection(lane.getsockname())
            ours, _ = lane.accept()
        with peer, ours, shaping(group, lanes) as shaper:
            until(lambda: carry(ours, peer, 1000) and Rows(shaper).all(), "a row again")
            assert Rows(shaper).of(ours)["pacing"] == 20_000_000


def test_a_next_shaper_ends_the_pacing_that_was_wanted_of_one_before(group: Cgroup) -> None:
    with group.listen() as lane:
        lanes = {lane.getsockname()[1]: Policy(2, lowat=16384)}
        with shaping(group, lanes) as first:
            peer = socket.create_connection(lane.getsockname())
            ours, _ = lane.accept()
            Rows(first).ask(Rows(first).of(ours)["slot"], cookie=cookie(ours), pacing=3_333_333)
            until(lambda: carry(ours, peer, 1000) and pacing(ours) == 3_333_333, "pacing as wanted")
        with peer, ours, shaping(group, lanes) as shaper:
            until(lambda: carry(ours, peer, 1000) and Rows(shaper).all(), "a row again")
            assert Rows(shaper).of(ours)["pacing"] == 0
            assert pacing(ours) >= 2**32 - 1, "as its row says"


def test_a_refused_option_is_told(group: Cgroup) -> None:
    policy = Policy(1, priority=6, congestion=b"no-such-thing")
    with (
        group.listen() as lane,
        shaping(group, {lane.getsockname()[1]: policy}) as shaper,
        connected(lane) as (ours, _),
    ):
        assert ours.getsockopt(*PRIORITY) == 6
        assert Rows(shaper).of(ours)["refused"] == 16
        assert shaper.counters()["refused"] == 1


def test_other_programs_run_beside_it_and_are_told(group: Cgroup) -> None:
    other = bpf.load("shaper.bpf.c", {"claw_sockops": "SOCK_OPS"}, ["-DCLAW_ROWS=8"])
    fd = os.open(group.path, os.O_RDONLY)
    link = bpfcall.attach(other.programs["claw_sockops"], fd, bpfcall.SOCK_OPS)
    mine = bpfcall.program_id(other.programs["claw_sockops"])
    try:
        shaper = Shaper(group.path)
        with group.listen() as lane:
            shaper.set_lane(lane.getsockname()[1], SOME)
            assert shaper.wait(60)
            with connected(lane) as (ours, _):
                assert pacing(ours) == 20_000_000
            assert mine in shaper.state().others
            assert bpfcall.Table(other.maps["counters"]).total(0) > 0
        shaper.close()
        assert bpfcall.programs_at(fd, bpfcall.SOCK_OPS) == [mine]
    finally:
        os.close(link)
        os.close(fd)
        other.close()


def test_it_says_that_it_runs_and_since_when(group: Cgroup) -> None:
    with group.entered(), shaping(group, {7: SOME}) as shaper:
        state = shaper.state()
    assert (state.state, state.reason, state.is_proved, state.lanes) == ("attached", None, True, 1)
    assert 0 < time.monotonic_ns() - (state.since_ns or 0) < 60 * 10**9
    assert state.headers


def test_what_runs_ahead_and_not_being_seen_is_in_the_journal_once(
    group: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawd.kernel.shaper.LOOK_NS", 0)
    monkeypatch.setattr("clawd.kernel.shaper.PROOF_NS", 0)
    told: list[tuple[str, object]] = []
    monkeypatch.setattr("clawd.kernel.shaper.log.warning", lambda what, **rest: told.append((what, rest["reason"])))
    ahead = ["filter bpf at prio 7 of eth0"]
    with shaping(group, {7: SOME}) as shaper:
        monkeypatch.setattr(shaper._egress, "follow", lambda *_what, **_how: None)
        monkeypatch.setattr(shaper._egress, "ahead", lambda: ahead)
        for _ in range(3):
            shaper.look()
        expected = [
            ("shaper not seen to run", str(group.path)),
            ("others run before the classifier", "filter bpf at prio 7 of eth0"),
        ]
        assert told == expected
        ahead.append("tcx program 4 of eth0")
        shaper.look()
        assert told[2:] == [("others run before the classifier", ", ".join(ahead))]


def test_a_cgroup_that_was_made_anew_is_noticed() -> None:
    with cgroup("-old") as old:
        shaper = Shaper(old.path)
        shaper.set_lane(7, SOME)
        assert shaper.wait(60)
        old.path.rmdir()
        old.path.mkdir()
        assert "another than the one attached to" in (shaper.state().reason or "")
        shaper.close()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/sys/fs/cgroup/none-of-that-name", "No such file"), ("/tmp", "Invalid argument|Bad file descriptor")],
)
def test_where_there_is_no_such_cgroup_the_reason_is_named(path: str, reason: str) -> None:
    shaper = Shaper(Path(path))
    shaper.set_lane(7, SOME)
    assert not shaper.wait(60)
    state = shaper.state()
    assert state.state == "off"
    assert re.search(reason, state.reason or ""), state.reason
    assert shaper.maps() is None
    shaper.close()


def test_what_could_not_be_loaded_is_tried_again_with_the_next_lane(group: Cgroup) -> None:
    reasons = ["no kernel headers"]

    def load(*what: Any) -> bpf.Loaded:
        if reasons:
            raise HostError(reasons.pop())
        return bpf.load(*what)

    shaper = Shaper(group.path, load=load)
    shaper.set_lane(7, SOME)
    assert not shaper.wait(60)
    assert shaper.state().reason == "no kernel headers"
    shaper.set_lane(7, SOME)
    assert shaper.wait(60), "put right"
    shaper.close()


def test_a_map_cannot_be_read_beyond_its_end(group: Cgroup) -> None:
    with shaping(group, {7: SOME}, rows=64) as shaper:
        maps = shaper.maps()
        assert maps
        with pytest.raises(OSError, match="Invalid"):
            mmap.mmap(maps[0].fd, 64 * maps[0].value_size + 2 * mmap.PAGESIZE)


def test_programs_that_do_not_compile_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.bpf.c").write_text("int f(void *ctx) { return nothing; }\n")
    with pytest.raises(HostError, match=r"^bad\.bpf\.c: .*error: use of undeclared identifier 'nothing'$"):
        bpf.load("bad.bpf.c", {"f": "SOCK_OPS"}, sources=tmp_path)
    (tmp_path / "wild.bpf.c").write_text("int f(struct bpf_sock_ops *ctx) { return *(volatile int *)8; }\n")
    with pytest.raises(HostError, match=r"^wild\.bpf\.c: [^\n]*$"):
        bpf.load("wild.bpf.c", {"f": "SOCK_OPS"}, sources=tmp_path)
    with pytest.raises(HostError, match="there is no"):
        bpf.load("none.bpf.c", {}, sources=tmp_path)
