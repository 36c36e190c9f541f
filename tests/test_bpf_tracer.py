# SPDX-License-Identifier: Apache-2.0
"""The tracer in this kernel: writes counted exactly, a delay seen in its stage alone, nothing left however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd.errors import HostError
from clawd.kernel import bpfcall, btf, stamps, tracer
from clawd.kernel.hists import STAGES
from clawd.kernel.tracer import Look, Tracer
from tests.cgroups import alone, cgroup
from tests.test_bpf_shaper import connected, until
from tests.veth import Side, connection, link

pytestmark = [pytest.mark.root, pytest.mark.plain, pytest.mark.usefixtures("tracer")]
MS = 1_000_000
WRITES = 23


@pytest.fixture(params=[True, False], ids=["stamps", "tracepoints"])
def is_stamped(request: pytest.FixtureRequest) -> bool:
    if request.param:
        try:
            btf.look_up([*stamps.CALLS.values()], [])
        except HostError as error:
            pytest.skip(error.message)
    return bool(request.param)


def attached(group: Path) -> list[int]:
    kinds = (bpfcall.EGRESS, bpfcall.INGRESS, bpfcall.SOCK_OPS, bpfcall.SETSOCKOPT)
    fd = os.open(group, os.O_RDONLY)
    try:
        return [number for kind in kinds for number in bpfcall.programs_at(fd, kind)]
    finally:
        os.close(fd)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with alone():
        home = tracer.cgroup_of(os.getpid())
        before = attached(home)
        mounts = Path("/proc/mounts").read_text()
        yield
        assert attached(home) == before
        assert Path("/proc/mounts").read_text() == mounts


@contextmanager
def lane() -> Iterator[tuple[socket.socket, socket.socket, dict[int, str]]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, connected(listener) as (ours, peer):
        yield ours, peer, {ours.getsockname()[1]: "first"}


def settle(ours: socket.socket, peer: socket.socket) -> None:
    """The first write of a socket that was there before is not followed."""
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(2):
        ours.send(b"settle")
        peer.send(peer.recv(100))
        ours.recv(100)


def test_a_prime_number_of_writes_is_counted_by_each_stage(is_stamped: bool) -> None:
    with lane() as (ours, peer, lanes), Tracer(os.getpid(), lanes, is_stamped=is_stamped) as traced:
        assert set(traced.backends) == {*STAGES}, traced.lacking
        assert (traced.backends["socket"] == stamps.BACKEND) == is_stamped
        settle(ours, peer)
        before = traced.look()
        for _ in range(997):
            ours.send(b"a token")
            assert peer.recv(100) == b"a token"
        until(lambda: traced.look().hists["acked", "first"].count >= count(before, "acked") + 997, "acknowledged")
        after = traced.look()
        again = int.from_bytes(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:], sys.byteorder)
        for stage in ("socket", "acked", "network"):
            assert count(after, stage) - count(before, stage) == 997, stage
            assert after.hists[stage, "rest"].count <= 8  # the peer's own writes
        driven = count(after, "device") - count(before, "device")
        assert driven == 997 if is_stamped else 950 <= driven <= 997 + again
        for name, amount in (("writes", 997), ("packets", 997 + again), ("sent_bytes", 997 * 7), ("missed", 0)):
            assert after.counters[name] - before.counters[name] == amount, name
        cost = traced.cost()
        assert cost.bpf_ns
        assert cost.bpf_runs
        assert cost.bpf_runs > 4 * 997
        assert cost.bpf_ns / cost.bpf_runs < 20_000


def count(seen: Look, stage: str) -> int:
    return seen.hists[stage, "first"].count


def test_writes_of_another_process_are_not_followed(is_stamped: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, connected(listener) as (ours, peer):
        lanes = {listener.getsockname()[1]: "first"}
        with Tracer(1, lanes, is_stamped=is_stamped) as traced, connected(listener) as (late, other):
            settle(late, other)
            settle(ours, peer)
            assert traced.look().counters["writes"] == 0


def test_in_a_container_with_numbers_of_its_own_it_says_so() -> None:
    program = "from clawd.kernel.tracer import Tracer\nTracer(1).__enter__()"
    within = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    run = subprocess.run(within, capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1].endswith(
        "of its own for its processes; run it in the host's PID namespace (--pid=host)"
    )


def test_a_write_that_the_socket_has_no_room_for_is_followed_by_what_it_took(is_stamped: bool) -> None:
    with lane() as (ours, peer, lanes), Tracer(os.getpid(), lanes, ("writes",), is_stamped) as traced:
        settle(ours, peer)
        before = traced.look()
        ours.setblocking(False)
        sent = writes = 0
        data = bytes(300_000)
        while sent < 9_000_000:
            try:
                sent += ours.send(data)
                writes += 1
            except BlockingIOError:
                peer.recv(1 << 20)
        left = sent
        ours.setblocking(True)
        seen = traced.look()
        assert seen.counters["writes"] - before.counters["writes"] == writes
        assert seen.counters["sent_bytes"] - before.counters["sent_bytes"] == left
        until(lambda: drained(ours, peer), "all acknowledged")
        seen = traced.look()
        missed = seen.counters["missed"] - before.counters["missed"]
        assert count(seen, "acked") - count(before, "acked") == writes - missed


def drained(ours: socket.socket, peer: socket.socket) -> bool:
    while select.select([peer], [], [], 0)[0]:
        peer.recv(1 << 20)
    return int.from_bytes(fcntl.ioctl(ours, termios.TIOCOUTQ, bytes(4)), sys.byteorder) == 0


@pytest.mark.parametrize("is_stamped", [True], indirect=True)
def test_sockets_of_a_lane_are_stamped_from_their_first_byte_and_others_after_a_look(is_stamped: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as lane, socket.create_server(("127.0.0.1", 0)) as other:
        lanes = {lane.getsockname()[1]: "first"}
        with (
            Tracer(os.getpid(), lanes, ("writes",), is_stamped) as traced,
            connected(lane) as (ours, peer),
            connected(other) as (plain, plain_peer),
        ):
            ours.send(b"first")
            peer.recv(100)
            plain.send(b"not seen")
            plain_peer.recv(100)
            until(lambda: traced.look().hists["acked", "first"].count == 1, "acknowledged")
            assert traced.look().counters["writes"] == 1
            traced.refresh()
            plain.send(b"seen")
            plain_peer.recv(100)
            until(lambda: traced.look().hists["acked", "rest"].count == 1, "acknowledged")


@pytest.mark.parametrize("is_stamped", [True], indirect=True)
def test_the_end_of_a_tracer_takes_its_flags_and_another_sets_its_own_again(is_stamped: bool) -> None:
    with lane() as (ours, peer, lanes), Tracer(os.getpid(), lanes, ("writes",), is_stamped) as traced:
        ours.send(b"seen")
        with Tracer(os.getpid(), lanes, ("writes",), is_stamped) as second:
            ours.send(b"by both")
            until(lambda: count(second.look(), "acked") == 1, "acknowledged")
        ours.send(b"by none")
        peer.recv(100)
        assert traced.look().counters["writes"] == 2
        traced.refresh()
        ours.send(b"seen again")
        assert traced.look().counters["writes"] == 3


@pytest.mark.parametrize("is_stamped", [True], indirect=True)
def test_sockets_of_another_control_group_are_told(is_stamped: bool) -> None:
    with lane() as (ours, _peer, lanes), cgroup() as group, group.entered():
        with Tracer(os.getpid(), lanes, ("writes",), is_stamped) as traced:
            ours.send(b"unseen")
            told = re.fullmatch(r"BPF transmit timestamps; (\d+) sockets of another control group not followed",
                                traced.backends["socket"])  # fmt: skip
            assert told
            assert int(told[1]) >= 2
            assert traced.look().counters["writes"] == 0
        assert attached(group.path) == []


# --- 20 ms and more in one stage ---


def medians(
    near: Side, far: Side, is_stamped: bool = True, *, size: int = 100, quiet: bool = False, pacing: int = 0
) -> dict[str, int]:
    """Of WRITES writes, in nanoseconds; `quiet`: the peer acknowledges when it must."""
    with connection(near, far) as (ours, peer), Tracer(os.getpid(), {}, ("writes",), is_stamped) as traced:
        settle(ours, peer)
        for _ in range(10):  # the first ten segments are not paced
            ours.send(b"x")
            peer.send(peer.recv(100))
            ours.recv(100)
        before = traced.look()
        if pacing:
            ours.setsockopt(socket.SOL_SOCKET, 47, pacing)
        for _ in range(WRITES):
            ours.send(bytes(size))
            left = size
            while left:
                if quiet:
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
                left -= len(peer.recv(left))
                if not quiet:
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            until(lambda: drained(ours, peer), "acknowledged")
        after = traced.look()
        found = {}
        for stage in ("socket", "device", "acked", "network"):
            hist = after.hists[stage, "rest"]
            counts = hist.counts
            for at, value in enumerate(before.hists[stage, "rest"].counts):
                counts[at] -= value
            # A task that is moved just before the device's queue takes its packet out of sight of that stage
            assert sum(counts) >= (WRITES * 3 // 4 if stage == "device" else WRITES), stage
            found[stage] = hist.quantile(0.5)
        whole = found.pop("network")
        assert whole >= max(found.values()) * 0.93, (whole, found)  # a bucket is so wide
        return found


def slow(found: dict[str, int]) -> list[str]:
    print(found)
    return [stage for stage, value_ns in found.items() if value_ns >= 15 * MS]


def test_without_a_delay_no_stage_is_slow(is_stamped: bool) -> None:
    with link() as (near, far):
        assert slow(medians(near, far, is_stamped)) == []


def test_a_paced_socket_is_slow_to_leave_it(is_stamped: bool) -> None:
    with link() as (near, far):
        assert slow(medians(near, far, is_stamped, size=1200, pacing=40_000)) == ["socket"]


def test_a_slow_queue_shows_at_the_device(is_stamped: bool) -> None:
    with link() as (near, far):
        near.run("tc qdisc add dev near root tbf rate 400kbit burst 1600 limit 30000")
        assert slow(medians(near, far, is_stamped, size=1400)) == ["device"]


def test_a_slow_client_shows_at_the_acknowledgement(is_stamped: bool) -> None:
    with link() as (near, far):
        assert slow(medians(near, far, is_stamped, quiet=True)) == ["acked"]


def test_who_takes_the_processor_is_named() -> None:
    busy = "import os, time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass\n"
    sleepy = "import time\nwhile True: time.sleep(0.001)\n"
    pin = lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # noqa: E731
    hog = subprocess.Popen(["bash", "-c", "exec -a claw-hog " + sys.executable + " -c '" + busy + "'"], preexec_fn=pin)
    try:
        victim = subprocess.Popen([sys.executable, "-c", sleepy], preexec_fn=pin)
        try:
            with Tracer(victim.pid, parts=("sched",)) as traced:
                assert list(traced.backends) == ["runq"]
                until(lambda: traced.look().hists["runq", "rest"].count > 50, "waits for the processor")
                seen = traced.look()
                comm = Path(f"/proc/{hog.pid}/comm").read_text().strip()
                assert seen.takers[comm][0] > 10, seen.takers
        finally:
            victim.kill()
            victim.wait()
    finally:
        hog.kill()
        hog.wait()


def taken_from(pid: int) -> int:
    """How often it lost the processor, as the kernel counts it."""
    found = re.search(r"^nonvoluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_pre_emptions_within_the_kernel_count_too() -> None:
    pin = lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # noqa: E731
    hog = subprocess.Popen(["bash", "-c", "while :; do :; done"], preexec_fn=pin)
    # Nearly all of its time is the kernel's
    victim = subprocess.Popen(
        ["dd", "if=/dev/zero", "of=/dev/null", "bs=256M"], stderr=subprocess.DEVNULL, preexec_fn=pin
    )
    try:
        with Tracer(victim.pid, parts=("sched",)) as traced:
            before, already = taken_from(victim.pid), traced.look().counters["preempted"]
            until(lambda: taken_from(victim.pid) >= before + 101, "pre-empted")
            count, seen = taken_from(victim.pid) - before, traced.look().counters["preempted"] - already
        assert abs(seen - count) <= 10, (seen, count)
    finally:
        for process in (victim, hog):
            process.kill()
            process.wait()


# --- the end of it ---

HOLD = """
import os, sys, time
from clawd.kernel.tracer import Tracer
with Tracer(int(sys.argv[1]), is_stamped=sys.argv[2] == "True") as traced:
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["exit", signal.SIGKILL])
def test_nothing_stays_attached(how: Any, is_stamped: bool) -> None:
    with cgroup() as group:
        sleeper = subprocess.Popen(["sleep", "600"])
        try:
            group.take(sleeper.pid)
            words = [sys.executable, "-c", HOLD, str(sleeper.pid), str(is_stamped)]
            holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert holder.stdin
            assert holder.stdout
            assert holder.stdout.readline() == b"up\n"
            assert len(attached(group.path)) == (1 if is_stamped else 2)
            if how == "exit":
                holder.stdin.close()
            else:
                holder.send_signal(how)
                holder.stdin.close()
            holder.wait(30)
            holder.stdout.close()
            until(lambda: not attached(group.path), "detached")
        finally:
            sleeper.kill()
            sleeper.wait()


def test_other_programs_on_the_cgroup_stay(is_stamped: bool) -> None:
    with cgroup() as group, socket.create_server(("127.0.0.1", 0)):
        sleeper = subprocess.Popen(["sleep", "600"])
        try:
            group.take(sleeper.pid)
            with Tracer(sleeper.pid, {}, ("writes",), is_stamped):
                first = attached(group.path)
                with Tracer(sleeper.pid, {}, ("writes",), is_stamped):
                    assert len(attached(group.path)) == 2 * len(first) > 0
                assert attached(group.path) == first
        finally:
            sleeper.kill()
            sleeper.wait()


def test_a_process_that_is_gone_is_told() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with Tracer(child.pid) as traced:
        assert traced.lacking["stamps"] == traced.lacking["socket"] == f"process {child.pid} is gone"
        assert list(traced.backends) == ["runq"]
    assert json.dumps(traced.lacking)
