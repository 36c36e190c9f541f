# SPDX-License-Identifier: Apache-2.0
"""What the tests of the whole path share: a daemon, its history, random numbers that can be had again; and, at a run's
end, what its proofs counted.
"""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import counts
from clawd.consumer import Consumer
from clawd.kernel.tracer import FIRST_PID_NAMESPACE
from clawd.producer import Producer
from fake_clawd import SMALL_RING, FakeClawd, Ring
from fake_relay import FakeRelay
from tests import packages
from tests.cgroups import Cgroup, cgroup, why_no_bpf
from tests.daemon import Daemon
from tests.gateway import Gateway
from tests.history import History

collect_ignore = ["machine"]
"""Run by scripts/machine, inside it."""


spent_s: Counter[Path] = Counter()
"""By file: what its tests took so far."""


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "seconds of a file's tests after which the rest of it is left out: its first show most of what breaks"
    parser.addoption("--share", type=float, metavar="S", help=about)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    began = time.monotonic()
    try:
        return (yield)
    finally:
        spent_s[item.path] += time.monotonic() - began


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    share_s = item.config.getoption("--share")
    if share_s and spent_s[item.path] >= share_s:
        pytest.skip("its file had its share of a quick run")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if sums := counts.of_this_run():
        terminalreporter.write_line(f"counted: {counts.text(sums)}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon with flags of the test's choice."""
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(Daemon(tmp_path / "run", *flags))


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    return start("--spool-bytes", "16M")


@pytest.fixture
def serve(daemon: Daemon) -> Iterator[Callable[..., Gateway]]:
    """Starts a gateway of the daemon with flags of the test's choice."""
    with ExitStack() as stack:
        yield lambda *flags, **more: stack.enter_context(Gateway(daemon.runtime_dir, *flags, **more))


@pytest.fixture
def gateway(serve: Callable[..., Gateway]) -> Gateway:
    return serve()


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Producer]:
    """A producer of the daemon."""
    with Producer("engine", daemon.runtime_dir) as made:
        yield made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that people install, built from a copy of the tree."""
    directory = tmp_path_factory.mktemp("wheel")
    return packages.make_wheel(packages.tree(directory / "tree"), directory)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that a test may end as it likes."""
    daemon = Daemon(tmp_path / "run", "--spool-bytes", "1M", "--stream-bytes", "64k")
    try:
        yield daemon.start()
    finally:
        daemon.discard()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeClawd]:
    """A clawd that takes producers, and drains their rings when a test says so."""
    daemon = FakeClawd(tmp_path)
    yield daemon
    daemon.close()


@pytest.fixture
def small(fake: FakeClawd) -> Iterator[tuple[Producer, Ring]]:
    """A producer of the fake with the smallest ring there is and no other room."""
    with Producer("small", fake.directory, SMALL_RING, overflow_bytes=0) as producer:
        yield producer, fake.rings[0]


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[FakeRelay]:
    """A clawd that takes consumers, and sends what a test says."""
    with FakeRelay(tmp_path) as running:
        yield running


@pytest.fixture
def consumer(relay: FakeRelay) -> Iterator[Consumer]:
    with Consumer(relay.directory) as connected:
        yield connected


@pytest.fixture
def bpf() -> None:
    """BPF can be loaded here."""
    if why_no_bpf():
        pytest.skip(why_no_bpf())


@pytest.fixture
def tracer(bpf: None) -> None:
    """The tracer's programs see what they follow."""
    if Path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE:
        pytest.skip("processes are followed from the host's PID namespace alone")


@pytest.fixture
def group(bpf: None) -> Iterator[Cgroup]:
    """A control group of the test's own, to attach to."""
    with cgroup() as made:
        yield made


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def seed() -> int:
    """Printed, and taken from $CLAWD_TEST_SEED to run a test again as it was."""
    value = int(os.environ.get("CLAWD_TEST_SEED") or secrets.randbits(32))
    print(f"CLAWD_TEST_SEED={value}")
    return value


@pytest.fixture
def dice(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[Daemon], subprocess.Popen[str]]]:
    """A producer in a process of its own: opens "s", writes each line it is told."""
    code = (
        "import sys; from pathlib import Path; from clawd.producer import Producer\n"
        "with Producer('w', Path(sys.argv[1])) as producer:\n"
        "    stream = producer.open('s')\n"
        "    for line in sys.stdin: stream.write(line.strip()); print(line.strip(), flush=True)\n"
    )
    made: list[subprocess.Popen[str]] = []

    def make(daemon: Daemon) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(daemon.runtime_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        made.append(process)
        return process

    yield make
    for process in made:
        process.kill()
        process.communicate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test has minutes, unless it says itself how long."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
