# SPDX-License-Identifier: Apache-2.0
"""The rows of mutants.py still fit the sources they break; whether the tests catch them is that script's to say."""

from __future__ import annotations

from pathlib import Path

import pytest

import clawd
from mutants import MUTANTS, Mutant

pytestmark = pytest.mark.plain


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_breaks_is_there_once(mutant: Mutant) -> None:
    text = (Path(clawd.__file__).parent / mutant.file).read_text()
    assert text.count(mutant.old) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_test_that_must_catch_it_is_there(mutant: Mutant) -> None:
    file, _, name = mutant.test.partition("::")
    text = (Path(__file__).parent / file).read_text()
    assert f"def {name.partition('[')[0]}(" in text
