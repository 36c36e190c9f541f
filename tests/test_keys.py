# SPDX-License-Identifier: Apache-2.0
"""Key files, and `clawctl keys`."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawd import keys
from clawd.errors import HostError

pytestmark = pytest.mark.plain


def relay(directory: Path, *words: str) -> Any:
    command = [sys.executable, "-m", "clawd.ctl.main", "keys", "relay", *words, "--keys-dir", str(directory / "keys")]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, timeout=60)


def told(directory: Path, *words: str) -> dict[str, Any]:
    run = relay(directory, *words, "--json")
    assert (run.returncode, run.stderr) == (0, "")
    return dict(json.loads(run.stdout))


def test_a_key_comes_is_listed_and_goes(tmp_path: Path) -> None:
    made = told(tmp_path, "new", "gw-1")
    file = tmp_path / "gw-1.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys" / "relay.key").stat().st_mode) == 0o600
    assert keys.read_pair(file).public == made["public"]
    assert keys.read_public(file) == made["public"]
    told(tmp_path, "new", "watcher", "--role", "observer", "--out", "elsewhere.key")
    listed = told(tmp_path, "list")
    assert [(each["name"], each["role"]) for each in listed["keys"]] == [("gw-1", "consumer"), ("watcher", "observer")]
    assert listed["server_public"] == made["server_public"]
    told(tmp_path, "revoke", "gw-1")
    assert [each["name"] for each in told(tmp_path, "list")["keys"]] == ["watcher"]
    told(tmp_path, "allow", "gw-2", str(file))
    assert told(tmp_path, "list")["keys"][0]["public"] == made["public"]


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    assert relay(tmp_path, "new", "a", "--dry-run").stdout.startswith("would make a key for a as consumer")
    assert list(tmp_path.iterdir()) == []
    told(tmp_path, "new", "a")
    assert relay(tmp_path, "revoke", "a", "--dry-run").stdout == "would revoke a\n"
    assert len(told(tmp_path, "list")["keys"]) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("list",), "there are no keys in"),
        (("new",), "keys relay new takes one NAME"),
        (("list", "x"), "keys relay list takes no name"),
        (("allow", "x"), "keys relay allow takes NAME and KEY"),
        (("allow", "x", "no-such-file"), 'cannot read the key "no-such-file"'),
        (("new", "../x"), "is no name for a key"),
        (("revoke", "nobody"), 'cannot revoke "nobody": there is none'),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    run = relay(tmp_path, *words)
    assert run.returncode == 1
    assert says in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_name_that_is_taken_is_not_given_again(tmp_path: Path) -> None:
    first = told(tmp_path, "new", "a")
    run = relay(tmp_path, "new", "a", "--out", "b.key")
    assert (run.returncode, 'there is a key "a" already' in run.stderr) == (1, True)
    assert keys.read_pair(tmp_path / "a.key").public == first["public"]
    assert not (tmp_path / "b.key").exists()
    told(tmp_path, "revoke", "a")
    assert "cannot write" in relay(tmp_path, "new", "a").stderr, "its file is still there"
    assert told(tmp_path, "list")["keys"] == []


def test_the_list_follows_what_is_in_the_directory(tmp_path: Path) -> None:
    keys.make_server(tmp_path)
    allow = keys.AllowList(tmp_path)
    assert allow.refresh()
    assert not allow.refresh()
    pair = keys.make_pair()
    keys.allow(tmp_path, keys.Allowed("a", pair.public, "consumer"))
    assert allow.find(pair.public) is None
    assert allow.refresh()
    assert allow.find(pair.public) == keys.Allowed("a", pair.public, "consumer")
    (tmp_path / "allow" / "bad").write_text("public = short\n")
    (tmp_path / "allow" / "king").write_text(f"public = {keys.make_pair().public}\nrole = admin\n")
    assert allow.refresh()
    assert len(allow.flaws) == 2
    assert [each.name for each in allow.all()] == ["a"]
    (tmp_path / "allow").rename(tmp_path / "gone")
    assert allow.refresh()
    assert allow.all() == [], "a directory that is not there allows nobody"


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    for text in ("", "public = x\n", "\xff", "secret = " + "a" * 40):
        (tmp_path / "k").write_text(text, encoding="latin-1")
        with pytest.raises(HostError):
            keys.read_pair(tmp_path / "k")
