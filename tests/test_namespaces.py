# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers in a user, mount and pid namespace that shares the runtime directory with clawd and no more:
what they need comes by descriptor, and their death is noticed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import clawd
from clawd import protocol
from clawd.consumer import Consumer
from clawd.producer import Producer
from tests import become
from tests.daemon import PATIENCE_S, Daemon, until
from tests.history import History
from tests.packages import ROOT
from tests.test_engines import built, tokens

NOBODY = 65534
UNSHARE_PID = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
UNSHARE = (*UNSHARE_PID, "--mount")
# A root of its own: the runtime directory at /run, an empty /dev/shm, and the paths given after "--", at their places
CAGE = r"""
set -eu
root=$1 runtime=$2
shift 2
mount -t tmpfs none "$root"
mkdir -p "$root/run" "$root/dev/shm" "$root/tmp"
mount --rbind "$runtime" "$root/run"
mount -t tmpfs none "$root/dev/shm"
while [ "$1" != -- ]; do
	if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; touch "$root$1"; fi
	mount --rbind "$1" "$root$1"
	shift
done
shift
exec chroot "$root" "$@"
"""


def as_nobody() -> tuple[str, ...]:
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups") if os.geteuid() == 0 else ()


WHO = {"root": tuple, "nobody": as_nobody}
"""Who makes the namespace. Without root the tests' own user stands for nobody."""


