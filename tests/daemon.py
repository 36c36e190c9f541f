# SPDX-License-Identifier: Apache-2.0
"""A real clawd in a process of its own: started until READY=1, asked for its status, stopped and then searched for what
it must not leave. Events are awaited in its log, so that no test sleeps.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from clawd import protocol, stats
from clawd.ctl.client import Client
from clawd.errors import ControlError
from clawd.page import Page, stats_name

SANITIZED = bool(os.environ.get("CLAWD_TEST_SANITIZED"))
PATIENCE_S = 45.0 if SANITIZED else 20.0
"""How long a test waits for what must come; it is not waited out when all is well."""
SHM = Path("/dev/shm")
NOTHING = protocol.CancelStream("no stream of this name")
"""A request that changes nothing."""
FAULT = re.compile(r"Traceback|Sanitizer|runtime error:|Assertion|Fatal Python")


def until(condition: Callable[[], object], what: str) -> None:
    """Ask again until `condition` holds: for figures of the daemon, whose changes nothing announces."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain for {what}"
        os.sched_yield()


def keep_bytecode(directory: Path) -> None:
    """What is started from here on keeps what it compiles, as an installed clawd has it: a start is a third shorter."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(directory)


class Log:
    """The lines of a process's stderr as they come."""

    def __init__(self, fd: int) -> None:
        self.lines: list[str] = []
        self._grown = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._read, args=(fd,), daemon=True)
        self._thread.start()

    def _read(self, fd: int) -> None:
        with open(fd, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                with self._grown:
                    self.lines.append(line.rstrip("\n"))
                    self._grown.notify_all()
        with self._grown:
            self._over = True
            self._grown.notify_all()

    def find(self, *parts: str) -> list[str]:
        return [line for line in self.lines if all(part in line for part in parts)]

    def wait(self, *parts: str, count: int = 1) -> str:
        """The `count`-th line that holds all `parts`, once it is there."""
        with self._grown:
            self._grown.wait_for(lambda: self._over or len(self.find(*parts)) >= count, PATIENCE_S)
            found = self.find(*parts)
        assert len(found) >= count, f"no line {count} with {parts} in:\n{self}"
        return found[count - 1]

    def close(self) -> None:
        self._thread.join(PATIENCE_S)

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Daemon:
    """`with Daemon(directory, "--keep", "1s") as daemon:` serves `directory` until the block ends."""

    def __init__(self, runtime_dir: Path, *flags: str, prefix: Sequence[str] = ()) -> None:
        self.runtime_dir = runtime_dir
        # What this host has in /etc must not decide; a test that has a file says so again in its flags
        files = ("--config", os.devnull)
        self.command = [*prefix, sys.executable, "-m", "clawd", *files, "--runtime-dir", str(runtime_dir), *flags]
        self.started = False
        self.over = False

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None and not self.over:
                self.stop()
        finally:
            self.discard()

    # --- life ---

    def launch(self) -> None:
        """Start the process without waiting."""
        if self.started:
            self._notify.close()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"\0clawd-test-{secrets.token_hex(8)}"
        self._notify.bind(name)
        environment = {**os.environ, "NOTIFY_SOCKET": "@" + name[1:]}
        self.process = subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self.process.stderr
        self.log = Log(os.dup(self.process.stderr.fileno()))
        self.process.stderr.close()
        self.started, self.over = True, False

    def await_ready(self) -> bool:
        """True once READY=1 came, False if the process ended instead."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            while True:
                ready, _, _ = select.select([self._notify, pidfd], [], [], PATIENCE_S)
                assert ready, f"neither READY=1 nor an end within {PATIENCE_S:.0f} s:\n{self.log}"
                if self._notify in ready:
                    if b"READY=1" in self._notify.recv(4096).split(b"\n"):
                        return True
                else:
                    self.process.wait()
                    self.log.close()
                    return False
        finally:
            os.close(pidfd)

    def start(self) -> Daemon:
        self.launch()
        assert self.await_ready(), f"clawd ended with {self.process.returncode}:\n{self.log}"
        return self

    def refused(self) -> str:
        """Start one that must not come up: exit 1, one line. Returns the line."""
        self.launch()
        try:
            assert not self.await_ready(), "it came up"
            return self.await_refusal()
        finally:
            self.release()

    def await_refusal(self) -> str:
        assert self.process.returncode == 1, f"clawd ended with {self.process.returncode}:\n{self.log}"
        assert len(self.log.lines) == 1, f"more than one line:\n{self.log}"
        return self.log.lines[0]

    def kill(self) -> None:
        """SIGKILL: what it leaves behind stays."""
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.over = True
        self.check_log()

    def stop(self) -> None:
        """SIGTERM; all must have gone well, to the last."""
        status = self.status()
        self.process.send_signal(signal.SIGTERM)
        self.await_stop(status)

    def await_stop(self, status: dict[str, Any]) -> None:
        """The process was told to stop after it gave this `status`: see that it does so in order."""
        code = self.process.wait(PATIENCE_S)
        self.log.close()
        self.over = True
        self.check_log()
        assert code == 0, f"clawd ended with {code}:\n{self.log}"
        rescued = status["totals"]["rescued"]
        assert rescued == 0, f"{rescued} wake-ups were lost and found by a timeout"
        spool = [SHM / name for name in self.everything() if "-spool-" in name]
        assert sum(path.stat().st_size for path in spool) == status["spool_bytes"], f"spool left: {spool}"
        kept = len(spool) + 2 * status["producers"]
        assert len(self.everything()) == kept, f"shared memory left: {self.everything()}, {kept} objects were due"
        files = {path.name for path in self.runtime_dir.iterdir()}
        assert files == {"lock", "instance", "control.sock", "relay.sock"}, f"files left: {files}"

    def check_log(self) -> None:
        assert not [line for line in self.log.lines if FAULT.search(line)], f"a fault of clawd:\n{self.log}"

    def release(self) -> None:
        """End the process if it still runs. Its shared memory stays, which may be another daemon's of the directory."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self._notify.close()
        print(f"log of clawd {self.process.pid}:\n{self.log}", file=sys.stderr)  # pytest shows it when a test fails

    def discard(self) -> None:
        """End the process if it still runs, and take its shared memory away."""
        if self.started:
            self.release()
            for name in self.everything():
                with contextlib.suppress(FileNotFoundError):
                    (SHM / name).unlink()

    # --- looks ---

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def instance(self) -> str:
        path = self.runtime_dir / "instance"
        return path.read_text().partition("\n")[0] if path.exists() else "never-started"

    def objects(self) -> list[str]:
        """Names of this instance's shared memory for tokens."""
        return [name for name in self.everything() if name != stats_name(self.instance)]

    def everything(self) -> list[str]:
        """Names of all of this instance's shared memory."""
        return sorted(path.name for path in SHM.glob(f"clawd-{self.instance}-*"))

    def status(self) -> dict[str, Any]:
        """Figures of this moment: what came to clawd before is in them."""
        with Page(self.runtime_dir) as page:
            self._settle(page)
            return stats.status(page, page.life())

    def total(self, name: str) -> int:
        return int(self.status()["totals"][name])

    def streams(self) -> dict[str, dict[str, Any]]:
        with Page(self.runtime_dir) as page:
            self._settle(page)
            return {row["name"]: row for row in stats.streams(page)}

    def _settle(self, page: Page) -> None:
        """Wait until clawd has taken all that was there, and shown it: answers come before the turn they are in."""
        for _ in range(2):
            with Client(self.runtime_dir) as client, contextlib.suppress(ControlError):
                client.ask(NOTHING, protocol.StreamCancelled)
        beat = page.header().beat
        until(lambda: page.header().beat != beat, "a turn of clawd")

    def await_total(self, name: str, value: int) -> None:
        until(lambda: self.total(name) == value, f"{name} = {value}, which is {self.total(name)}")

    def private_bytes(self) -> int:
        """Memory of the daemon that is not shared: what a client can cost it."""
        rows = Path(f"/proc/{self.pid}/smaps_rollup").read_text().split("\n")
        return 1024 * sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))
