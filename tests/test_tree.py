# SPDX-License-Identifier: Apache-2.0
"""The slices and their weights: the file is sound and the units say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clawd.errors import HostError
from clawd.kernel import tree
from clawd.kernel.profile import SLICES

pytestmark = pytest.mark.plain
ROOT = Path(__file__).resolve().parent.parent


def test_units_have_the_weights_of_the_file_at_rest() -> None:
    branches = tree.load(ROOT / "cgroups/weights.conf")
    assert [branch.name for branch in branches] == list(SLICES)
    for branch in branches:
        text = (ROOT / "systemd" / branch.name).read_text()
        assert re.findall(r"^CPUWeight=(\d+)$", text, re.MULTILINE) == [str(branch.weights[0])]
        assert "-" not in branch.name, "a dash would put it below another slice"


def test_a_weight_is_raised_or_lowered_and_never_the_other_way() -> None:
    relay, background = tree.load()
    assert [relay.aim(level, 400) for level in range(3)] == [400, 1600, 3200]
    assert [relay.aim(level, 5000) for level in range(3)] == [5000, 5000, 5000]
    assert [background.aim(level, 25) for level in range(3)] == [25, 1, 1]
    assert background.aim(2, 1) == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[a.slice]\nrest = 1\nfirst = 2\n", "not as it was installed"),
        ("[a.slice]\nrest = x\n", "not as it was installed"),
        ("", "no weights"),
        ("[a.slice]\nrest = 1\npressure = 1\nfirst = 10001\n", "beyond 1 to 10000"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "weights.conf"
    path.write_text(text)
    with pytest.raises(HostError, match=what):
        tree.load(path)
