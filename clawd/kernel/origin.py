# SPDX-License-Identifier: Apache-2.0
"""Who else sets sysctls: the files that are applied at boot, and programs that are known to write them."""

from __future__ import annotations

import fnmatch
import glob
from dataclasses import dataclass
from pathlib import Path

from clawd.kernel.sysctl import canonical

ROOT = Path("/")
PLACES = ("etc/sysctl.d", "run/sysctl.d", "usr/local/lib/sysctl.d", "usr/lib/sysctl.d", "lib/sysctl.d")
"""A file hides those of its name in later ones, see sysctl.d(5)."""
WRITERS = ("tuned", "bpftune", "cilium-agent", "systemd-network", "kubelet")


@dataclass(frozen=True)
class Line:
    """`key = value` in a file of sysctl.d. A key may have wildcards."""

    file: str
    line: int
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def boot_lines(root: Path = ROOT) -> list[Line]:
    """In the order in which they are applied at boot: of those for one key the last one wins."""
    files: dict[str, Path] = {}
    for place in PLACES:
        for path in (root / place).glob("*.conf"):
            files.setdefault(path.name, path)
    return [line for name in sorted(files) for line in _read(files[name], root)]


def _read(path: Path, root: Path) -> list[Line]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, value = line.partition("=")
        key = key.strip().removeprefix("-")
        if equals and not key.startswith(("#", ";")):
            found.append(Line(f"/{path.relative_to(root)}", number, _dotted(key), canonical(value)))
    return found


def _dotted(key: str) -> str:
    """As sysctl.d(5) has it: when the first separator is a slash, dots are part of names."""
    slash, dot = key.find("/"), key.find(".")
    if slash < 0 or 0 <= dot < slash:
        return key
    return key.translate({ord("/"): ".", ord("."): "/"})


def winner(lines: list[Line], key: str) -> Line | None:
    """The one that decides `key` at the next boot; a key written out goes before wildcards."""
    exact = [line for line in lines if line.key == key]
    if exact:
        return exact[-1]
    matching = [line for line in lines if "*" in line.key and fnmatch.fnmatchcase(key, line.key)]
    return matching[-1] if matching else None


def writers(root: Path = ROOT) -> list[str]:
    """Programs that run here and are known to write sysctls or queues."""
    found = []
    for path in map(Path, sorted(glob.glob(f"{root}/proc/[0-9]*/comm"))):
        try:
            name = path.read_text().strip()
        except OSError:
            continue  # ended meanwhile
        if name in WRITERS:
            found.append(f"{name} (pid {path.parent.name})")
    return found