@pytest.fixture(params=WHO)
def user(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The command before `unshare` that makes its user."""
    if request.param == "root" and os.geteuid():
        pytest.skip("needs root")
    prefix = tuple(WHO[request.param]())
    for command in (*prefix[:1], UNSHARE[0]):
        if not shutil.which(command):
            pytest.skip(f"{command} is not installed")
    tried = subprocess.run([*prefix, *UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this host makes no user namespace for {request.param}: {tried.stderr.strip()}")
    return prefix


class Cage:
    """A process in namespaces of its own, until the block ends or it is killed."""

    def __init__(self, user: Sequence[str], root: Path, daemon: Daemon, paths: Sequence[object], *command: str) -> None:
        cage = ["sh", "-c", CAGE, "cage", root, daemon.runtime_dir, *paths, "--", *command]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(clawd.__file__).parent.parent),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        self.process = subprocess.Popen(
            [*user, *UNSHARE, *map(str, cage)],
            env=environment,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Cage:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def told(self) -> Any:
        assert self.process.stdout
        assert self.process.stderr
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)


@pytest.fixture
def world() -> Iterator[Path]:
    """A directory that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="clawd-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def daemon(world: Path) -> Iterator[Daemon]:
    """One that lets everybody in, as an operator does with a group."""
    with Daemon(world / "run", "--spool-bytes", "8M") as daemon:
        daemon.runtime_dir.chmod(0o755)
        for socket in (protocol.CONTROL_SOCKET, protocol.RELAY_SOCKET):
            (daemon.runtime_dir / socket).chmod(0o666)
        yield daemon


@pytest.fixture
def place(world: Path) -> Iterator[Path]:
    """Where a cage's root is mounted, in that namespace alone."""
    (world / "root").mkdir(mode=0o755)
    yield world / "root"
    assert list((world / "root").iterdir()) == [], "a mount was seen outside"


def pythons_paths() -> list[str]:
    """What a Python process of this test run reads, as paths to bind."""
    paths = [
        *(path for path in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache") if os.path.exists(path)),
        *(path for path in (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib")) if path),
        os.fspath(ROOT),
    ]
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path == other or path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


Caged = Callable[..., Cage]


@pytest.fixture
def caged(user: tuple[str, ...], place: Path, daemon: Daemon) -> Caged:
    """Starts caged.py in a cage."""
    if user and become.is_closed():
        pytest.skip(become.CLOSED)

    def start(what: str, stream: str) -> Cage:
        script = str(ROOT / "tests" / "rogue" / "caged.py")
        return Cage(user, place, daemon, pythons_paths(), sys.executable, "-B", script, what, "/run", stream)

    return start


def test_a_producer_that_shares_the_runtime_directory_alone_is_served_and_its_death_noticed(
    caged: Caged, daemon: Daemon, history: History
) -> None:
    history.put("s", b"out of ", b"the ca", "ge 🦞".encode())
    history.end("s", "stop")
    history.put("s-left", b"never closed")
    history.end("s-left", "producer_lost")
    with Consumer(daemon.runtime_dir) as consumer, caged("write", "s") as cage:
        whole, left = consumer.attach("s"), consumer.attach("s-left")
        seen = cage.told()
        assert seen["pid"] == 1
        assert seen["shm"] == []
        assert set(seen["root"]) <= {"run", "dev", "tmp"} | {path.split("/")[1] for path in pythons_paths()}
        history.reading("s").follow(whole)
        got = history.reading("s-left").follow(left, limit=1)
        assert daemon.status()["producers"] == 1
        cage.process.kill()
        got.follow(left)
    history.check()
    until(lambda: daemon.status()["producers"] == 0, "its ring's end")


def test_a_consumer_that_shares_the_runtime_directory_alone_reads_and_its_death_is_noticed(
    caged: Caged, daemon: Daemon
) -> None:
    with Producer("outside", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("into the ")
        stream.write("cage 🦞")
        stream.close("length")
        with caged("read", "s") as cage:
            seen = cage.told()
            assert (seen["text"], seen["end"]) == ("into the cage 🦞", "length")
            assert (seen["pid"], seen["shm"]) == (1, [])
            cage.process.kill()
            daemon.log.wait("client gone")


def test_an_engine_in_c_needs_the_runtime_directory_and_nothing_else_of_this_world(
    user: tuple[str, ...], place: Path, daemon: Daemon, history: History, tmp_path: Path
) -> None:
    engine = built(tmp_path, ROOT / "tests" / "engines" / "engine.c", "gcc", "-std=c11", "-static")
    shutil.copy(engine, daemon.runtime_dir)  # the one directory it has
    names = [f"static-{index}" for index in range(3)]
    for index, name in enumerate(names):
        history.put(name, *tokens(index, 300))
        history.end(name, "length" if index % 2 else "stop")
    with Consumer(daemon.runtime_dir) as consumer:
        readings = [consumer.attach(name) for name in names]
        with Cage(user, place, daemon, (), "/run/engine", "/run", "static", "3", "300", "4096", "0") as cage:
            output, errors = cage.process.communicate(timeout=PATIENCE_S)
        (daemon.runtime_dir / "engine").unlink()
        assert (output, errors) == ("static-0 stop\nstatic-1 length\nstatic-2 stop\n", "")
        for name, reading in zip(names, readings, strict=True):
            history.reading(name).follow(reading)
    history.check()


def test_a_clawd_that_cannot_see_its_producers_process_still_notices_its_death(
    tmp_path: Path, history: History
) -> None:
    """clawd in a pid namespace, the producer outside: it has no number there."""
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this host makes no user namespace: {tried.stderr.strip()}")
    history.put("s", b"seen from inside")
    history.end("s", "producer_lost")
    program = "import os, sys\nfrom clawd import Producer\np = Producer('outside', sys.argv[1])\ns = p.open('s')\n"
    program += "s.write('seen from inside')\nos.kill(os.getpid(), 9)"
    with Daemon(tmp_path / "run", "--spool-bytes", "8M", prefix=UNSHARE_PID) as daemon:
        with Consumer(daemon.runtime_dir) as consumer:
            reading = consumer.attach("s")
            command = [sys.executable, "-c", program, daemon.runtime_dir]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(clawd.__file__).parent.parent)
            assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
            history.reading("s").follow(reading)
        history.check()
        until(lambda: daemon.status()["producers"] == 0, "its ring's end")
        assert "pid=0" in daemon.log.wait("producer attached")
        status = daemon.status()
        os.kill(int(Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text()), signal.SIGTERM)
        daemon.await_stop(status)
