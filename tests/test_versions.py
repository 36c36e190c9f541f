# SPDX-License-Identifier: Apache-2.0
"""Peers of another layout or protocol version, older and newer, on either side: refused in words that name both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd import protocol
from clawd.consumer import Consumer
from clawd.core import lib
from clawd.csrc import build
from clawd.errors import AttachRefused, ControlError, ProtocolError, VersionMismatch
from clawd.producer import Producer
from tests.daemon import Daemon
from tests.packages import ROOT, core_tree
from tests.test_rogue import honest

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif("CLAWD_TEST_SANITIZED" in os.environ, reason="builds cores of its own"),
]
OURS = int(lib.CLAW_LAYOUT)
ATTACH = """
import sys
from clawd import Producer, errors
try:
    Producer("other", sys.argv[1])
except errors.AttachRefused as error:
    print(error.code, error, sep=": ")
"""


@pytest.fixture(scope="module", params=[OURS - 1, OURS + 1])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A layout that is not ours, and a tree whose core has it."""
    tree = core_tree(tmp_path_factory.mktemp(f"layout-{request.param}"), f"CLAW_TEST_LAYOUT={request.param}")
    return request.param, tree


@pytest.fixture
def other_daemon(other: tuple[int, Path], tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "other", "--spool-bytes", "8M", prefix=("env", "-C", str(other[1]))) as daemon:
        yield daemon


def engine(directory: Path, layout: int, runtime_dir: Path) -> str:
    """What an engine in C whose header has this layout says when it cannot attach."""
    text, count = re.subn(r"\bCLAW_LAYOUT = \d+", f"CLAW_LAYOUT = {layout}", build.header())
    assert count == 1
    (directory / "clawd_ring.h").write_text(text)
    program = directory / "engine"
    source = ROOT / "tests" / "engines" / "engine.c"
    subprocess.run(["gcc", "-std=c11", f"-I{directory}", source, "-o", program], check=True)
    done = subprocess.run([program, runtime_dir, "v", "1", "1", "4096", "0"], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


def said(theirs: int, ours: int) -> str:
    return f"it speaks layout {theirs}, this producer layout {ours}; upgrade the older one"


def test_a_producer_of_another_layout_is_refused_by_name(other: tuple[int, Path], daemon: Daemon) -> None:
    layout, tree = other
    with honest(daemon):
        command = [sys.executable, "-c", ATTACH, daemon.runtime_dir]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (
            f'layout: clawd refused producer "other": {said(OURS, layout)}\n',
            "",
        )
    daemon.log.wait("producer refused", f"layout {layout} is not served here, layout {OURS} is")
    assert daemon.status()["producers"] == 0


def test_a_daemon_of_another_layout_refuses_by_name(other: tuple[int, Path], other_daemon: Daemon) -> None:
    layout = other[0]
    with pytest.raises(AttachRefused) as caught:
        Producer("ours", other_daemon.runtime_dir)
    assert caught.value.code == "layout"
    assert str(caught.value) == f'clawd refused producer "ours": {said(layout, OURS)}'
    other_daemon.log.wait("producer refused", f"layout {OURS} is not served here, layout {layout} is")


def test_a_daemon_of_another_layout_refuses_an_engine_in_c(
    other: tuple[int, Path], other_daemon: Daemon, tmp_path: Path
) -> None:
    assert engine(tmp_path, OURS, other_daemon.runtime_dir).endswith(f": cannot attach: {said(other[0], OURS)}\n")


def test_two_of_the_same_other_layout_understand_each_other(other: tuple[int, Path], other_daemon: Daemon) -> None:
    program = "import sys; from clawd import Producer; Producer('p', sys.argv[1]).open('s').close('stop')"
    subprocess.run([sys.executable, "-c", program, other_daemon.runtime_dir], cwd=other[1], check=True)
    with Consumer(other_daemon.runtime_dir) as consumer:  # what a consumer speaks is not the ring's layout
        reading = consumer.attach("s")
        assert list(reading) == []
        assert reading.end_reason == "stop"


@pytest.mark.parametrize("layout", [OURS - 1, OURS + 1, 2**32 - 1])
def test_an_engine_in_c_of_another_layout_is_refused_by_name(daemon: Daemon, tmp_path: Path, layout: int) -> None:
    with honest(daemon):
        assert engine(tmp_path, layout, daemon.runtime_dir).endswith(f": cannot attach: {said(OURS, layout)}\n")


# --- clients

OTHERS = [protocol.VERSION - 1, protocol.VERSION + 1]
PATCH = "import sys; from clawd import protocol; protocol.VERSION = int(sys.argv.pop(1)); "


@pytest.mark.parametrize("version", OTHERS)
def test_a_client_refuses_a_daemon_of_another_version_by_name(tmp_path: Path, version: int) -> None:
    daemon = Daemon(tmp_path / "run", "--spool-bytes", "8M")
    program = PATCH + "from clawd.__main__ import main; sys.exit(main())"
    at = daemon.command.index("-m")
    daemon.command[at : at + 2] = ["-c", program, str(version)]
    with daemon, Consumer(daemon.runtime_dir) as consumer:
        with pytest.raises(ControlError) as caught:
            consumer.attach("s").read(20)
        assert str(caught.value) in (
            f"clawd speaks version {version}, this client {protocol.VERSION}; upgrade the older one",
            f"clawd refused this client: version {protocol.VERSION} is not spoken here, {version} is; "
            "upgrade the older one (bad_request)",
        )
        # figures need no hello: an operator's clawctl may be older or newer
        assert daemon.status()["pid"] == daemon.pid


@pytest.mark.parametrize("version", OTHERS)
def test_a_daemon_refuses_a_client_of_another_version_by_name(daemon: Daemon, version: int) -> None:
    program = PATCH + (
        "from clawd import Consumer, errors\n"
        "try:\n"
        "    with Consumer(sys.argv[1]) as consumer:\n"
        "        consumer.attach('s').read(20)\n"
        "except errors.ControlError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", program, str(version), daemon.runtime_dir]
    with honest(daemon):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout in (
        f"clawd speaks version {protocol.VERSION}, this client {version}; upgrade the older one\n",
        f"clawd refused this client: version {version} is not spoken here, {protocol.VERSION} is; "
        "upgrade the older one (bad_request)\n",
    )
    daemon.log.wait("peer broke a rule", f"version {version} is not spoken here")


@pytest.mark.parametrize("kind", [protocol.Hello, protocol.Welcome, protocol.Connected])
def test_a_messages_version_is_looked_at_before_its_fields(kind: type[protocol.Message]) -> None:
    later = json.dumps({"op": kind.op, "version": protocol.VERSION + 1, "shape": "new"}).encode()
    with pytest.raises(VersionMismatch, match=f"version {protocol.VERSION + 1} is not spoken here") as caught:
        protocol.decode(later, (kind,))
    assert (caught.value.theirs, caught.value.ours) == (protocol.VERSION + 1, protocol.VERSION)
    for wrong in (True, "2", None, [2]):
        with pytest.raises(ProtocolError) as fault:
            protocol.decode(json.dumps({"op": kind.op, "version": wrong}).encode(), (kind,))
        assert not isinstance(fault.value, VersionMismatch)
