# SPDX-License-Identifier: Apache-2.0
"""A producer and clawd's drain as threads on one mapping: no data race, no torn token, no sleep that a token does not
end. CLAWD_TEST_SECONDS makes the runs longer.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from counts import count_printed
from cprogram import CSRC, NATIVE, compile_c, run_c

pytestmark = pytest.mark.plain  # it compiles what races

SECONDS = os.environ.get("CLAWD_TEST_SECONDS", "1")
SOURCES = [NATIVE / "race.c", NATIVE / "race_producer.c", CSRC / "drain.c", CSRC / "guard.c"]


def race(program: Path, pace: str, *before: str) -> subprocess.CompletedProcess[str]:
    # before: a command that runs the program
    first, *rest = [*before, str(program), SECONDS, pace]
    return run_c(Path(first), *rest, timeout=float(SECONDS) + 40, TSAN_OPTIONS="halt_on_error=1:exitcode=66")


@pytest.mark.parametrize("pace", ["stream", "step"])
def test_every_token_comes_whole_and_ends_a_sleep(pace: str, tmp_path: Path) -> None:
    run = race(compile_c(tmp_path / "race", SOURCES, "-O2", "-pthread"), pace)
    assert run.returncode == 0, run.stderr
    count_printed(run.stdout)


@pytest.mark.parametrize("pace", ["stream", "step"])
def test_the_threads_share_nothing_but_what_they_release_and_acquire(pace: str, tmp_path: Path) -> None:
    # -Wno-tsan: it does not model the fences, which order no data here, but guard the sleep
    flags = ("-O1", "-pthread", "-fsanitize=thread", "-Wno-tsan")
    program = compile_c(tmp_path / "race", SOURCES, *flags)
    run = race(program, pace)
    if "unexpected memory mapping" in run.stderr:  # too much address randomisation for this sanitizer
        run = race(program, pace, "/usr/bin/setarch", "-R")
        if "FATAL: ThreadSanitizer" in run.stderr or "setarch" in run.stderr:
            pytest.skip("ThreadSanitizer needs less address randomisation: sysctl vm.mmap_rnd_bits=28")
    assert run.returncode == 0, run.stderr
    count_printed(run.stdout)
