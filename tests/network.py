# SPDX-License-Identifier: Apache-2.0
"""A network namespace of a test's own, and what of this host tuning could touch, to see that it was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd.kernel.knobs import KNOBS

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{os.getcwd()}:{Path(__file__).resolve().parents[1]}"}
"""clawd is that of the current directory, which may be a mutant's; the tests are these."""


def _can_unshare() -> bool:
    return subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


NEEDED = pytest.mark.skipif(not _can_unshare(), reason="needs the right to make network namespaces (root)")
SYSCTLS = "cd /proc/sys/net && grep -rs '' ipv4/tcp_* ipv4/ip_local_port_range core/ | sort"
QUEUES = "tc qdisc show; for d in $(ls /sys/class/net); do tc class show dev $d; tc filter show dev $d; done"


def snapshot() -> str:
    """Of the namespace this process is in."""
    words = ["sh", "-c", f"{SYSCTLS}; {QUEUES}; cat /sys/fs/cgroup/*.slice/cpu.weight 2>/dev/null"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


class Namespace:
    """Held by a process, so that nothing of it is left when that is gone."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.holder = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "ip link set lo up && echo ready && exec sleep 3600"], stdout=subprocess.PIPE
        )
        assert self.holder.stdout
        assert self.holder.stdout.readline() == b"ready\n"
        self.enter = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net"]

    def run(self, *words: str | Path, code: int = 0, **more: Any) -> str:
        run = subprocess.run(
            [*self.enter, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=50,
            env=ENVIRONMENT,
            check=False,
            **more,
        )
        assert run.returncode == code, run.stdout + run.stderr
        assert "Traceback" not in run.stderr, run.stderr
        return run.stdout + run.stderr

    def python(self, program: str, *words: str | Path) -> str:
        return self.run(sys.executable, "-c", program, *words)

    def tune(self, *words: str, code: int = 0) -> str:
        return self.run(*self.command(*words), code=code)

    def command(self, *words: str) -> list[str]:
        directory = str(self.state / "no-clawd")
        return [sys.executable, "-m", "clawd.ctl.main", "tune", *words, "--state-dir", str(self.state),
                "--runtime-dir", directory]  # fmt: skip

    def told(self, *words: str, code: int = 0) -> dict[str, Any]:
        value = json.loads(self.tune(*words, "--json", code=code))
        assert isinstance(value, dict)
        return value

    def get(self, key: str) -> str:
        return self.run("cat", f"/proc/sys/{key.replace('.', '/')}").strip()

    def set(self, key: str, value: object) -> None:
        self.run("sh", "-c", f'echo "$1" >/proc/sys/{key.replace(".", "/")}', "sh", str(value))

    def values(self) -> dict[str, str]:
        text = self.run("sh", "-c", "cd /proc/sys && grep -Hs '' " + " ".join(k.replace(".", "/") for k in KNOBS))
        return {line.partition(":")[0].replace("/", "."): line.partition(":")[2] for line in text.splitlines()}

    def end(self) -> None:
        os.kill(self.holder.pid, signal.SIGKILL)
        self.holder.wait()
        assert self.holder.stdout
        self.holder.stdout.close()


@contextmanager
def namespace(state: Path) -> Iterator[Namespace]:
    made = Namespace(state)
    try:
        yield made
    finally:
        made.end()
