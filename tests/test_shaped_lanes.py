# SPDX-License-Identifier: Apache-2.0
"""clawd's tcp lanes with clawd-kernel beside it: both programs, a real client on another host, rows that both read."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd import protocol
from clawd.ctl import helper as ctl_helper
from clawd.ctl import trace_sockets
from clawd.kernel.shaper import find_congestion
from clawd.kernel.taken import tcp_sockets
from clawd.producer import Producer
from clawd.server.shaping import PACING_LEAST, PRIORITY, Rows
from tests import net
from tests.cgroups import Cgroup
from tests.daemon import PATIENCE_S, until
from tests.net import PORT, Net
from tests.seen import Watch
from tests.test_bpf_egress import EF, End, sniffing
from tests.test_bpf_helper import Helper, ask, ask_rows
from tests.test_bpf_shaper import THIN
from tests.test_ctl import clawctl, told
from tests.test_tcp import Site, site

pytestmark = [
    pytest.mark.root,
    pytest.mark.plain,
    pytest.mark.skipif(bool(net.reason()), reason=net.reason() or "can"),
    pytest.mark.usefixtures("bpf"),
]


@pytest.fixture
def way(seed: int) -> Iterator[Net]:
    with Net(seed) as made:
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


@contextmanager
def shaped(way: Net, group: Cgroup, directory: Path, *flags: str) -> Iterator[Site]:
    """A daemon in this control group, whose lanes clawd-kernel shapes."""
    with ExitStack() as stack:
        with group.entered():
            here = stack.enter_context(site(way, directory, *flags))
        here.daemon.log.wait("sockets shaped", "lanes=2")
        yield here


def test_the_lanes_of_a_client_are_shaped_told_and_paced(
    way: Net, group: Cgroup, helper: Helper, tmp_path: Path
) -> None:
    way.be(delay_s=0.01)
    with shaped(way, group, tmp_path, "--pace", "smooth") as here:
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


@pytest.mark.usefixtures("helper")
def test_a_client_of_large_tokens_is_not_paced_by_the_small_ones_of_others(
    way: Net, group: Cgroup, tmp_path: Path
) -> None:
    with (
        shaped(way, group, tmp_path, "--pace", "smooth") as here,
        here.consumer() as small,
        here.consumer() as large,
        Producer("p", here.daemon.runtime_dir) as producer,
    ):
        few = small.attach("small")
        many = [large.attach(f"large{number}") for number in range(8)]
        streams = [producer.open(f"large{number}") for number in range(8)]
        little = producer.open("small")

        def pacings() -> list[int | None]:
            little.write("x" * 8)  # the kernel takes a pace up in a round trip
            assert few.read(PATIENCE_S)
            for stream, reading in zip(streams, many, strict=True):
                stream.write("y" * 3000)
                assert reading.read(PATIENCE_S)
            rows = trace_sockets.sockets_of(here.daemon.pid, {})
            return sorted(row.pacing or 0 for row in rows if row.port == PORT)

        # A token, its header and its segment's; 45 of them a second, with the margin
        until(lambda: pacings() == [PACING_LEAST, 8 * (3000 + 48) * 45 * 4], "each one's own")


def test_a_helper_that_ends_leaves_no_client_as_slow_as_few_streams_were(
    way: Net, group: Cgroup, helper: Helper, tmp_path: Path
) -> None:
    with (
        shaped(way, group, tmp_path, "--pace", "smooth") as here,
        here.consumer() as consumer,
        Producer("p", here.daemon.runtime_dir) as producer,
    ):
        reading = consumer.attach("s")
        stream = producer.open("s")

        def pacings() -> set[int | None]:
            stream.write("x")  # the kernel takes a pace up in a round trip
            assert reading.read(PATIENCE_S)
            return {row.pacing for row in trace_sockets.sockets_of(here.daemon.pid, {}) if row.port in (PORT, PORT + 1)}

        until(lambda: PACING_LEAST in pacings(), "the pace of a stream")
        helper.end()
        until(lambda: pacings() == {None}, "no limit that nobody lifts")


def ss(way: Net, port: int) -> str:
    words = ["ss", "-tinH", "state", "established", f"sport = :{port}"]
    run = way.there(lambda: subprocess.run(words, capture_output=True, text=True, check=True), near=True)
    return run.stdout


def test_dscp_and_congestion_control_are_as_the_settings_have_them(
    way: Net, group: Cgroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "kernel"
    monkeypatch.setenv("CLAWD_KERNEL_DIR", str(directory))
    way.there(lambda: subprocess.run(["ip", "route", "add", "default", "dev", "clawd0"], check=True), near=True)
    helper = Helper(directory, group, within=("nsenter", f"--net={way._near}"))
    try:
        flags = ["--express-dscp", "ef", "--congestion", "reno"]
        with (
            shaped(way, group, tmp_path, *flags) as here,
            sniffing(End(way, near=False)) as sniffed,
            here.consumer() as consumer,
            Producer("p", here.daemon.runtime_dir) as producer,
        ):
            reading = consumer.attach("s")
            producer.open("s").write("x")
            assert reading.read(PATIENCE_S)
            assert [ss(way, port).count(" reno ") for port in (PORT, PORT + 1)] == [1, 1]
            assert sniffed(PORT + 1) == {EF << 2}
            assert sniffed(PORT) == {0}
            kernel = told(here.daemon.runtime_dir, "status")["kernel"]
            assert kernel["shaping"]["devices"] == ["clawd0"]
            assert "express lanes with DSCP ef and congestion control reno" in ctl_helper.told(kernel)
            assert ctl_helper.check_helper(directory).level == "ok"
            helper.end()
            wishes = ctl_helper.find_wishes(here.daemon.runtime_dir)
            shown = " ".join(clawctl(here.daemon.runtime_dir, "status").stdout.split())
            assert "clawd-kernel; it is needed for express_dscp = ef, congestion = reno" in shown
            finding = ctl_helper.check_helper(directory, wishes)
            assert finding.level == "warn"
            assert finding.what.endswith("it is needed for express_dscp = ef, congestion = reno")
    finally:
        if helper.process.returncode is None:
            helper.end()


@pytest.mark.usefixtures("helper")
def test_a_reload_counts_for_clients_that_connect_after_it(way: Net, group: Cgroup, tmp_path: Path) -> None:
    file = tmp_path / "clawd.conf"
    file.write_text("[network]\ncongestion = reno\n")
    with shaped(way, group, tmp_path, "--config", str(file)) as here:
        with here.consumer() as before:
            before.attach("s")
            until(lambda: ss(way, PORT).count(" reno "), "a client as configured")
            file.write_text("[network]\ncongestion = cubic\n")
            assert "changed: congestion" in clawctl(here.daemon.runtime_dir, "reload").stdout
            assert ss(way, PORT).count(" reno ") == 1, "it stays with what it has"

        def again() -> bool:
            with here.consumer() as after:
                after.attach("s")
                return bool(ss(way, PORT).count(" cubic "))

        until(again, "a client as reloaded")


def test_a_congestion_control_that_the_kernel_has_not_is_told(
    way: Net, group: Cgroup, helper: Helper, tmp_path: Path
) -> None:
    if not find_congestion(b"dctcp"):
        pytest.skip("this kernel has all that may be set")
    with shaped(way, group, tmp_path, "--congestion", "dctcp") as here, here.consumer() as consumer:
        consumer.attach("s")
        line = ctl_helper.told(told(here.daemon.runtime_dir, "status")["kernel"])
        assert "lanes with congestion control dctcp, this kernel has no congestion control dctcp" in line
        assert "options refused by the kernel: congestion" in line
        finding = ctl_helper.check_helper(helper.path.parent)
        assert (finding.level, finding.fix) == ("warn", ctl_helper.MISSING_FIX)


def thin(here: Site) -> dict[int, int]:
    """By local port of clawd's connections."""
    found = {}
    for taken in tcp_sockets(here.daemon.pid):
        found[taken.getsockname()[1]] = taken.getsockopt(*THIN)
    return found


