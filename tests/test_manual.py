# SPDX-License-Identifier: Apache-2.0
"""What is written about settings comes from their rows: nothing is left out, and what it says loads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clawd import manual
from clawd.config import SETTINGS, Config
from clawd.ctl.main import VERBS
from clawd.ctl.pages import PROGRAMS
from clawd.sources import Sources

pytestmark = pytest.mark.plain


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAWD_RUNTIME_DIR", raising=False)


def test_the_sample_file_gives_the_defaults_as_it_is_and_with_every_setting_in_force(tmp_path: Path) -> None:
    file = tmp_path / "clawd.conf"
    file.write_text(manual.sample())
    loaded = Sources(file).load()
    assert loaded.config == Config()
    assert not any(origin.line for origin in loaded.origins.values())
    file.write_text(re.sub(r"^#(?=\w)", "", manual.sample(), flags=re.MULTILINE))
    loaded = Sources(file).load()
    assert loaded.config == Config()
    assert [key for key, origin in loaded.origins.items() if not origin.line] == []
    assert [line for line in manual.sample().splitlines() if len(line) > 120] == []


def test_texts_do_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = manual.sample(), manual.man_page(), manual.table()
    monkeypatch.setenv("CLAWD_RUNTIME_DIR", "/my/own")
    assert (manual.sample(), manual.man_page(), manual.table()) == before


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_a_setting_is_explained_with_all_its_facts(row) -> None:
    text = manual.explanation(row)
    words = " ".join(text.split())
    for fact in (row.key, row.help[1:], row.detail, manual.default(row), row.allowed, row.flag, f"[{row.section}]"):
        assert fact in words
    assert ("a reload applies it" in words) == row.reload
    assert ("a restart is needed" in words) == (not row.reload)
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_the_overview_has_every_key_and_fits_any_terminal() -> None:
    for columns in (20, 80):
        lines = manual.overview(columns).splitlines()
        assert [line.split()[0] for line in lines if line[0] != " "] == [row.key for row in SETTINGS]
        assert max(map(len, lines)) <= max(columns, 20)


def test_the_manual_page_is_good_roff_and_has_every_setting() -> None:
    page = manual.man_page()
    for row in SETTINGS:
        assert f"\n.B {row.key}\n" in page
    if not shutil.which("groff"):
        pytest.skip("no groff here to set the page")
    command = ["groff", "-man", "-ww", "-Tutf8", "-P-c", "-P-b", "-P-u", "-rLL=100n"]
    run = subprocess.run(command, input=page.encode(), capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")
    words = "".join(run.stdout.decode().split())  # it breaks lines at any hyphen
    assert "clawd.conf-settingsofclawd" in words
    for row in SETTINGS:
        assert row.flag in words


def test_the_pages_of_both_commands_are_good_roff_and_have_every_option_and_verb() -> None:
    flags = {program: [row.flag for row in SETTINGS if program in row.programs] for program in PROGRAMS}
    for name, words in {**flags, "clawctl": [f".SS {verb}" for verb in VERBS]}.items():
        run = subprocess.run(
            [sys.executable, "-m", "clawd.ctl.main", "config", "man", name], capture_output=True, text=True, check=True
        )
        text = run.stdout.replace("\\-", "-")
        for word in words:
            assert f"{word}" in text
        if shutil.which("groff"):
            command = ["groff", "-K", "utf8", "-man", "-ww", "-Tutf8", "-z"]
            checked = subprocess.run(command, input=run.stdout, capture_output=True, text=True, check=False)
            assert (checked.returncode, checked.stderr) == (0, "")


def test_another_page_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "clawd.ctl.main", "config", "man", "x"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr == 'clawctl: no manual page "x"; there is clawd.conf, clawctl, clawd, clawd-gateway\n'
