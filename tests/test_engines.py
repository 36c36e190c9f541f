# SPDX-License-Identifier: Apache-2.0
"""The example engines in C and C++, built with the vendored header, against the real daemon under the history checker;
and engines that lie or die in any call, beside whom others complete.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clawd.consumer import Consumer
from clawd.csrc import build
from fake_clawd import Drainer, FakeClawd
from tests.daemon import PATIENCE_S, Daemon, until
from tests.history import Got, History, Put, Seen
from tests.test_rogue import honest

HERE = Path(__file__).resolve().parent
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-pedantic", "-Werror")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BUILDS = {
    "c11": ("gcc", "-std=c11", "engine.c"),
    "c11 sanitized": ("gcc", "-std=c11", "engine.c", *SANITIZE),
    "clang c11": ("clang", "-std=c11", "engine.c"),
    "c++17": ("g++", "-std=c++17", "engine.cpp"),
    "c++17 sanitized": ("g++", "-std=c++17", "engine.cpp", *SANITIZE),
    "c++20": ("g++", "-std=c++20", "engine.cpp"),
    "clang c++17": ("clang++", "-std=c++17", "engine.cpp"),
}
PROSE = "The ring is full; 环形缓冲区已满，请稍候。 Ёмкость 0123456789 🦞 naïve ∑".encode()
RING = 4096


def built(directory: Path, source: Path, compiler: str, *flags: str) -> Path:
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    (directory / "clawd_ring.h").write_text(build.header())
    program = directory / source.stem
    command = [compiler, *flags, *WARNINGS, "-O1", f"-I{directory}", str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return program


@pytest.fixture(scope="module", params=BUILDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, standard, source, *more = BUILDS[request.param]
    return built(tmp_path_factory.mktemp("engine"), HERE / "engines" / source, compiler, standard, *more)


def tokens(index: int, count: int) -> list[Put]:
    """What the examples' model makes up for one answer."""
    puts, at = [], 0
    for step in range(count):
        data = PROSE[at : at + 1 + (step * 7 + index * 3) % 6]
        at = (at + len(data)) % len(PROSE)
        puts.append(Put(data, urgent=step % 16 == 15))
    return puts


def run(engine: Path, daemon: Daemon, prefix: str, streams: int, count: int, overflow: int = 0) -> dict[str, str]:
    """Let it work to the end; what it says became of each answer. Without overflow it keeps in step with clawd."""
    command = [engine, daemon.runtime_dir, prefix, str(streams), str(count), str(RING), str(overflow)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S + 20)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(line.split() for line in done.stdout.splitlines())


def follow(history: History, consumer: Consumer, names: list[str]) -> list[Got]:
    readings = [(consumer.attach(name), history.reading(name)) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda pair: pair[1].follow(pair[0]), readings))


@pytest.mark.parametrize("overflow", [0, 4096, 1 << 24])
def test_the_answers_of_an_engine_arrive_whole(engine: Path, daemon: Daemon, history: History, overflow: int) -> None:
    names = [f"whole-{overflow}-{index}" for index in range(6)]
    for index, name in enumerate(names):
        history.put(name, *tokens(index, 400))
        history.end(name, "length" if index % 2 else "stop")
    with Consumer(daemon.runtime_dir) as consumer, ThreadPoolExecutor(1) as pool:
        read = pool.submit(follow, history, consumer, names)
        ends = run(engine, daemon, f"whole-{overflow}", len(names), 400, overflow)
        read.result()
    assert ends == {name: history.written[name].end for name in names}
    history.check()
    assert sum(len(put.data) for row in history.written.values() for put in row.puts) > 2 * RING, (
        "no ring was ever full"
    )


