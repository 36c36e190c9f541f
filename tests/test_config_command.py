# SPDX-License-Identifier: Apache-2.0
"""`clawctl config` and `clawctl reload` as people run them: a process, a terminal's width, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clawd import manual
from clawd.config import DAEMON_SETTINGS, ROWS, SETTINGS
from tests.daemon import Daemon
from tests.test_sources import WECLAW

pytestmark = pytest.mark.plain

GOOD = "[stream]\nkeep = 20s # 保留\nbuffer_size = 64k\n"


def clawctl(*arguments: str | Path, columns: int = 80, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns), "CLAWD_RUNTIME_DIR": "/nonexistent/clawd"}
    command = [sys.executable, "-m", "clawd.ctl.main", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert "Traceback" not in run.stderr, run.stderr
    return run


def lines(run: subprocess.CompletedProcess[str], code: int = 0) -> list[str]:
    """What went to stdout, or on a failure to stderr, and nothing to the other."""
    assert run.returncode == code, run
    assert (run.stderr if code == 0 else run.stdout) == ""
    return (run.stderr if code else run.stdout).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "clawd.conf"
    made.write_text(GOOD)
    return made


@pytest.fixture
def daemon(start: Callable[..., Daemon], file: Path) -> Daemon:
    return start("--config", str(file), "--spool-bytes", "8M")


# --- check ---


def test_check_needs_no_daemon_and_tells_how_much_is_set(file: Path) -> None:
    assert lines(clawctl("config", "check", file)) == [f"good: 2 of {len(SETTINGS)} settings set in {file}"]
    (file.parent / "clawd.conf.d").mkdir()
    (file.parent / "clawd.conf.d" / "a.conf").write_text(WECLAW)
    assert lines(clawctl("config", "check", "clawd.conf", cwd=file.parent)) == [
        f"good: 6 of {len(SETTINGS)} settings set in {file}, {file}.d/a.conf"
    ]
    value = json.loads(clawctl("config", "check", file, "--json").stdout)
    assert value == {"version": 1, "ok": True, "files": [str(file), f"{file}.d/a.conf"], "errors": []}


def test_check_prints_a_line_an_error_and_exits_1(file: Path) -> None:
    file.write_text("[stream]\nkeep = soon\ntimeot = 1s\n")
    assert lines(clawctl("config", "check", file), 1) == [
        f'{file}:2: keep: "soon" is not a duration; write digits, then ns, us, ms, s, min or h, as in 50ms',
        f"{file}:3: timeot: no such setting; did you mean timeout?",
    ]
    run = clawctl("config", "check", file, "--json")
    assert (run.returncode, run.stderr) == (1, "")
    value = json.loads(run.stdout)
    assert value["ok"] is False
    assert value["errors"][0] == {
        "file": str(file),
        "line": 2,
        "key": "keep",
        "value": "soon",
        "message": f'{file}:2: keep: "soon" is not a duration',
        "hint": "write digits, then ns, us, ms, s, min or h, as in 50ms",
    }
    assert lines(clawctl("config", "check", file.parent / "none"), 1)[0].endswith("may clawd read it?")


# --- explain and default ---


@pytest.mark.parametrize("key", ["keep", "spool_bytes", "tcp_fastopen", "runtime_dir"])
def test_explain_tells_all_about_a_setting_within_80_columns(key: str) -> None:
    shown = lines(clawctl("config", "explain", key))
    assert shown == manual.explanation(ROWS[key], 80).splitlines()
    assert [line for line in shown if len(line) > 80] == []
    [row] = json.loads(clawctl("config", "explain", key, "--json").stdout)["settings"]
    assert (row["key"], row["flag"], row["applied_by"]) == (key, ROWS[key].flag, ROWS[key].applied)


def test_explain_alone_lists_every_setting() -> None:
    shown = lines(clawctl("config", "explain"))
    assert [line.split()[0] for line in shown] == [row.key for row in SETTINGS]
    assert [line for line in shown if len(line) > 80] == []


def test_default_is_a_file_that_check_likes(tmp_path: Path) -> None:
    file = tmp_path / "clawd.conf"
    file.write_text(clawctl("config", "default").stdout)
    assert lines(clawctl("config", "check", file)) == [f"good: 0 of {len(SETTINGS)} settings set in {file}"]
    assert clawctl("config", "man").stdout == manual.man_page()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("explain", "kep"), 'no setting "kep"; did you mean keep?'),
        (("explain", "\x1b[31m"), 'no setting "?[31m"; there is runtime_dir, '),
        (("shw",), 'no action "shw" of config; did you mean "show"?'),
        (("zzz",), 'no action "zzz" of config; there is show, check, explain, default'),
        (("show", "keep"), 'config show takes no "keep"'),
        (("check", "a", "b"), "unrecognized arguments: b"),
        (("check", "--no-such"), "unrecognized arguments: --no-such"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments: tuple[str, ...], complaint: str) -> None:
    [line] = lines(clawctl("config", *arguments), 2)
    assert line.startswith(f"clawctl: {complaint}")


def test_help_has_actions_and_an_example_within_80_columns() -> None:
    for verb in ("config", "reload"):
        shown = lines(clawctl(verb, "--help"))
        assert [line for line in shown if len(line) > 80] == []
        assert "example:" in shown
    assert {"config", "reload"} <= {line.split()[0] for line in lines(clawctl("--help")) if line.startswith("  ")}


def test_without_a_daemon_show_and_reload_exit_3(tmp_path: Path) -> None:
    for arguments in (("config",), ("config", "show", "--json"), ("reload",)):
        [line] = lines(clawctl(*arguments, "--runtime-dir", tmp_path), 3)
        assert line.startswith("clawctl: cannot reach clawd at")


# --- show and reload ---


def test_show_has_each_value_its_origin_and_what_the_files_say_instead(daemon: Daemon, file: Path) -> None:
    at = ("--runtime-dir", daemon.runtime_dir)
    shown = lines(clawctl("config", *at))
    assert shown[0].split() == ["KEY", "VALUE", "SET", "IN"]
    assert [line.split()[0] for line in shown[1:]] == [row.key for row in DAEMON_SETTINGS]
    assert [line for line in shown if len(line) > 80] == []
    rows = {line.split()[0]: line.split()[1:] for line in shown[1:]}
    assert rows["keep"][0] == "20s"
    assert rows["keep"][1].endswith("clawd.conf:2")
    assert rows["spool_bytes"] == ["8M", "--spool-bytes"]
    assert rows["timeout"] == ["50ms", "default"]

    file.write_text("[stream]\nkeep = 2h\nbuffer_size = 64k\nmax_streams = 32\n")
    shown = lines(clawctl("config", "show", *at))
    assert shown[0].split() == ["KEY", "VALUE", "FILES", "SAY", "SET", "IN"]
    assert [line for line in shown if len(line) > 80] == []
    rows = {line.split()[0]: line.split()[1:] for line in shown[1:] if line}
    assert rows["keep"][:2] == ["20s", "2h"]
    assert rows["max_streams"] == ["16384", "32", "default"]
    assert rows["spool_bytes"] == ["8M", "--spool-bytes"]
    assert "clawctl reload applies: keep" in shown
    assert "a restart is needed for: max_streams" in shown

    value = json.loads(clawctl("config", "show", "--json", *at).stdout)
    assert (value["version"], value["generation"], value["file"], value["file_errors"]) == (1, 1, str(file), [])
    keep = next(row for row in value["settings"] if row["key"] == "keep")
    assert keep == {
        "section": "stream",
        "key": "keep",
        "value": 20 * 10**9,
        "text": "20s",
        "origin": f"{file}:2",
        "applied_by": "reload",
        "file_text": "2h",
        "differs": True,
    }
    assert [row["key"] for row in value["settings"] if row["differs"]] == ["keep", "max_streams"]


def test_reload_tells_what_changed_and_what_waits(daemon: Daemon, file: Path) -> None:
    at = ("--runtime-dir", daemon.runtime_dir)
    assert lines(clawctl("reload", *at)) == ["generation 2; changed: nothing"]
    file.write_text("[stream]\nkeep = 2h\nmax_streams = 32\n")
    assert lines(clawctl("reload", *at)) == [
        "generation 3; changed: buffer_size, keep",
        "a restart is needed for: max_streams",
    ]
    assert "config     generation 3; a restart is needed for max_streams" in lines(clawctl("status", *at))
    value = json.loads(clawctl("reload", "--json", *at).stdout)
    assert value == {"version": 1, "generation": 4, "changed": [], "pending_restart": ["max_streams"], "errors": []}


def test_a_reload_with_errors_exits_1_with_a_line_each_and_show_and_status_say_so(daemon: Daemon, file: Path) -> None:
    at = ("--runtime-dir", daemon.runtime_dir)
    file.write_text("[stream]\nkeep = soon\ntimeot = 1s\n")
    shown = lines(clawctl("reload", *at), 1)
    assert [line.split(":")[1] for line in shown[:2]] == ["2", "3"]
    assert shown[2:] == ["clawctl: not reloaded, clawd goes on with its old configuration"]
    run = clawctl("reload", "--json", *at)
    assert (run.returncode, run.stderr) == (1, "")
    assert len(json.loads(run.stdout)["errors"]) == 2
    shown = lines(clawctl("config", *at))
    assert [line for line in shown if len(line) > 80] == []
    words = "".join("".join(shown).split())  # a long path is cut where the line ends
    assert f"thefileshaveerrorsnow;see:clawctlconfigcheck{file}" in words
    assert f'thelastreloadfailed:{file}:2:keep:"soon"isnotaduration' in words
    status = "".join(clawctl("status", *at).stdout.split())  # a long path is cut where the line ends
    assert f"configgeneration1;notreloaded:{file}:2:keep" in status
    value = json.loads(clawctl("config", "--json", *at).stdout)
    assert [row for row in value["settings"] if row["differs"] is not None] == []
    assert len(value["file_errors"]) == 2


def test_a_terminal_of_20_columns_and_a_closed_pipe_are_survived(daemon: Daemon) -> None:
    at = ("--runtime-dir", daemon.runtime_dir)
    shown = lines(clawctl("config", *at, columns=20))
    assert "20s" in "".join(shown)
    assert max(len(line) for line in lines(clawctl("config", "explain", "keep", columns=20))) <= 20
    command = f"{sys.executable} -m clawd.ctl.main config --runtime-dir {daemon.runtime_dir} | true"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.stderr == ""
    run = subprocess.run(["bash", "-c", command.replace("| true", ">&-")], capture_output=True, text=True)
    assert "Traceback" not in run.stderr
