# SPDX-License-Identifier: Apache-2.0
"""`clawctl doctor`: each fault it knows is made, found and named with what to do."""

from __future__ import annotations

import errno
import json
import os
import resource
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clawd.ctl import check, doctor
from clawd.ctl.check import SHM, Finding
from clawd.descriptors import files_needed
from clawd.page import Page
from clawd.producer import Producer
from tests.daemon import Daemon
from tests.rogue.producer import Rogue
from tests.test_ctl import clawctl

pytestmark = pytest.mark.plain


def found(runtime_dir: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the last finding of each check."""
    run = clawctl(runtime_dir, "doctor", "--json")
    assert run.stderr == ""
    value = json.loads(run.stdout)
    assert value["version"] == 1
    levels = {row["level"] for row in value["checks"]}
    assert value["result"] == ("fail" if "fail" in levels else "warn" if "warn" in levels else "ok")
    assert run.returncode == {"ok": 0, "warn": 4, "fail": 1}[value["result"]]
    for row in value["checks"]:
        if row["level"] != "info":
            assert bool(row["fix"]) == (row["level"] != "ok"), "what is wrong says what to do"
        assert row["feature"] in ("relay", "trace", "tune", "priority", "tcp", "speed")
        assert row["level"] in ("ok", "info") or row["feature"] == "relay", "extras are no fault"
    return run.returncode, {row["check"]: row for row in value["checks"]}


def test_a_healthy_daemon_has_nothing_but_ok(daemon: Daemon) -> None:
    _, rows = found(daemon.runtime_dir)
    rows.pop("left_behind")  # other tests' and other people's daemons
    for name in ("remove_ipc", "disconnects", "ports"):  # this host's, and who runs the tests
        rows.pop(name)
    assert {row["level"] for row in rows.values() if row["feature"] == "relay"} <= {"ok", "info"}, rows
    assert list(rows) == [
        "runtime_dir", "daemon", "control_socket", "relay_socket", "answer", "wake_ups", "quarantines", "files",
        "first_token", "stalls",
        "memory", "file_limit", "epoll_pwait2", "pidfd", "zmq",
        "group", "file_size", "peer_pidfd", "headers", "bpf", "bcc", "tracing", "pressure", "cgroup", "tcp_fastopen",
        "kernel", "cores", "ram", "network", "disk",
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [80, 20])
def test_each_line_starts_with_its_level_and_fits(daemon: Daemon, columns: int) -> None:
    run = clawctl(daemon.runtime_dir, "doctor", columns=columns)
    lines = run.stdout.splitlines()
    assert {line.split()[0] for line in lines if not line.startswith(" ")} <= {"ok", "info", "warn", "fail"}
    assert [line for line in lines if len(line) > columns] == []


def test_without_a_runtime_directory_it_fails(tmp_path: Path) -> None:
    code, rows = found(tmp_path / "nowhere")
    assert (code, rows["runtime_dir"]["level"]) == (1, "fail")
    assert "answer" not in rows
    assert rows["epoll_pwait2"]["level"] == "ok", "the host is looked at all the same"


def test_a_runtime_directory_that_is_a_file_or_open_to_all_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check.check_directory(tmp_path / "file").level == "fail"
    tmp_path.chmod(0o777)
    finding = check.check_directory(tmp_path)
    assert (finding.level, finding.fix) == ("fail", f'chmod o-w "{tmp_path}"')
    tmp_path.chmod(0o750)
    assert check.check_directory(tmp_path).level == "ok"


def test_a_stopped_daemon_fails(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        code, rows = found(daemon.runtime_dir)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert (code, rows["daemon"]["level"]) == (1, "fail")
    assert rows["daemon"]["what"] == f"clawd, pid {daemon.pid}, is stopped"
    assert "answer" not in rows, "it is not waited for"


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_daemon_that_ended_fails(victim: Daemon, end: str) -> None:
    getattr(victim, end)()
    code, rows = found(victim.runtime_dir)
    assert (code, rows["daemon"]["level"]) == (1, "fail")


def test_sockets_that_were_changed_are_found(daemon: Daemon) -> None:
    (daemon.runtime_dir / "control.sock").chmod(0o600)
    code, rows = found(daemon.runtime_dir)
    assert (code, rows["control_socket"]["level"]) == (4, "warn")
    (daemon.runtime_dir / "control.sock").chmod(0o660)
    relay = daemon.runtime_dir / "relay.sock"
    aside = relay.rename(relay.with_name("aside"))
    code, rows = found(daemon.runtime_dir)
    assert (code, rows["relay_socket"]["level"]) == (1, "fail")
    relay.touch()
    assert check.check_socket(relay).level == "fail"
    relay.unlink()
    aside.rename(relay)


def test_a_quarantine_is_told(daemon: Daemon) -> None:
    with Rogue(daemon.runtime_dir) as rogue:
        rogue.publish(rogue.head + 32 * 1024 * 1024)
        rogue.await_end()
    code, rows = found(daemon.runtime_dir)
    assert (code, rows["quarantines"]["level"]) == (4, "warn")
    assert rows["quarantines"]["what"].startswith("1 producers broke")


def test_lost_wake_ups_are_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with Page(daemon.runtime_dir) as page:
        totals = page.totals()
        totals.rescued = 3
        monkeypatch.setattr(page, "totals", lambda: totals)
        rows = {finding.check: finding for finding in check.check_troubles(page)}
    assert (rows["wake_ups"].level, rows["quarantines"].level) == ("warn", "ok")


def test_a_daemon_takes_the_files_it_needs_and_one_that_cannot_is_told(start: Any, tmp_path: Path) -> None:
    need = files_needed(64, 1024)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with Daemon(tmp_path / "run", "--spool-bytes", "1M", "--stream-bytes", "64k") as daemon, Page(daemon.runtime_dir) as page:  # fmt: skip # noqa: E501
            assert f"{need}" in Path(f"/proc/{daemon.pid}/limits").read_text().split("Max open files")[1].split("\n")[0]
            assert check.check_files(page).level == "ok"
            subprocess.run(["prlimit", f"--pid={daemon.pid}", "--nofile=100:"], check=True)
            finding = check.check_files(page)
            assert (finding.level, f"LimitNOFILE={need}" in (finding.fix or "")) == ("warn", True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_low_hard_limit_of_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    finding = check.check_file_limit()
    assert (finding.level, "256 files" in finding.what) == ("warn", True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    assert check.check_file_limit().level == "ok"


class Sizes:
    """A statvfs result."""

    def __init__(self, total: int, free: int) -> None:
        self.f_frsize, self.f_blocks, self.f_bavail = 1, total, free


def test_too_little_shared_memory_is_told(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Sizes(64 << 20, 4 << 20))
    finding = check.check_memory(daemon.runtime_dir)
    assert (finding.level, finding.fix) == ("warn", f"mount -o remount,size=128m {SHM}")
    finding = check.check_memory(tmp_path / "nowhere")
    assert (finding.level, "--spool-bytes 1M" in (finding.fix or "")) == ("fail", True)
    monkeypatch.setattr(os, "statvfs", lambda path: Sizes(64 << 20, 60 << 20))
    assert check.check_memory(daemon.runtime_dir).level == "ok"
    assert check.check_memory(tmp_path / "nowhere").level == "fail", "a spool of 64M wants four times as much"


def test_a_kernel_without_pidfd_or_epoll_pwait2_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert check.check_pidfd().level == "fail"
    from clawd.core import Core, CoreError

    def fail(self: Core, timeout_ns: int) -> list[int]:
        raise CoreError("cannot wait: Function not implemented", errno.ENOSYS)

    monkeypatch.setattr(Core, "wait", fail)
    assert check.check_wait().level == "fail"


def test_an_old_zmq_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import zmq

    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 3))
    finding = check.check_zmq()
    assert (finding.level, "4.3.4" in finding.what) == ("fail", True)
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    assert check.check_zmq().level == "ok"


def left(instance: str, runtime_dir: Path, place: Path = SHM) -> list[Finding]:
    return [row for row in check.check_left_behind(runtime_dir, place) if instance in row.what]


def test_what_a_clawd_without_its_directory_left_is_named_with_how_to_remove_it(victim: Daemon, tmp_path: Path) -> None:
    home = victim.runtime_dir
    instance = victim.instance
    assert left(instance, tmp_path) == [], "it runs"
    victim.kill()
    assert left(instance, tmp_path) == [], "its directory is there: its next start sweeps"
    moved = home.rename(tmp_path / "gone")
    [finding] = left(instance, tmp_path)
    assert (finding.level, f'"{home}" is gone' in finding.what) == ("warn", True)
    assert (finding.fix or "").endswith(f"rm {SHM}/clawd-{instance}-*")
    moved.rename(home)


def test_objects_without_a_page_that_nobody_has_open_are_named(tmp_path: Path) -> None:
    instance = secrets.token_hex(8)
    (tmp_path / f"clawd-{instance}-{secrets.token_hex(8)}").write_bytes(bytes(4096))
    (tmp_path / "clawd-something-else").touch()
    [finding] = check.check_left_behind(tmp_path / "nowhere", tmp_path)
    assert (finding.level, finding.what) == (
        "warn", f"4k of shared memory of clawd {instance}: no process has them open",
    )  # fmt: skip
    own = tmp_path / "own"
    own.mkdir()
    (own / "instance").write_text(f"{instance}\n")
    [finding] = check.check_left_behind(own, tmp_path)
    assert finding.level == "ok", "its own are its own next start's"


def test_memory_that_a_producer_still_has_open_is_not_left_behind(daemon: Daemon, tmp_path: Path) -> None:
    instance = daemon.instance
    with Producer("p", daemon.runtime_dir):
        assert instance in check.mapped_instances()
        assert left(instance, tmp_path) == []


def test_what_a_hostile_page_tells_does_not_reach_the_terminal(tmp_path: Path) -> None:
    instance = secrets.token_hex(8)
    header = bytearray(check.ffi.sizeof("struct claw_page_header"))
    at = check.ffi.offsetof("struct claw_page_header", "runtime_dir")
    header[at : at + 10] = b"/x\x1b[31m\n\xff/"
    (tmp_path / f"clawd-{instance}-stats").write_bytes(header)
    findings = [vars(row) for row in check.check_left_behind(tmp_path / "nowhere", tmp_path)]
    shown = doctor.show({"checks": findings})
    assert "is gone" in " ".join(shown.split())
    assert "\x1b" not in shown
    (tmp_path / f"clawd-{instance}-stats").write_bytes(b"short")
    [finding] = check.check_left_behind(tmp_path / "nowhere", tmp_path)
    assert "no process has them open" in finding.what


def test_it_changes_nothing(daemon: Daemon) -> None:
    before = (daemon.everything(), sorted(daemon.runtime_dir.iterdir()), daemon.status()["totals"]["opened"])
    found(daemon.runtime_dir)
    assert (daemon.everything(), sorted(daemon.runtime_dir.iterdir()), daemon.status()["totals"]["opened"]) == before
