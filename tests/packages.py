# SPDX-License-Identifier: Apache-2.0
"""Building and installing clawd as people do: a tree without git's data, a wheel, environments of several Pythons."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NO_INDEX = re.compile(r"Failed to establish a new connection|Temporary failure in name resolution|Read timed out")
WHERE = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.implementation.name]))"
# What this process was given must not leak into other environments
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "PIP_"))}


def run(*command: object, cwd: Path | None = None, code: int = 0, **environment: str) -> str:
    """What a command printed; it must end with `code`."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**CLEAN, **environment}, capture_output=True, text=True, timeout=240
    )
    if done.returncode and NO_INDEX.search(done.stdout + done.stderr):
        pytest.skip("no package index can be reached from here")
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def tree(directory: Path) -> Path:
    """The repository's files, without git's data and what was built."""
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    return directory


def core_tree(directory: Path, define: str) -> Path:
    """Our sources, with a core of its own that has this macro."""
    (directory / "clawd").mkdir()
    for entry in (ROOT / "clawd").iterdir():
        if entry.suffix not in (".so", ".o") and entry.name not in ("_core.c", "__pycache__"):
            (directory / "clawd" / entry.name).symlink_to(entry)
    command = [sys.executable, ROOT / "clawd/csrc/build.py", "--define", define, directory]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


def make_wheel(source: Path, directory: Path) -> Path:
    """A wheel of a tree or sdist, built with what is installed here."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", directory, source, cwd=directory)
    [wheel] = directory.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment of `python` that sees no package but its own."""

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        # Making one with pip takes seconds, so ours serves where it can: it may not know a later Python
        self._pip: list[object] = [sys.executable, "-m", "pip", "--python", self.python]
        if version(python) == sys.version_info[:2]:
            run(python, "-m", "venv", "--without-pip", directory)
        else:
            run(python, "-m", "venv", directory)
            self._pip = [self.python, "-m", "pip"]

    def install(self, *what: object) -> None:
        run(*self._pip, "install", "--quiet", "--disable-pip-version-check", *what)

    def run(self, program: str, *arguments: object, code: int = 0) -> str:
        # not in the current directory, where our own clawd/ may be
        return run(self.python, "-c", program, *arguments, cwd=self.directory, code=code)

    def packages(self) -> set[str]:
        names = "import importlib.metadata as m; print(*(row.metadata['Name'].lower() for row in m.distributions()))"
        return set(self.run(names).split()) - {"pip", "setuptools"}


def version(python: str) -> tuple[int, ...]:
    """(major, minor) of a CPython of at least 3.11 that can make environments, else nothing."""
    try:
        done = subprocess.run(
            [python, "-c", f"import ensurepip, venv; {WHERE}"], capture_output=True, text=True, timeout=30, env=CLEAN
        )
        major, minor, name = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ()
    return (major, minor) if name == "cpython" and (major, minor) >= (3, 11) else ()


def other_python() -> str:
    """A Python of another version than this one's; the test is skipped when there is none."""
    found = [f"/usr/bin/python3{minor}" for minor in ("", *(f".{number}" for number in range(11, 20)))]
    found += sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python3")), reverse=True)
    found += [path for number in range(11, 20) if (path := shutil.which(f"python3.{number}"))]
    for path in found:
        if os.path.exists(path) and version(path) not in ((), sys.version_info[:2]):
            return path
    pytest.skip(f"there is no other Python here than {sys.version_info[0]}.{sys.version_info[1]}, from 3.11 on")
