# SPDX-License-Identifier: Apache-2.0
"""Killed after every single instruction: a publish and a spool commit are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from counts import count_printed
from cprogram import CSRC, NATIVE, compile_c, core_sources, run_c

pytestmark = pytest.mark.plain  # it compiles what it kills


def kill(program: Path, sources: list[Path], at_least: int) -> None:
    # -z now: the dynamic linker's own steps at a first call are no news
    compile_c(program, [*sources, NATIVE / "step.c"], "-O2", "-Wl,-z,now")
    run = run_c(program, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    points = sum(int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("counted:"))
    assert points >= at_least, run.stdout
    count_printed(run.stdout)
    print(run.stdout)


def test_a_producer_killed_at_any_instruction_leaves_a_whole_record_or_none(tmp_path: Path) -> None:
    sources = [NATIVE / "kill_publish.c", NATIVE / "look.c", CSRC / "drain.c", CSRC / "guard.c"]
    kill(tmp_path / "kill_publish", sources, 1000)


@pytest.mark.slow
def test_clawd_killed_at_any_instruction_leaves_whole_records_and_gives_back_only_what_is_committed(
    tmp_path: Path,
) -> None:
    kill(tmp_path / "kill_commit", [NATIVE / "kill_commit.c", NATIVE / "restart.c", *core_sources()], 3000)
