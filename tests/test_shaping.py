# SPDX-License-Identifier: Apache-2.0
"""clawd's end of the shaper: rows, loss, wanted pacing, and a clawd-kernel that comes, goes and talks nonsense."""

from __future__ import annotations

import array
import json
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawd import protocol
from clawd.core import Core, Limits, Told
from clawd.errors import ProtocolError
from clawd.server.shaping import PACING_LEAST, Paced, Rows, Shaping, lanes, wanted_pacing
from tests.rig import DEFAULTS

pytestmark = pytest.mark.plain
ENTRIES = 64
ROW = [["cookie", 0, 8], ["pacing", 8, 8], ["srtt_us", 16, 4], ["jitter_us", 20, 4], ["retrans", 24, 4],
       ["segments", 28, 4], ["updated_ns", 32, 8]]  # fmt: skip
ROW_BYTES = 40
WANT = [["cookie", 0, 8], ["pacing", 8, 8]]
TOLD = protocol.SocketRows(ENTRIES, ROW_BYTES, 16, ROW, WANT)
LANE = protocol.SetLane(5710, "express", pacing=10**6)


class Arrays:
    """What the kernel would share."""

    def __init__(self) -> None:
        self.fds = [os.memfd_create("rows"), os.memfd_create("wants")]
        for fd, size in zip(self.fds, (ROW_BYTES, 16), strict=True):
            os.ftruncate(fd, -(-ENTRIES * size // mmap.PAGESIZE) * mmap.PAGESIZE)

    def put(self, slot: int, **values: int) -> None:
        for name, at, size in ROW:
            os.pwrite(self.fds[0], values.get(name, 0).to_bytes(size, "little"), slot * ROW_BYTES + at)

    def wanted(self, slot: int) -> tuple[int, int]:
        data = os.pread(self.fds[1], 16, slot * 16)
        return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")


@pytest.fixture
def arrays() -> Iterator[Arrays]:
    made = Arrays()
    yield made
    for fd in made.fds:
        os.close(fd)


@pytest.fixture
def core() -> Iterator[Core]:
    made = Core(Limits(**DEFAULTS))
    yield made
    made.close()


class Kernel:
    """A clawd-kernel that answers what it is told to."""

    def __init__(self, directory: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(directory / protocol.KERNEL_SOCKET))
        self.listener.listen()
        self.listener.settimeout(20)

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(20)
        return connection


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.listener.close()


def send(connection: socket.socket, message: protocol.Message, fds: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([protocol.encode(message)], rights)


def shaping_state(reason: str | None) -> protocol.Shaping:
    return protocol.Shaping(
        "off" if reason else "attached", reason, "/x", None, False, None, None, 1, [], [], None, [], {}, {}
    )


def test_a_row_is_found_by_cookie_near_its_first_slot(arrays: Arrays) -> None:
    rows = Rows(TOLD, arrays.fds)
    arrays.put(5, cookie=5 + ENTRIES, srtt_us=900)
    arrays.put(6, cookie=5, srtt_us=700, jitter_us=50)
    arrays.put(5 + 8, cookie=5 + 3 * ENTRIES)
    assert rows.find(5 + ENTRIES) == {"cookie": 5 + ENTRIES, "pacing": 0, "srtt_us": 900, "jitter_us": 0, "retrans": 0,
                                      "segments": 0, "updated_ns": 0, "slot": 5}  # fmt: skip
    found = rows.find(5)
    assert found
    assert (found["srtt_us"], found["slot"]) == (700, 6)
    assert rows.find(5 + 2 * ENTRIES) is None
    assert rows.find(5 + 3 * ENTRIES) is None, "further than the kernel puts any"
    rows.close()


def test_wanted_pacing_goes_to_the_sockets_slot(core: Core, arrays: Arrays, tmp_path: Path) -> None:
    shaping = Shaping(core, [LANE], tmp_path)
    shaping.rows = Rows(TOLD, arrays.fds)
    freed: list[int] = []
    way = Paced(shaping, 9, lambda: freed.append(9))
    way.pace(100, 6000)
    assert arrays.wanted(9) == (0, 0), "it has no row"
    arrays.put(10, cookie=9, pacing=5)
    way.pace(100, 6000)
    assert arrays.wanted(10) == (9, 45 * 6000 * 4)
    way.pace(1, 60)
    assert arrays.wanted(10) == (9, PACING_LEAST)
    way.pace(0, 60)
    assert arrays.wanted(10) == (9, 0)
    arrays.put(10, cookie=8)
    way.pace(1, 60)
    assert not freed, "there was no limit"
    arrays.put(10, cookie=9, pacing=PACING_LEAST)
    way.pace(1, 60)
    shaping.close()
    for _ in range(2):
        way.pace(1, 60)
        assert freed == [9], "its row is gone, and once is enough"


def test_express_lanes_go_first_and_thin() -> None:
    bulk, express = lanes([(7400, "bulk"), (7401, "express")], dscp=46, congestion="bbr")
    assert bulk.congestion == express.congestion == "bbr"
    assert (bulk.port, bulk.lane, bulk.lowat, bulk.priority, bulk.dscp, bulk.thin) == (7400, "bulk", 16384, 0, 0, False)
    assert (express.port, express.lane, express.priority, express.dscp, express.thin) == (7401, "express", 6, 46, True)
    for lane in (bulk, express):
        assert protocol.decode(protocol.encode(lane), protocol.KERNEL_REQUESTS, protocol.KERNEL_MESSAGE_MAX) == lane


@pytest.mark.parametrize(("streams", "pacing"), [(0, 0), (1, PACING_LEAST), (1000, 1000 * 45 * 50 * 4)])
def test_pacing_leaves_room_to_catch_up(streams: int, pacing: int) -> None:
    assert wanted_pacing(streams, streams * 50) == pacing


@pytest.mark.parametrize(
    "told",
    [
        protocol.SocketRows(ENTRIES, ROW_BYTES, 16, ROW[1:], WANT),
        protocol.SocketRows(ENTRIES, ROW_BYTES, 16, ROW, WANT[:1]),
        protocol.SocketRows(63, ROW_BYTES, 16, ROW, WANT),
        protocol.SocketRows(ENTRIES, 39, 16, ROW, WANT),
        protocol.SocketRows(ENTRIES, ROW_BYTES, 16, ROW, [["cookie", 0, 8], ["pacing", 12, 8]]),
        protocol.SocketRows(ENTRIES, ROW_BYTES, 16, [["cookie", -8, 8], *ROW[1:]], WANT),
    ],
)
def test_rows_of_another_layout_are_refused(arrays: Arrays, told: protocol.SocketRows) -> None:
    with pytest.raises(ProtocolError, match="of another layout"):
        Rows(told, arrays.fds)


def test_lanes_are_named_and_rows_asked_for_until_there_are_any(
    core: Core, kernel: Kernel, arrays: Arrays, tmp_path: Path
) -> None:
    shaping = Shaping(core, [LANE], tmp_path)
    shaping.poll()
    with kernel.accept() as connection:
        assert json.loads(connection.recv(1000)) == {
            "op": "set_lane", "port": 5710, "lane": "express", "pacing": 10**6, "lowat": 0, "priority": 0, "dscp": 0,
            "thin": False, "congestion": ""}  # fmt: skip
        assert json.loads(connection.recv(1000)) == {"op": "rows"}
        send(connection, shaping_state("its program is being compiled"))
        shaping.poll()
        assert shaping.reason == "its program is being compiled"
        send(connection, protocol.SocketRows(0))
        shaping.poll()
        assert [json.loads(connection.recv(1000))["op"] for _ in range(2)] == ["shape", "rows"]
        shaping.poll()  # one question at a time
        send(connection, shaping_state(None))
        send(connection, TOLD, (arrays.fds[0], arrays.fds[1]))
        before = len(os.listdir("/proc/self/fd"))
        shaping.poll()
        assert (shaping.reason, shaping.rows is not None) == ("", True)
        assert len(os.listdir("/proc/self/fd")) <= before + 2, "mapped, and closed"
        number = core.connect()
        core.open_way(number, 3)
        assert core.look_way(number) is None
        arrays.put(3, cookie=3, srtt_us=1, segments=1000, retrans=50)
        assert core.look_way(number) == 50_000, "the core reads them too"
    shaping.poll()
    assert (shaping.reason, shaping.rows) == ("clawd-kernel ended", None)
    assert core.look_way(number) is None
    assert core.tell_way(number, Told(1, 2, 3, 1200, 50)) == 0
    shaping.poll()
    kernel.accept().close()
    shaping.close()


def test_a_reload_asks_for_what_is_new_and_keeps_the_rows(
    core: Core, kernel: Kernel, arrays: Arrays, tmp_path: Path
) -> None:
    shaping = Shaping(core, lanes([(7401, "express")]), tmp_path)
    shaping.poll()
    with kernel.accept() as connection:
        assert [json.loads(connection.recv(1000))["op"] for _ in range(2)] == ["set_lane", "rows"]
        send(connection, TOLD, (arrays.fds[0], arrays.fds[1]))
        shaping.poll()
        shaping.ask(lanes([(7401, "express")]))  # nothing new
        shaping.ask(lanes([(7401, "express")], dscp=10, congestion="reno"))
        asked = json.loads(connection.recv(1000))
        assert (asked["op"], asked["dscp"], asked["congestion"]) == ("set_lane", 10, "reno")
        send(connection, shaping_state(None))
        shaping.poll()
        assert (shaping.reason, shaping.rows is not None) == ("", True)
    shaping.ask(lanes([(7401, "express")]))  # it has ended
    assert shaping.rows is None
    shaping.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"no json", "message is not JSON"),
        (protocol.encode(protocol.Failure(code="denied", text="only root may")), "only root may"),
        (protocol.encode(protocol.SocketRows(8, ROW_BYTES, 16, ROW, WANT)), "of another layout"),
        (b'{"op":"rows","entries":9999999}', 'has a bad value for "entries"'),
    ],
)
def test_nonsense_ends_the_connection_and_is_told(
    core: Core, kernel: Kernel, tmp_path: Path, answer: bytes, reason: str
) -> None:
    shaping = Shaping(core, [LANE], tmp_path)
    shaping.poll()
    with kernel.accept() as connection:
        connection.send(answer)
        shaping.poll()
        assert reason in shaping.reason
    shaping.close()


@pytest.mark.parametrize(("lanes", "reason"), [([LANE], "clawd-kernel is not running"), ([], "there is no tcp lane")])
def test_without_a_helper_or_a_lane_it_says_so(core: Core, tmp_path: Path, lanes: list[Any], reason: str) -> None:
    shaping = Shaping(core, lanes, tmp_path)
    shaping.poll()
    shaping.poll()
    assert shaping.reason == reason
    shaping.close()
