# SPDX-License-Identifier: Apache-2.0
"""The three ordering edges as instructions: what tests on x86 cannot show, because it orders most by itself."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from counts import count
from cprogram import CSRC, NATIVE

pytestmark = pytest.mark.plain  # it compiles what it reads

HOST = platform.machine()
CROSS = "aarch64-linux-gnu-cpp"
ARM_HEADERS = Path("/usr/aarch64-linux-gnu/include")
FLAGS = ["-O2", "-std=gnu11", "-D_GNU_SOURCE", f"-I{CSRC}"]
EDGES = NATIVE / "edges.c"


def stdout_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def arm64(source: Path, target: Path) -> None:
    """Only a preprocessor's package is asked for, a tenth of a whole compiler: the compiler proper is in it."""
    if HOST == "aarch64":
        subprocess.run(["gcc", "-S", *FLAGS, str(source), "-o", str(target)], check=True)
        return
    if not shutil.which(CROSS) or not ARM_HEADERS.exists():
        pytest.skip("needs Debian's cpp-aarch64-linux-gnu and libc6-dev-arm64-cross (scripts/setup installs them)")
    compiler = stdout_of(CROSS, "-print-prog-name=cc1")
    own = stdout_of("gcc", "-print-file-name=include")  # stddef.h and the like, the same for all machines
    headers = ["-isystem", own, "-isystem", str(ARM_HEADERS)]
    subprocess.run([compiler, "-quiet", *FLAGS, *headers, str(source), "-o", str(target)], check=True)


def x86_64(source: Path, target: Path) -> None:
    if HOST != "x86_64":
        pytest.skip(f"this is {HOST}")
    subprocess.run(["gcc", "-S", *FLAGS, str(source), "-o", str(target)], check=True)


def function(assembly: str, name: str) -> str:
    found = re.search(rf"^{name}:\n(.*?)^\s*\.size\s+{name},", assembly, re.MULTILINE | re.DOTALL)
    assert found, f"{name} is not there"
    return found[1]


ARM_LOAD, ARM_STORE, ARM_FENCE = r"\tldar\t", r"\tstlr\t", r"\tdmb\tish\b"
X86_FENCE = r"\tlock or[lq]\t|\tmfence\b"


# (machine, source, function, what must be in it, in this order)
@pytest.mark.parametrize(
    ("compiler", "source", "name", "instructions"),
    [
        # publish: release store of head, acquire load of it
        (arm64, EDGES, "edge_publish", [ARM_STORE, ARM_FENCE]),
        (arm64, CSRC / "drain.c", "claw_drain_begin", [ARM_LOAD]),
        # ack: release store of ack_pos, acquire load of it
        (arm64, CSRC / "drain.c", "claw_drain_ack", [ARM_STORE]),
        (arm64, EDGES, "edge_room", [ARM_LOAD]),
        # sleep handshake: a full fence on both sides
        (arm64, EDGES, "edge_wake", [ARM_FENCE]),
        (arm64, CSRC / "wait.c", "claw_wait", [ARM_FENCE]),
        (arm64, CSRC / "drain.c", "claw_drain_has_data", [ARM_LOAD]),
        (x86_64, EDGES, "edge_wake", [X86_FENCE]),
        (x86_64, EDGES, "edge_publish", [X86_FENCE]),
        (x86_64, CSRC / "wait.c", "claw_wait", [X86_FENCE]),
        # the commit word of the spool, for a start after a crash
        (arm64, CSRC / "spool.c", "claw_spool_commit", [ARM_STORE]),
    ],
    ids=lambda value: getattr(value, "__name__", value) if isinstance(value, str) or callable(value) else "",
)
def test_the_edge_is_in_the_code(
    compiler: Callable[[Path, Path], None], source: Path, name: str, instructions: list[str], tmp_path: Path
) -> None:
    target = tmp_path / "edge.s"
    compiler(source, target)
    body = function(target.read_text(), name)
    at = 0
    for instruction in instructions:
        found = re.compile(instruction).search(body, at)
        assert found, f"{name} lacks {instruction!r} after offset {at}:\n{body}"
        at = found.end()
    count(1, "ordering edges in machine code")
