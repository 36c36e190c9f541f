# SPDX-License-Identifier: Apache-2.0
"""What people install: a producer's environment with cffi alone, one wheel for every Python, types, the header."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from clawd.consumer import Consumer
from clawd.producer import Producer
from tests.daemon import Daemon, until
from tests.history import History
from tests.packages import ROOT, Environment, make_wheel, other_python, run, tree, version

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif("CLAWD_TEST_SANITIZED" in os.environ, reason="a wheel is built without the sanitizers' preload"),
]

WRITE = """
import sys
from clawd import Producer
with Producer("foreign", sys.argv[1]) as producer:
    stream = producer.open(sys.argv[2])
    for text in sys.argv[3:]:
        stream.write(text, block=20)
    stream.close("stop", block=20)
assert producer.buffer_size == 131072
"""

READ = """
import sys
from clawd import Consumer
with Consumer(sys.argv[1]) as consumer:
    reading = consumer.attach(sys.argv[2])
    print("".join(token.text for token in reading), reading.end_reason)
"""


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An engine's: the wheel, and what it pulls in."""
    made = Environment(tmp_path_factory.mktemp("bare") / "venv")
    made.install(wheel)
    return made


def check_producer(environment: Environment, daemon: Daemon, history: History, stream: str) -> None:
    texts = ["Hel", "lo, ", "你", "好 🦞"]
    history.put(stream, *(text.encode() for text in texts))
    history.end(stream, "stop")
    with Consumer(daemon.runtime_dir) as consumer:
        reading = consumer.attach(stream)
        environment.run(WRITE, daemon.runtime_dir, stream, *texts)
        history.reading(stream).follow(reading)
    history.check()


def test_a_producer_needs_cffi_and_nothing_else(bare: Environment, daemon: Daemon, history: History) -> None:
    assert bare.packages() == {"clawd", "cffi", "pycparser"}
    check_producer(bare, daemon, history, "bare")


def test_a_producer_imports_no_more_than_it_needs(bare: Environment) -> None:
    program = "import sys, clawd.producer; print(*(name for name in sys.modules if name.startswith('clawd')))"
    mine = {"clawd", "clawd._core", "clawd._core.lib", "clawd.core", "clawd.errors", "clawd.flusher", "clawd.producer",
            "clawd.ring", "clawd.stream", "clawd.watcher"}  # fmt: skip
    assert set(bare.run(program).split()) == mine


@pytest.mark.parametrize("name", ["Consumer", "AsyncConsumer"])
def test_a_reader_without_pyzmq_is_told_what_to_install(bare: Environment, name: str) -> None:
    said = bare.run(f"from clawd import {name}", code=1).splitlines()[-1]
    assert said == "clawd.errors.ClawdError: reading tokens needs pyzmq; pip install 'clawd[consumer]'"


@pytest.mark.parametrize("command", ["clawd", "clawctl"])
def test_a_command_without_the_daemons_extra_says_what_to_install(
    bare: Environment, tmp_path: Path, command: str
) -> None:
    said = run(bare.directory / "bin" / command, "--runtime-dir", tmp_path, code=1)
    assert said.count("\n") == 1
    assert said.startswith(f"{command}: the module ")
    assert said.endswith(" is missing; run: pip install 'clawd[daemon]'\n")


def test_an_engine_in_c_builds_with_the_installed_header_alone(
    bare: Environment, daemon: Daemon, tmp_path: Path
) -> None:
    include = bare.run("import clawd; print(clawd.__path__[0])").strip()
    engine = tmp_path / "engine"
    run("gcc", "-std=c11", f"-I{include}", ROOT / "tests" / "engines" / "engine.c", "-o", engine)
    assert run(engine, daemon.runtime_dir, "installed", "1", "3", "4096", "0") == "installed-0 stop\n"


