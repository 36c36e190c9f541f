# SPDX-License-Identifier: Apache-2.0
"""The README says what the code says."""

import ast
import re
from pathlib import Path

import pytest

from clawd import manual
from clawd.ctl.main import VERBS

pytestmark = pytest.mark.plain
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_settings_is_the_one_the_code_makes() -> None:
    found = re.search(r"<!-- settings: begin -->\n(.*)\n<!-- settings: end -->", README, re.DOTALL)
    assert found, f"put this between the markers:\n{manual.table()}"
    assert found[1] == manual.table(), f"put this between the markers:\n{manual.table()}"


def test_no_line_is_longer_than_120_columns_but_a_tables() -> None:
    assert [line for line in README.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_an_example_is_python(example: str) -> None:
    ast.parse(example)


def test_every_file_it_names_is_there() -> None:
    named = set(re.findall(r"(?<![\w/])(?:clawd|tests)/[\w./]*\w", README))
    assert "clawd/config.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_table_of_clawctl_has_every_verb() -> None:
    table = README.partition("\n## clawctl\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [verb for cell in cells for verb in re.findall(r"`(\w+)[^`]*`", cell)] == list(VERBS)