def test_clients_that_were_there_before_clawd_kernel_are_told_until_they_come_again(
    way: Net, group: Cgroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "kernel"
    monkeypatch.setenv("CLAWD_KERNEL_DIR", str(directory))
    with group.entered():
        served = ExitStack()
        here = served.enter_context(site(way, tmp_path))
    with served, here.consumer() as consumer:
        consumer.attach("s")
        until(lambda: told(here.daemon.runtime_dir, "status")["clients"], "the client")
        assert thin(here) == {PORT: 0, PORT + 1: 1}, "what needs no privilege"
        helper = Helper(directory, group, within=("nsenter", f"--net={way._near}"))
        try:
            here.daemon.log.wait("sockets shaped", "lanes=2")
            kernel = told(here.daemon.runtime_dir, "status")["kernel"]
            assert kernel["shaping"]["unshaped"] == 2
            line = "2 sockets connected before it, and are not shaped until they connect again"
            assert line in ctl_helper.told(kernel)
            assert ctl_helper.check_helper(directory).level == "info"
            consumer.close()
            with here.consumer() as later:
                later.attach("s")

                def left() -> Any:
                    return told(here.daemon.runtime_dir, "status")["kernel"]["shaping"]

                until(lambda: (left()["unshaped"], left()["counters"]["shaped"]) == (0, 2), "both shaped")
        finally:
            helper.end()


@contextmanager
def flowing(here: Site) -> Iterator[None]:
    """A stream that a client reads, a token each 20 ms."""
    ended = threading.Event()
    with here.consumer() as consumer, Producer("p", here.daemon.runtime_dir) as producer:
        reading = consumer.attach("s")
        stream = producer.open("s")

        def write() -> None:
            while not ended.wait(0.02):
                stream.write("x" * 40)
            stream.close()

        def read() -> None:
            while reading.read(PATIENCE_S):
                pass

        threads = [threading.Thread(target=each) for each in (write, read)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


@pytest.mark.usefixtures("helper")
def test_pacers_know_of_a_way_that_changed_within_two_round_trips(way: Net, group: Cgroup, tmp_path: Path) -> None:
    """Of the way as it is then; a round trip passes before the kernel can know."""
    way.be(delay_s=0.15)
    with (
        shaped(way, group, tmp_path, "--pace", "steady") as here,
        flowing(here),
        Watch(here.daemon.runtime_dir, PATIENCE_S) as watch,
    ):
        # Three round trips of tokens on it, so that many are under way when some are lost
        watch.until(lambda known: 290_000 < known.rtt_us < 400_000, "the way as it is")
        until(lambda: here.daemon.total("sent") > 3 * 15, "tokens")
        lost_ns = time.monotonic_ns()
        before = way.be(up=False)["lost"]
        until(lambda: way.be()["lost"] >= before + 2, "some of it to be lost")
        way.be(up=True)
        lost = watch.rise("loss_ppm", 3000, "what was lost")
        assert lost.loss_ppm < 100_000, "a few of many"
        assert lost.rtts(lost_ns) <= 2
        watch.until(lambda known: known.jitter_us < 15_000, "an even way")
        strayed_ns = time.monotonic_ns()
        way.be(jitter_s=0.1)
        strayed = watch.rise("jitter_us", 15_000, "the jitter")._replace(rtt_us=300_000)
        assert strayed.rtts(strayed_ns) <= 2
        way.be(jitter_s=0)
        watch.until(lambda known: known.jitter_us < 15_000, "an even way again")
        changed_ns = time.monotonic_ns()
        way.be(delay_s=0.4)
        longer = watch.rise("rtt_us", 30_000, "the longer way")._replace(rtt_us=800_000)
        assert longer.rtts(changed_ns) <= 2
        lag_ms = sorted(watch.lags_ns)[len(watch.lags_ns) // 2] / 1e6
        assert lag_ms < 100, "a release later than the kernel"
        waits = (lost.rtts(lost_ns), strayed.rtts(strayed_ns), longer.rtts(changed_ns))
        print(f"known {waits} round trips after, {lag_ms:.0f} ms late")
