# SPDX-License-Identifier: Apache-2.0
"""clawd's tcp lanes with clawd-kernel beside it: both programs, a real client on another host, rows that both read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawd import protocol
from clawd.producer import Producer
from clawd.server.shaping import PACING_LEAST, PRIORITY, Rows
from tests import net
from tests.cgroups import Cgroup, cgroup, why_no_bpf
from tests.daemon import PATIENCE_S, until
from tests.net import PORT, Net
from tests.test_bpf_helper import Helper, ask, ask_rows
from tests.test_tcp import site

pytestmark = [pytest.mark.root, pytest.mark.plain, pytest.mark.skipif(bool(net.reason()), reason=net.reason() or "can")]


@pytest.fixture(autouse=True)
def _can_load() -> None:
    if why_no_bpf():
        pytest.skip(why_no_bpf())


@pytest.fixture
def way(seed: int) -> Iterator[Net]:
    with Net(seed) as made:
        yield made


@pytest.fixture
def group() -> Iterator[Cgroup]:
    with cgroup() as made:
        yield made


@pytest.fixture
def helper(tmp_path: Path, group: Cgroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    directory = tmp_path / "kernel"
    monkeypatch.setenv("CLAWD_KERNEL_DIR", str(directory))
    made = Helper(directory, group)
    yield made
    if made.process.returncode is None:
        made.end()


class Shown:
    """The rows, as anybody whom clawd-kernel hands them sees them."""

    def __init__(self, helper: Helper) -> None:
        self._connection = helper.dial()
        told, fds = ask_rows(self._connection)
        told.pop("op")
        self._told = protocol.SocketRows(**told)
        self._rows = Rows(self._told, fds)
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        self._rows.close()
        self._connection.close()

    def of(self, port: int) -> dict[str, Any]:
        """The row of the one socket that was accepted there; empty: there is none."""
        for slot in range(self._told.entries):
            cookie = self._rows._number(slot, "cookie")
            row = self._rows.find(cookie)
            if row and row["port"] == port:
                return row
        return {}

    def state(self) -> dict[str, Any]:
        return ask(self._connection, op="shape")


def test_the_lanes_of_a_client_are_shaped_told_and_paced(
    way: Net, group: Cgroup, helper: Helper, tmp_path: Path
) -> None:
    way.be(delay_s=0.01)
    with group.entered():
        serving = site(way, tmp_path, "--pace", "smooth")
        here = serving.__enter__()
    try:
        here.daemon.log.wait("sockets shaped", "lanes=2")
        shown = Shown(helper)
        try:
            with here.consumer() as consumer, Producer("p", here.daemon.runtime_dir) as producer:
                reading = consumer.attach("s")
                stream = producer.open("s")
                stream.write("x")
                assert reading.read(PATIENCE_S)
                bulk, express = shown.of(PORT), shown.of(PORT + 1)
                assert bulk["lane"] != express["lane"]
                assert (bulk["priority"], express["priority"]) == (0, PRIORITY)
                assert 15_000 <= bulk["srtt_us"] <= 2_000_000
                for port in (PORT, PORT + 1):
                    stream.write("y")  # a round trip, in which the kernel takes the pace up
                    until(lambda port=port: shown.of(port)["pacing"] == PACING_LEAST, "the pace of a stream")
                other = producer.open("t", pace="off")
                assert consumer.attach("t")
                other.write("x")

                def let_go() -> bool:
                    stream.write("z")
                    return bool(shown.of(PORT)["pacing"] == 0)

                until(let_go, "no limit beside a stream that nobody paces")
                assert shown.state()["counters"]["shaped"] == 2
            until(lambda: not shown.of(PORT) and not shown.of(PORT + 1), "the rows' end with their sockets")
        finally:
            shown.close()
        helper.end()
        here.daemon.log.wait("sockets not shaped any more", "clawd-kernel ended")
        with here.consumer() as consumer, Producer("p", here.daemon.runtime_dir) as producer:
            reading = consumer.attach("u")
            producer.open("u").write("x")
            assert reading.read(PATIENCE_S)
    finally:
        serving.__exit__(None, None, None)
