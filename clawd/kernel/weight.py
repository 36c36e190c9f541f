# SPDX-License-Identifier: Apache-2.0
"""CPU weights of clawd's slices. Where systemd runs it is asked: it writes the value anew when a member restarts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from clawd.kernel.change import ABSENT, FORBIDDEN, Place, Trouble, trouble

KIND = "weight"
TIMEOUT_S = 20
NAME = re.compile(r"clawd[a-z_]*\.slice")


def find_mount(root: Path = Path("/")) -> Path:
    """Where cgroup v2 is. Raises Trouble when it has no cpu controller: on v1 there are no weights."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            mount = root / fields.split()[4].lstrip("/")
            try:
                controllers = (mount / "cgroup.controllers").read_text().split()
            except OSError:
                continue
            if "cpu" in controllers:
                return mount
    raise Trouble(ABSENT, "cgroup v2 lacks the cpu controller here", "boot with cgroup_no_v1=cpu, or without cgroup v1")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


class Weights:
    """The lever. A place's name is a slice's. `root` is another directory in tests, `mount` where slices are, else that
    is found. `resting` tells of a weight that is flipped just now what it goes back to, and that counts for tuning.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        mount: Path | None = None,
        resting: Callable[[str, str], str] = lambda _name, live: live,
    ) -> None:
        self._root = root
        self._mount = mount
        self._resting = resting

    def _path(self, place: Place) -> Path:
        if not NAME.fullmatch(place.name):
            raise Trouble(ABSENT, "this is no slice's name")
        path = (self._mount or find_mount(self._root)) / place.name
        if not path.is_dir():
            raise Trouble(ABSENT, f"there is no {place.name}", "it comes with clawd's units: scripts/install")
        return path / "cpu.weight"

    def read(self, place: Place) -> str:
        try:
            return self._resting(place.name, self._path(place).read_text().strip())
        except OSError as error:
            raise trouble(error, place.name) from error

    def write(self, place: Place, value: str) -> None:
        if (self._root / "run/systemd/system").is_dir() and shutil.which("systemctl"):
            self._ask_systemd(place, value)
        if self.read(place) != value:
            self.put(place, value)

    def put(self, place: Place, value: str) -> None:
        """Write it into the kernel alone: systemd puts its own back when a member of the slice restarts."""
        path = self._path(place)
        try:
            file = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                os.write(file, f"{value}\n".encode())
            finally:
                os.close(file)
        except OSError as error:
            raise trouble(error, f"{place.name} = {value}") from error

    def _ask_systemd(self, place: Place, value: str) -> None:
        words = ["systemctl", "set-property", "--runtime", place.name, f"CPUWeight={value}"]
        run = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if run.returncode != 0:
            raise Trouble(FORBIDDEN, f"{' '.join(words)}: {' '.join(run.stderr.split())}")

    def is_partial(self, live: str) -> bool:
        return False

    def operations(self, place: Place, live: str, value: str) -> Sequence[str]:
        return (f"systemctl set-property --runtime {place.name} CPUWeight={value}",)
