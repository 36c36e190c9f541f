# SPDX-License-Identifier: Apache-2.0
"""Shell completion, in the shells themselves; and the verb `demo`, which has the options of the demo."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawd.ctl.main import VERBS
from tests.daemon import PATIENCE_S
from tests.test_ctl import clawctl

pytestmark = pytest.mark.plain

COMMON = {"--help", "--runtime-dir", "--json"}


def script(shell: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "clawd.ctl.main", "completion", shell],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def completed(line: str, tmp_path: Path) -> set[str]:
    """What bash finds for a line that was typed as far as this."""
    file = tmp_path / "completion"
    file.write_text(script("bash"))
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}\n'
        'complete -p clawctl >&2; _clawctl; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    run = subprocess.run(
        ["bash", "--norc", "-uc", program, "bash", str(file), *line.split(" ")],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "complete -o default -F _clawctl clawctl\n")
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("clawctl ", {*VERBS, *COMMON, "--version"}),
        ("clawctl st", {"status", "streams", "stop"}),
        ("clawctl --runtime-dir /run/x pro", {"producers"}),
        ("clawctl --runtime-dir ", set()),
        ("clawctl status ", COMMON),
        ("clawctl stop --d", {"--discard", "--drain", "--dry-run"}),
        ("clawctl --json top --", {*COMMON, "--interval", "--count", "--rows"}),
        ("clawctl top --count ", set()),
        ("clawctl config sh", {"show"}),
        ("clawctl config explain kee", {"keep", "keepalive"}),
        ("clawctl completion ", {"bash", "zsh", "--help"}),
        ("clawctl demo --", {"--help", "--text", "--output", "--rate", "--seed", "--json"}),
        ("clawctl nonsense ", set()),
    ],
)
def test_bash_completes(line: str, found: set[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path) == found


def typed(shell: list[str], setup: str, keys: str, wanted: str) -> bool:
    """Whether an interactive shell makes `wanted` of `keys`."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "dumb"}
    )
    os.close(slave)
    seen = ""

    def await_text(text: str) -> bool:
        nonlocal seen
        deadline = time.monotonic() + PATIENCE_S
        while text not in seen:
            if time.monotonic() > deadline:
                print(seen, file=sys.stderr)
                return False
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 4096).decode(errors="replace")
        return True

    try:
        os.write(master, f"{setup}; echo rea''dy\n".encode())
        assert await_text("ready"), seen
        os.write(master, keys.encode())
        return await_text(wanted)
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_in_an_interactive_shell(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    file = tmp_path / "completion"
    file.write_text(script(shell))
    words = ["bash", "--norc", "-i"] if shell == "bash" else ["zsh", "-f", "-i"]
    setup = f"source {file}" if shell == "bash" else f"autoload -U compinit; compinit -D -u; source {file}"
    assert typed(words, f'{setup}; clawctl() {{ echo "got<$*>"; }}', "clawctl conf\tche\t\n", "got<config check>")


@pytest.mark.parametrize("words", [(), ("fish",), ("bash", "x")])
def test_another_shell_is_one_line_and_exit_2(words: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "clawd.ctl.main", "completion", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)


# --- demo ---


def test_demo_is_the_demo(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Good morning. " * 20)
    words = ["demo", "--text", str(text), "--output", str(tmp_path / "out"), "--rate", "0", "--seed", "7", "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "clawd.ctl.main", *words], capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout.splitlines()[-1])["intact"] is True
    assert (tmp_path / "out").read_bytes() == text.read_bytes()


def test_demo_has_no_use_for_a_runtime_directory(tmp_path: Path) -> None:
    run = clawctl(tmp_path, "demo")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert "--runtime-dir" in run.stderr
