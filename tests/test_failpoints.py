# SPDX-License-Identifier: Apache-2.0
"""Killed after each copy, commit, ack, send and trim of a few streams: nothing is lost, doubled or changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clawd import _core
from counts import count
from tests.packages import ROOT, core_tree

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif("CLAWD_TEST_SANITIZED" in os.environ, reason="builds a core of its own"),
]


@pytest.mark.slow
def test_clawd_killed_at_any_failpoint_is_followed_by_one_that_has_everything(tmp_path: Path) -> None:
    tree = core_tree(tmp_path, "CLAW_FAILPOINTS")
    paths = os.pathsep.join(map(str, (tree, ROOT / "tests", ROOT)))
    run = subprocess.run(
        [sys.executable, ROOT / "tests" / "failpoints.py"],
        capture_output=True, text=True, cwd=tree, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    kills = [(name, int(number)) for name, number in (line.split() for line in run.stdout.splitlines())]
    assert [name for name, _ in kills] == [*(["copied", "committed", "acked", "sent"] * 2), "trimmed"]
    assert all(number >= 3 for _, number in kills), run.stdout
    count(sum(number for _, number in kills), "kills at failpoints")


def test_a_core_for_people_has_none() -> None:
    text = Path(_core.__file__).read_bytes()
    assert b"CLAWD_FAILPOINT" not in text
    assert b"claw_failpoint" not in text
