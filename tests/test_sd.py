# SPDX-License-Identifier: Apache-2.0
"""Readiness: a real socket in systemd's place gets each message; where there is none, nothing happens."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd import sd

pytestmark = pytest.mark.plain


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield server


def test_each_call_is_one_message(systemd: socket.socket) -> None:
    before_us = time.monotonic_ns() // 1000
    assert sd.reloading() is None
    reloading, since = systemd.recv(4096).rstrip(b"\n").split(b"\n")
    assert reloading == b"RELOADING=1"
    assert before_us <= int(since.removeprefix(b"MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    calls = [sd.ready("2 producers"), sd.status("a\nREADY=0"), sd.watchdog(), sd.stopping()]
    assert calls == [None] * 4
    got = [systemd.recv(4096).rstrip(b"\n") for _ in calls]
    assert got == [b"READY=1\nSTATUS=2 producers", b"STATUS=a READY=0", b"WATCHDOG=1", b"STOPPING=1"]


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setitem(sys.modules, "systemd", None)
    assert sd.ready() is None


def test_a_missing_library_is_a_named_reason(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "systemd", None)
    assert sd.ready() == "notify: no systemd-python, install Debian's python3-systemd"


def test_a_dead_socket_is_a_named_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert sd.ready() == "notify: No such file or directory"


@pytest.mark.parametrize(
    ("timeout_us", "pid", "interval_ns"),
    [
        ("3000000", None, 1_500_000_000),
        ("3000000", "own", 1_500_000_000),
        ("3000000", "1", None),
        ("soon", None, None),
        ("0", None, None),
        (None, None, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time_and_only_by_the_watched_process(
    timeout_us: str | None, pid: str | None, interval_ns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WATCHDOG_USEC", timeout_us), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(os.getpid()) if value == "own" else value)
    assert sd.watchdog_interval_ns() == interval_ns


def test_the_watchdog_is_fed_by_turns_alone_and_not_by_each(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "8000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    now_ns = 100 * 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    heart = sd.Heart()
    systemd.setblocking(False)
    fed = []
    for second in range(10):
        now_ns = (100 + second) * 10**9
        for _ in range(3):
            heart.turned()
        with contextlib.suppress(BlockingIOError):
            while systemd.recv(100).rstrip() == b"WATCHDOG=1":
                fed.append(second)
    assert fed == [0, 2, 4, 6, 8]


def test_a_heart_that_nobody_listens_to_is_silent(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    systemd.setblocking(False)
    sd.Heart().turned()
    with pytest.raises(BlockingIOError):
        systemd.recv(100)
