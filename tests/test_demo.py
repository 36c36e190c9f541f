# SPDX-License-Identifier: Apache-2.0
"""The demo as a person runs it: real processes on real text; what it says, what it writes, and that nothing stays."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import clawd.ctl.demo
from clawd.page import read_instance

pytestmark = pytest.mark.plain

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(clawd.ctl.demo.__file__).parent
TEXTS = {name: (HERE / f"{name}.txt").read_bytes() for name in ("english", "chinese", "figures")}
KEYS = ("version", "streams", "tokens_sent", "tokens_received", "gaps", "intact", "first_token_us", "added_us",
        "tokens_per_second")  # fmt: skip
SEED = 20
END_S = 20


def mixed(size: int) -> bytes:
    source = random.Random(SEED)
    texts = list(TEXTS.values())
    return b"".join(source.choice(texts) for _ in range(size // min(map(len, texts)) + 1))[:size]


@dataclass
class Place:
    """Where one test's demo runs; everything it makes has this directory in its environment or under it."""

    path: Path
    instances: set[str] = field(default_factory=set)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": os.fspath(self.path), "PYTHONWARNINGS": "error"}

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "clawd.ctl.demo", "--seed", str(SEED), *map(str, arguments)]
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        return subprocess.Popen(command, env=self.environment, **given)

    def run(self, *arguments: object) -> tuple[int, str, str]:
        demo = self.start(*arguments)
        out, err = demo.communicate(timeout=END_S)
        return demo.returncode, out.decode(), err.decode()

    def start_streaming(self, *arguments: object) -> subprocess.Popen[bytes]:
        """A demo in mid-stream: text has come."""
        text = self.path.parent / "text"
        text.write_bytes(mixed(1 << 20))
        demo = self.start("--text", text, "--rate", 400, *arguments)
        assert demo.stdout
        while not (line := demo.stdout.readline()).startswith(b"text "):
            assert line, "it ended before any text came"
        self.instances.add(read_instance(self.only_directory()))
        assert self.shared_memory()
        return demo

    def only_directory(self) -> Path:
        [directory] = self.path.iterdir()
        return directory

    def processes(self) -> dict[int, str]:
        """Those of the demo, by the directory in their environment."""
        mark = f"TMPDIR={self.path}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def process(self, words: str) -> int:
        [pid] = [pid for pid, command in self.processes().items() if words in command]
        return pid

    def shared_memory(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") for instance in self.instances if f"clawd-{instance}" in name]

    def left(self) -> list[object]:
        return [*self.path.iterdir(), *self.processes().values(), *self.shared_memory()]


@pytest.fixture
def place() -> Iterator[Place]:
    # not tmp_path, which is too long for a socket in it
    top = Path(tempfile.mkdtemp(prefix="clawd-test-"))
    (top / "tmp").mkdir()
    place = Place(top / "tmp")
    try:
        yield place
        assert place.left() == []
    finally:
        for pid in place.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(top)


def check_account(value: dict[str, Any]) -> None:
    assert tuple(value) == KEYS
    assert value["version"] == 1
    assert (value["intact"], value["gaps"]) == (True, 0)
    assert value["tokens_sent"] == value["tokens_received"]
    for key in ("first_token_us", "added_us"):
        delays = value[key]
        assert tuple(delays) == ("p50", "p99")
        if value["tokens_sent"]:
            assert all(type(delay) is int for delay in delays.values())
            assert 0 <= delays["p50"] <= delays["p99"] < END_S * 10**6
        else:
            assert delays == {"p50": None, "p99": None}


def test_three_streams_arrive_and_stdout_has_the_object_alone(place: Place) -> None:
    output = place.path.parent / "out"
    code, out, err = place.run("--rate", 0, "--json", "--output", output)
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert out.count("\n") == 1
    check_account(value)
    assert value["streams"] == 3
    # 4 bytes a token
    assert 0.8 < value["tokens_sent"] / (sum(map(len, TEXTS.values())) / 4) < 1.25
    assert value["tokens_per_second"] > 0
    assert output.read_bytes() == b"".join(TEXTS.values())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xe4", id="one byte"),
        pytest.param(random.Random(SEED).randbytes(100_000), id="random bytes"),
        pytest.param(mixed(5_000_000), id="5 MB of mixed scripts"),
    ],
)
def test_the_output_is_the_text_byte_for_byte(place: Place, data: bytes) -> None:
    text, output = place.path.parent / "in", place.path.parent / "out"
    text.write_bytes(data)
    code, out, err = place.run("--text", text, "--output", output, "--rate", 0, "--json")
    assert (code, err) == (0, "")
    value = json.loads(out)
    check_account(value)
    assert value["streams"] == 1
    assert (value["tokens_per_second"] is None) == (value["tokens_sent"] == 0) == (not data)
    assert output.read_bytes() == data


def test_a_slow_rate_is_kept_and_the_text_is_shown(place: Place) -> None:
    code, out, err = place.run("--rate", 200)
    assert (code, err) == (0, "")
    head, blank, *lines = out.splitlines()
    assert head.endswith(f"3 producers, 200 tokens/s each, seed {SEED}")
    assert blank == ""
    shown: dict[str, list[str]] = {name: [] for name in TEXTS}
    table = lines.index("", 1)
    for line in lines[:table]:
        name, _, text = line.partition(" ")
        shown[name].append(text.strip())
    for name, data in TEXTS.items():
        assert "".join(shown[name]).replace(" ", "") == data.decode().strip().replace(" ", "")
    rows = {line.split()[0]: line.split() for line in lines[table + 1 :] if line}
    assert set(rows) == {"STREAM", *TEXTS, "all", "Intact:"}
    for name in (*TEXTS, "all"):
        sent, received, lost = map(int, rows[name][1:4])
        assert (sent, lost) == (received, 0)
        assert len(rows[name]) == 8
    most = max(int(rows[name][1]) for name in TEXTS)
    assert float(rows["Intact:"][-4]) < 3 * 200 * most / (most - 1)


