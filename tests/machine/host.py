# SPDX-License-Identifier: Apache-2.0
"""What the tests in the machine share: commands, systemd's word on a unit, the journal, streams that flow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

SOURCE = Path("/source")
RESULT = Path("/results/result")
OPT = Path("/opt/clawd")
CGROUP = Path("/sys/fs/cgroup")
PATIENCE_S = 120.0
"""How long a test waits for what must come. Emulation is slow; it is not waited out when all is well."""
UNITS = ("clawd.service", "clawd-kernel.service")


def run(
    *command: str, check: bool = True, user: str | None = None, timeout: float = 2 * PATIENCE_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Of `user` with all of that user's groups, else of root."""
    ran = subprocess.run(
        [*as_user(user), *command], capture_output=True, text=True, check=False, timeout=timeout, **options
    )
    if check:
        assert ran.returncode == 0, f"{' '.join(command)}: {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran


def as_user(user: str | None) -> list[str]:
    return ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--reset-env"] if user else []


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain for {what}"
        time.sleep(0.05)
    return found


def shown(unit: str, name: str) -> str:
    """A property of a unit as systemd has it."""
    return run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()


def pid(unit: str = "clawd") -> int:
    return int(shown(unit, "MainPID"))


def entries(*matches: str) -> list[dict[str, Any]]:
    """The journal's entries of this boot that match, oldest first."""
    run("journalctl", "--sync")
    text = run("journalctl", "-b", "-o", "json", "--no-pager", *matches).stdout
    return [json.loads(line) for line in text.splitlines()]


def cgroup_bytes(group: str, row: str) -> int:
    """A row of memory.stat."""
    for line in (CGROUP / group / "memory.stat").read_text().splitlines():
        name, value = line.split()
        if name == row:
            return int(value)
    raise AssertionError(f"no {row} in memory.stat")


def figure(name: str, value: object) -> None:
    """For the report of a run."""
    with (RESULT / "figures").open("a") as stream:
        stream.write(f"{name}: {value}\n")
    print(f"figure: {name}: {value}")


class Traffic:
    """Streams that an engine writes and a service reads, both of the user `engine`, until `finish`."""

    def __init__(
        self, prefix: str, streams: int = 3, interval_s: float = 0.05, *, within: tuple[str, ...] = (), **reader: str
    ) -> None:
        """`within`: a command before it. `reader`: what its client is made with."""
        command = [str(OPT / "bin/python"), "-P", str(SOURCE / "tests/machine/traffic.py"), prefix]
        command += ["--streams", str(streams), "--interval", str(interval_s)]
        command += ["--reader", json.dumps(reader)]
        environment = ["env", f"PYTHONPATH={SOURCE}/tests:{SOURCE}/tests/machine", "PYTHONDONTWRITEBYTECODE=1"]
        self._process = subprocess.Popen(
            [*within, *as_user("engine"), *environment, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout
        self._first = self._process.stdout.readline().strip()

    def __enter__(self) -> Traffic:
        assert self._first == "flowing", f"{self._first}\n{self._process.communicate()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):  # it has ended, and so has its reader
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def finish(self) -> dict[str, Any]:
        """Let the streams end. Fails unless everything that was written came, once and in order."""
        out, error = self._process.communicate("end\n", timeout=PATIENCE_S * 2)
        assert self._process.returncode == 0, error
        verdict: dict[str, Any] = json.loads(out.splitlines()[-1])
        assert verdict["complaints"] == []
        assert verdict["tokens"] > 0
        return verdict