def test_its_types_serve_a_program_that_imports_it(bare: Environment, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        "from clawd import AsyncConsumer, Consumer, Producer, errors\n"
        "def answer(producer: Producer, consumer: Consumer) -> str:\n"
        "    stream = producer.open('s', meta={'model': 'm'})\n"
        "    kept: bool = stream.write('x', block=1.0)\n"
        "    hints = producer.hints\n"
        "    rate: int = hints.target_rate if hints else 0\n"
        "    for token in consumer.attach('s'):\n"
        "        print(token.text, kept, rate)\n"
        "    stream.close('stop')\n"
        "    return errors.RingFull('full').message\n"
        "async def read(consumer: AsyncConsumer) -> None:\n"
        "    async for token in consumer.attach('s'):\n"
        "        print(token.seq + 1)\n"
    )
    (tmp_path / "bad.py").write_text(
        "from clawd import Producer\n"
        "def answer(producer: Producer) -> None:\n"
        "    producer.open('s').write(5)\n"
        "    producer.open(name=None)\n"
        "    producer.hints.degrade\n"
    )
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", bare.python]
    check += [f"--cache-dir={tmp_path / 'cache'}"]
    assert run(*check, "good.py", cwd=tmp_path) == "Success: no issues found in 1 source file\n"
    wrong = run(*check, "bad.py", cwd=tmp_path, code=1)
    assert [line.split(":")[1] for line in wrong.splitlines()[:-1]] == ["3", "4", "5"]


def test_the_metadata_names_the_extras_and_what_is_needed(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
    head = archive.read(name).decode().split("\n\n")[0].splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in head if line.startswith("Requires-Dist: ")]
    assert [row for row in needed if "extra ==" not in row] == ["cffi>=1.15"]
    extras = {line.removeprefix("Provides-Extra: ") for line in head if line.startswith("Provides-Extra: ")}
    assert extras == {"consumer", "daemon", "kernel", "gateway", "test"}
    daemon = {row.split(">")[0] for row in needed if '"daemon"' in row}
    assert daemon == {"posix-ipc", "pyzmq", "rich", "systemd-python"}
    assert {"License-Expression: Apache-2.0", "Requires-Python: >=3.11"} <= set(head)


@pytest.fixture(scope="module")
def foreign(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Another Python's, with what readers need."""
    python = other_python()
    made = Environment(tmp_path_factory.mktemp("foreign") / "venv", python)
    made.install(f"{wheel}[consumer]")
    assert version(str(made.python)) == version(python) != sys.version_info[:2]
    return made


@pytest.mark.slow
def test_the_wheel_serves_another_python_on_both_ends(foreign: Environment, daemon: Daemon, history: History) -> None:
    check_producer(foreign, daemon, history, "foreign")
    with Producer("native", daemon.runtime_dir) as producer:
        stream = producer.open("native")
        stream.write("from here, 你好")
        stream.close("length")
    assert foreign.run(READ, daemon.runtime_dir, "native") == "from here, 你好 length\n"


def test_a_producer_of_another_python_that_dies_is_noticed(foreign: Environment, daemon: Daemon) -> None:
    program = f"import os\n{WRITE}".replace('stream.close("stop", block=20)', "os.kill(os.getpid(), 9)")
    with Consumer(daemon.runtime_dir) as consumer:
        reading = consumer.attach("dies")
        foreign.run(program, daemon.runtime_dir, "dies", "last words", code=-9)
        assert [token.text for token in reading] == ["last words"]
        assert reading.end_reason == "producer_lost"
    until(lambda: daemon.status()["producers"] == 0, "its ring's end")


@pytest.mark.slow
def test_pip_installs_a_tree_without_gits_data(tmp_path: Path) -> None:
    made = Environment(tmp_path / "venv")
    made.install(tree(tmp_path / "tree"))
    assert made.packages() == {"clawd", "cffi", "pycparser"}
    made.run("import clawd.producer")


def test_the_profiles_of_tuning_come_along(wheel: Path) -> None:
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("clawd/kernel/profiles/")}
    assert names == {"60-clawd.conf", "low-latency.conf", "shared-host.conf", "wan.conf"}
    assert "clawd/kernel/weights.conf" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    backend = "import sys; sys.path.insert(0, 'scripts'); import build_backend; build_backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", backend, tmp_path, cwd=source)
    shutil.rmtree(source)
    [sdist] = tmp_path.glob("*.tar.gz")
    again = make_wheel(sdist, tmp_path)
    assert again.name == wheel.name
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["tar", "tzf", sdist], capture_output=True, text=True, check=True).stdout
    assert "/tests/" not in listed