def test_the_same_seed_cuts_the_same_tokens(place: Place) -> None:
    runs = [json.loads(place.run("--rate", 0, "--json")[1])["tokens_sent"] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--rate", "fast"], 2, '"fast" is not a rate'),
        (["--rate", "-1"], 2, '"-1" is not a rate'),
        (["--rate", "nan"], 2, '"nan" is not a rate'),
        (["--rate"], 2, "expected one argument"),
        (["--speed", "1"], 2, "unrecognized arguments: --speed 1"),
        (["--text", "{here}/none"], 1, 'cannot use "{here}/none": No such file or directory'),
        (["--text", "{here}"], 1, 'cannot use "{here}": Is a directory'),
        (["--text", "{here}/text", "--output", "{here}/none/out"], 1, 'cannot use "{here}/none/out": No such file'),
        (["--text", "{here}/text", "--output", "{here}"], 1, 'cannot use "{here}": Is a directory'),
        (["--text", "{here}/text", "--output", "{here}/text"], 2, "is the file of --text"),
        (["--text", "{here}/text", "--output", "/dev/full", "--rate", "0"], 1, "cannot write the output: No space"),
    ],
    ids=lambda value: " ".join(value).replace("{here}/", "") if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_a_code(place: Place, arguments: list[str], code: int, said: str) -> None:
    here = place.path.parent
    text = here / "text"
    text.write_bytes(mixed(100_000))
    result, out, err = place.run("--json", *(argument.format(here=here) for argument in arguments))
    assert (result, out) == (code, "")
    assert err.startswith("demo: ")
    assert said.format(here=here) in err
    assert err.count("\n") == 1
    assert text.read_bytes() == mixed(100_000)
    assert sorted(here.iterdir()) == [text, place.path]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_file_without_permission_is_one_line(place: Place) -> None:
    text = place.path.parent / "text"
    text.touch(mode=0)
    for arguments in (["--text", text], ["--output", text]):
        code, out, err = place.run("--json", *arguments)
        assert (code, out, err) == (1, "", f'demo: cannot use "{text}": Permission denied\n')


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_without_a_word_and_nothing_stays(place: Place, number: signal.Signals) -> None:
    output = place.path.parent / "out"
    demo = place.start_streaming("--output", output)
    demo.send_signal(number)
    _, err = demo.communicate(timeout=END_S)
    assert (demo.returncode, err) == (128 + number, b"")
    assert not output.exists()


def test_a_kill_takes_everything_along(place: Place) -> None:
    demo = place.start_streaming()
    family = {pid: os.pidfd_open(pid) for pid in place.processes()}
    assert len(family) == 4  # itself, the keeper, the daemon, the producer
    demo.kill()
    demo.communicate(timeout=END_S)
    for pid, pidfd in family.items():
        assert select.select([pidfd], [], [], END_S)[0], f"process {pid} lives on"
        os.close(pidfd)


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("-m clawd --runtime-dir", "demo: the daemon was ended by signal 9\n"),
        ("demo.writer", "demo: the producer of text failed: it ended with code -9\n"),
    ],
)
def test_the_death_of_a_part_is_told_and_nothing_stays(place: Place, victim: str, said: str) -> None:
    demo = place.start_streaming()
    os.kill(place.process(victim), signal.SIGKILL)
    _, err = demo.communicate(timeout=END_S)
    assert (demo.returncode, err.decode()) == (1, said)


def test_a_reader_who_has_enough_is_no_error_message(place: Place) -> None:
    demo = place.start_streaming()
    assert demo.stdout
    assert demo.stderr
    demo.stdout.close()
    assert demo.stderr.read() == b""
    assert demo.wait(END_S) == 1
    demo.stderr.close()


def test_a_daemon_that_cannot_start_says_why(place: Place) -> None:
    # the daemon's module alone is broken: what runs as `clawd` is this one
    broken = place.path.parent / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\nif '--runtime-dir' in sys.orig_argv: sys.exit('no memory today')\n"
    )
    before = os.environ.get("PYTHONPATH")
    path = os.fspath(broken) if not before else f"{broken}{os.pathsep}{before}"
    command = [sys.executable, "-m", "clawd.ctl.demo", "--json"]
    demo = subprocess.run(
        command, env={**place.environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=END_S
    )
    assert (demo.returncode, demo.stdout) == (1, "")
    assert demo.stderr.startswith("demo: cannot start a daemon: the daemon ended with code 1: ")
    assert demo.stderr.count("\n") == 1


@pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv" or "LD_PRELOAD" in os.environ, reason="scripts/demo is for the .venv it makes"
)
def test_the_script_takes_files_from_where_it_was_called(place: Place) -> None:
    here = place.path.parent
    (here / "text").write_bytes(mixed(1000))
    (here / "clawd").mkdir()  # must not be taken for the package
    (here / "clawd" / "__init__.py").write_text("raise SystemExit('the wrong clawd')\n")
    command = [ROOT / "scripts" / "demo", "--text", "text", "--output", "out", "--rate", "0", "--json"]
    demo = subprocess.run(command, cwd=here, env=place.environment, capture_output=True, text=True, timeout=END_S)
    assert demo.returncode == 0, demo.stderr
    check_account(json.loads(demo.stdout))
    assert (here / "out").read_bytes() == mixed(1000)


def test_help_fits_80_columns(place: Place) -> None:
    code, out, err = place.run("--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "--text F --output G --rate 0 --json" in out
