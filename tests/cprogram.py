# SPDX-License-Identifier: Apache-2.0
"""Compiles C programs of tests/native and tests/fuzz against the C of the clawd that is being tested."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

import clawd
from clawd.csrc import build

TESTS = Path(__file__).resolve().parent
NATIVE = TESTS / "native"
CSRC = Path(clawd.__file__).parent / "csrc"
"""Of the clawd that is imported: a mutated or sanitized tree has its own."""
WARNINGS = ("-std=gnu11", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-D_GNU_SOURCE")
CORE = tuple(noun for noun in build.NOUNS if noun not in ("ring", "frame", "producer"))
"""clawd's side of the core, without the parts for its clients and the header that has no source."""
UNAVAILABLE = 77


def core_sources(csrc: Path = CSRC) -> list[Path]:
    """clawd's side of the core, without the parts made for Python."""
    return [csrc / f"{noun}.c" for noun in CORE]


def compile_c(target: Path, sources: list[Path], *flags: str, csrc: Path = CSRC, compiler: str = "gcc") -> Path:
    """Compile and link; the compiler's own words when that fails."""
    command = [compiler, *WARNINGS, "-I", str(csrc), "-I", str(NATIVE), *flags, "-o", str(target)]
    run = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True)
    assert run.returncode == 0, f"{shlex.join(command)}\n{run.stderr}"
    return target


def run_c(program: Path, *arguments: str, timeout: float = 50, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it. One that says that it cannot run here skips the test, with its reason."""
    # a sanitizer of the interpreter's is not one of the program's
    inherited = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    run = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=timeout, env=inherited | environment
    )
    if run.returncode == UNAVAILABLE:
        pytest.skip(run.stderr.strip() or f"{program.name} cannot run here")
    return run