def naps(pid: int) -> int:
    """How often it slept so far. An engine that is attached sleeps in claw_wait_room() only."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["voluntary_ctxt_switches"])


@pytest.mark.parametrize("overflow", [0, 4096, 1 << 24])
def test_an_engine_whose_ring_stays_full_waits_and_loses_nothing(engine: Path, tmp_path: Path, overflow: int) -> None:
    fake = FakeClawd(tmp_path)
    try:
        command = [engine, tmp_path, "late", "2", "200", str(RING), str(overflow)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert fake.attached.wait(PATIENCE_S)
            [ring] = fake.rings
            until(lambda: ring.head > RING - 256, "the ring to be full")
            before = naps(process.pid)
            until(lambda: naps(process.pid) > before + 5, "the engine to wait for room")
            assert ring.head <= RING
            with Drainer(ring):
                output, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, output, errors) == (0, b"late-0 stop\nlate-1 length\n", b"")
        for index in range(2):
            assert ring.stream(f"late-{index}").data == b"".join(put.data for put in tokens(index, 200))
    finally:
        fake.close()


def test_an_engine_sees_a_cancel_and_goes_on_with_its_other_answers(
    engine: Path, daemon: Daemon, history: History
) -> None:
    names = [f"cut-{index}" for index in range(3)]
    for index, name in enumerate(names):
        history.put(name, *tokens(index, 1500))
        history.end(name, "length" if index % 2 else "stop")
    history.end("cut-1", "cancelled", cut=True)
    with Consumer(daemon.runtime_dir) as consumer, ThreadPoolExecutor(1) as pool:
        consumer.attach("cut-1").cancel()
        until(lambda: daemon.total("attachments") == 1, "the cancel to be there before the engine")
        read = pool.submit(follow, history, consumer, names)
        ends = run(engine, daemon, "cut", len(names), 1500)
        read.result()
    assert ends == {name: history.written[name].end for name in names}
    history.check()


def test_an_engine_is_told_that_a_name_is_taken(engine: Path, daemon: Daemon, history: History) -> None:
    assert run(engine, daemon, "twice", 1, 1) == {"twice-0": "stop"}
    until(lambda: daemon.streams()["twice-0"]["state"] != "live", "the first one's end")
    ends = run(engine, daemon, "twice", 2, 1500)
    assert ends == {"twice-0": "exists", "twice-1": "length"}


def test_without_a_daemon_an_engine_says_so_in_one_line(engine: Path, tmp_path: Path) -> None:
    done = subprocess.run([engine, tmp_path, "x", "1", "1", "0", "0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith(": cannot attach: no clawd serves this directory\n")


# --- what README shows

README = (HERE.parent / "README.md").read_text()


@pytest.mark.parametrize("build_name", ["c11", "clang c11", "c++17", "clang c++17"])
def test_the_example_in_the_readme_is_an_engine(
    daemon: Daemon, history: History, tmp_path: Path, build_name: str
) -> None:
    [example] = re.findall(r"```c\n(.*?)```", README, re.DOTALL)
    compiler, standard, *_ = BUILDS[build_name]
    source = tmp_path / f"readme{'.cpp' if '++' in compiler else '.c'}"
    source.write_text(example)
    engine = built(tmp_path, source, compiler, standard)
    history.put("chatcmpl-2", b"Hel", b"lo, ", b"\xe4\xbd", b"\xa0")
    history.end("chatcmpl-2", "stop")
    with Consumer(daemon.runtime_dir) as consumer:
        reading = consumer.attach("chatcmpl-2")
        subprocess.run([engine, daemon.runtime_dir], check=True)
        got = history.reading("chatcmpl-2").follow(reading)
    history.check()
    assert "".join(got.text) == "Hello, 你"


def test_the_header_serves_from_a_clone_as_the_readme_says(tmp_path: Path) -> None:
    assert " -Iclawd/csrc " in README
    engine = HERE / "engines" / "engine.c"
    subprocess.run(["gcc", "-std=c11", "-Iclawd/csrc", engine, "-o", tmp_path / "engine"], cwd=HERE.parent, check=True)


# --- engines that lie, engines that die

LIES = {
    "records longer than allowed": "len",
    "more bytes than were written": "len",
    "room that is not there": "head",
    "a head that went back": "head",
    "a head between records": "head",
    "numbers it skipped": "seq",
    "a stream it never opened": "handle",
    "a name longer than its record": "open",
    "a name that is no text": "open",
    "an empty reason": "close",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("rogue") / "run", "--spool-bytes", "8M") as daemon:
        yield daemon


@pytest.fixture(scope="module", params=["c11", "c++17"])
def liar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, standard, *_ = BUILDS[request.param]
    language = "c" if compiler == "gcc" else "c++"
    return built(tmp_path_factory.mktemp("liar"), HERE / "rogue" / "liar.c", compiler, standard, "-x", language)


@pytest.mark.parametrize("lie", LIES)
def test_an_engine_that_lies_is_quarantined_and_told(liar: Path, shared: Daemon, lie: str) -> None:
    name = f"{liar.parent.name} {lie}"
    with honest(shared), Consumer(shared.runtime_dir) as consumer:
        reading = consumer.attach(name)
        done = subprocess.run([liar, shared.runtime_dir, name, lie], capture_output=True, text=True, timeout=50)
        assert (done.returncode, done.stdout, done.stderr) == (0, "2 clawd has let go of the ring\n", "")
        assert b"".join(token.data for token in reading).startswith(b"once")
        assert reading.end_reason == "error:quarantined"
    shared.log.wait("producer detached", "producer=liar", f"quarantined:{LIES[lie]}")


MORTAL = [f"{chr(97 + number)} 你好 ".encode() for number in range(12)]
"""What mortal.c writes to each of its two streams."""


@pytest.fixture(scope="module", params=["c11", "c++17"])
def mortal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, standard, *_ = BUILDS[request.param]
    language = "c" if compiler == "gcc" else "c++"
    flags = (standard, "-x", language, "-fsanitize-coverage=trace-pc")
    return built(tmp_path_factory.mktemp("mortal"), HERE / "rogue" / "mortal.c", compiler, *flags)


def live(mortal: Path, daemon: Daemon, name: str, point: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([mortal, daemon.runtime_dir, name, str(point)], capture_output=True, text=True, timeout=50)


def test_an_engine_that_dies_in_any_call_loses_what_it_had_not_written_and_nobody_elses(
    mortal: Path, shared: Daemon, history: History, dice: random.Random
) -> None:
    kind = mortal.parent.name
    done = live(mortal, shared, f"{kind} lives", 0)
    assert (done.returncode, done.stderr) == (0, "")
    total = int(done.stdout)
    assert total > 300
    points = sorted(dice.sample(range(1, total + 1), 80))
    with honest(shared):
        codes = [live(mortal, shared, f"{kind} {point}", point).returncode for point in points]
    # one that had to wait for room less often may be over before its last points
    assert set(codes) <= {-signal.SIGKILL, 0}
    assert codes.count(-signal.SIGKILL) >= 70
    until(lambda: shared.status()["producers"] == 0, "every producer's end")

    opened = [name for name in shared.streams() if name.startswith(f"{kind} ")]
    ends: dict[str, list[int]] = {}
    with Consumer(shared.runtime_dir) as consumer:
        for name in opened:
            reading = consumer.attach(name)
            got = history.reading(name).follow(reading)
            seen = b"".join(token.data for token in got.events if isinstance(token, Seen))
            whole = len(MORTAL) if reading.end_reason == "stop" else sum(isinstance(row, Seen) for row in got.events)
            assert seen == b"".join(MORTAL[:whole])
            history.put(name, *(Put(data, urgent=number % 3 == 0) for number, data in enumerate(MORTAL[:whole])))
            history.end(name, "producer_lost" if name.endswith("-open") else str(reading.end_reason))
            ends.setdefault(str(reading.end_reason), []).append(whole)
    history.check()
    assert set(ends) == {"stop", "producer_lost"}
    assert len(set(ends["producer_lost"])) > 3, "it died at one place only"
    assert len(opened) < 2 * len(points), "it never died before its streams were open"
