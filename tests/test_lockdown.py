# SPDX-License-Identifier: Apache-2.0
"""A kernel that is locked down is named as the reason, where it is one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from clawd.errors import HostError
from clawd.kernel import bpf, lockdown, tracefs

pytestmark = pytest.mark.plain


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lockdown, "STATE", tmp_path / "lockdown")
    return tmp_path / "lockdown"


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("[none] integrity confidentiality\n", ""),
        ("none [integrity] confidentiality\n", "integrity"),
        ("none integrity [confidentiality]\n", "confidentiality"),
        ("", ""),
        ("nonsense", ""),
        (None, ""),
    ],
)
def test_the_mode_is_the_one_in_brackets(state: Path, text: str | None, mode: str) -> None:
    if text is not None:
        state.write_text(text)
    assert lockdown.mode() == mode


def test_a_tracepoint_that_cannot_be_seen_is_the_locks_doing_where_there_is_one(state: Path) -> None:
    with pytest.raises(HostError, match=r"^this kernel has no tracepoint net/x$"):
        tracefs.attach(0, "net/x", 0)
    state.write_text("none integrity [confidentiality]\n")
    with pytest.raises(HostError, match="does not show tracepoint net/x: lockdown=confidentiality; boot without"):
        tracefs.attach(0, "net/x", 0)


@pytest.mark.parametrize(
    ("number", "locked", "reason"),
    [
        (errno.EPERM, True, "cannot open tracepoint net/x: lockdown=integrity; boot without"),
        (errno.EPERM, False, "cannot open tracepoint net/x: Operation not permitted; as root, with CAP_SYS_ADMIN"),
        (errno.EMFILE, True, "cannot open tracepoint net/x: Too many open files; as root"),
    ],
)
def test_a_refusal_is_the_locks_doing_where_it_can_be(
    state: Path, monkeypatch: pytest.MonkeyPatch, number: int, locked: bool, reason: str
) -> None:
    if locked:
        state.write_text("none [integrity] confidentiality\n")
    monkeypatch.setattr(tracefs.ctypes, "get_errno", lambda: number)
    monkeypatch.setattr(tracefs, "_libc", type("Libc", (), {"syscall": staticmethod(lambda *_: -1)}))
    with pytest.raises(HostError) as caught:
        tracefs.attach(0, "net/x", 7)
    assert str(caught.value).startswith(reason)


def test_bpf_that_is_refused_is_the_locks_doing_where_there_is_one(state: Path) -> None:
    error = Exception("Need super-user privileges to run")
    assert bpf._why(error)["error"] == "loading BPF needs root"
    state.write_text("none integrity [confidentiality]\n")
    assert bpf._why(error) == {"error": "the kernel refuses BPF: lockdown=confidentiality", "hint": lockdown.HINT}
