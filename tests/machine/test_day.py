# SPDX-License-Identifier: Apache-2.0
"""An operator's day: tokens flow for another user at once, and go on through whatever is done to the service."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from host import Traffic, entries, figure, pid, run, shown, until


def in_effect(key: str) -> str:
    rows = json.loads(run("clawctl", "config", "--json").stdout)["settings"]
    return str(next(row["text"] for row in rows if row["key"] == key))


def test_users_of_the_group_write_and_read_at_once() -> None:
    run("systemctl", "stop", "clawd")
    run("systemctl", "enable", "--now", "clawd")
    with Traffic("at-once") as traffic:
        traffic.finish()
    run("systemctl", "disable", "clawd")


def test_without_the_helper_tokens_flow_and_status_says_why() -> None:
    run("systemctl", "stop", "clawd-kernel")
    run("systemctl", "restart", "clawd")
    with Traffic("alone") as traffic:
        assert "clawd-kernel: it is not running" in run("clawctl", "status").stdout
        traffic.finish()


def test_a_user_outside_the_group_is_refused_with_what_to_do() -> None:
    for call in ("Producer(name='x')", "Consumer()"):
        code = f"from clawd import Producer, Consumer; {call}"
        refused = run("/opt/clawd/bin/python", "-I", "-c", code, user="stranger", check=False)
        assert refused.returncode == 1
        last = refused.stderr.splitlines()[-1]
        assert "/run/clawd/control.sock" in last
        assert "Permission denied; this user is not of clawd's group: usermod -aG clawd" in last
    refused = run("clawctl", "status", user="stranger", check=False)
    assert refused.returncode in (1, 3)
    assert len(refused.stderr.splitlines()) == 1
    assert "Permission denied; this user is not of clawd's group" in refused.stderr


def test_the_journal_is_searchable_by_stream_producer_and_reason() -> None:
    with Traffic("searched", streams=1) as traffic:
        run("clawctl", "cancel", "searched-0")
        cancelled = until(lambda: entries("STREAM=searched-0", "REASON=cancelled"), "the cancel in the journal")
        assert [entry["_SYSTEMD_UNIT"] for entry in cancelled] == ["clawd.service"]
        assert cancelled[0]["PRODUCER"] == "searched"
        del traffic
    until(lambda: entries("PRODUCER=searched", "REASON=left"), "the producer's end in the journal")
    assert entries("PRODUCER=searched")[0]["MESSAGE"].startswith("producer attached")


def test_a_reload_of_a_bad_file_changes_nothing_and_says_why(no_drop_ins: None) -> None:
    drop_in = Path("/etc/clawd/clawd.conf.d/bad.conf")
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text("[stream]\nkeep = 5min\nbuffer_size = 5\n")
    before = pid()
    run("journalctl", "--sync")
    failed = run("systemctl", "reload", "clawd", check=False)
    assert failed.returncode != 0
    told = [entry["MESSAGE"] for entry in entries("_SYSTEMD_UNIT=clawd.service")]
    assert any(f"{drop_in}:3" in line and "buffer_size" in line for line in told[-5:]), told[-5:]
    assert (pid(), shown("clawd", "ActiveState")) == (before, "active")
    assert "bad.conf:3" in shown("clawd", "StatusText")
    assert in_effect("keep") == "1min"

    drop_in.write_text("[stream]\nkeep = 5min\n")
    run("systemctl", "reload", "clawd")
    assert pid() == before
    assert shown("clawd", "StatusText") == ""
    assert in_effect("keep") == "5min"


def test_a_start_with_a_bad_file_fails_once_and_says_why(no_drop_ins: None) -> None:
    drop_in = Path("/etc/clawd/clawd.conf.d/bad.conf")
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text("[stream]\nbuffer_size = 5\n")
    assert run("systemctl", "restart", "clawd", check=False).returncode != 0
    assert (shown("clawd", "ActiveState"), shown("clawd", "NRestarts")) == ("failed", "0")
    told = [entry["MESSAGE"] for entry in entries("_SYSTEMD_UNIT=clawd.service")]
    assert any("bad.conf:2" in line for line in told[-5:])
    drop_in.unlink()
    run("systemctl", "start", "clawd")


def test_killed_in_the_middle_of_fifty_streams_it_loses_nothing() -> None:
    with Traffic("killed", streams=50, interval_s=0.2) as traffic:
        for _ in range(3):
            before = pid()
            run("systemctl", "kill", "-s", "KILL", "clawd")
            until(lambda: pid() not in (0, before) and shown("clawd", "ActiveState") == "active", "the next clawd")  # noqa: B023
        verdict = traffic.finish()
    figure("killed three times: longest silence of 50 streams, ms", round(verdict["silence_ms"]))


def test_stop_then_start_keeps_streams() -> None:
    with Traffic("stopped", streams=10) as traffic:
        run("systemctl", "stop", "clawd")
        assert shown("clawd", "ActiveState") == "inactive"
        run("systemctl", "start", "clawd")
        traffic.finish()


def test_a_hung_loop_is_ended_and_started_again_by_the_watchdog() -> None:
    with Traffic("hung", streams=5) as traffic:
        before = pid()
        os.kill(before, signal.SIGSTOP)
        until(lambda: pid() not in (0, before), "the watchdog")
        hung = entries("_PID=1", "UNIT=clawd.service")
        assert any("Watchdog timeout" in entry["MESSAGE"] for entry in hung[-12:]), [e["MESSAGE"] for e in hung[-12:]]
        traffic.finish()


def test_doctor_says_that_all_is_well_and_what_is_not() -> None:
    well = run("clawctl", "doctor")
    assert not [line for line in well.stdout.splitlines() if line.startswith(("warn", "fail"))], well.stdout
    assert "clawd-kernel runs" in well.stdout
    stopped = 0

    def sees() -> bool:
        """The watchdog may be faster than a doctor in emulation: then the next clawd is stopped."""
        nonlocal stopped
        stopped = pid()
        os.kill(stopped, signal.SIGSTOP)
        told = run("clawctl", "doctor", check=False)
        return told.returncode == 1 and "is stopped" in told.stdout

    try:
        until(sees, "a doctor that sees it")
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    until(lambda: run("clawctl", "doctor", check=False).returncode == 0, "a doctor that is content again")


@pytest.mark.parametrize("shell", ["bash"])
def test_the_shell_completes(shell: str) -> None:
    script = "source /usr/share/bash-completion/completions/clawctl; COMP_WORDS=(clawctl st); COMP_CWORD=1; _clawctl;"
    done = run(shell, "-c", script + 'echo "${COMPREPLY[@]}"')
    assert done.stdout.split() == ["status", "streams", "stop"]


def test_the_gateway_serves_streams_and_figures() -> None:
    run("systemctl", "start", "clawd-gateway")
    try:
        with Traffic("over-http", streams=1) as traffic:
            with urllib.request.urlopen("http://127.0.0.1:8080/metrics", timeout=60) as answer:
                assert b"clawd_" in answer.read()
            traffic.finish()
        assert (shown("clawd-gateway", "ActiveState"), shown("clawd-gateway", "NRestarts")) == ("active", "0")
    finally:
        run("systemctl", "stop", "clawd-gateway")
