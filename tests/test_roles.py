# SPDX-License-Identifier: Apache-2.0
"""Roles on this host: by user and by supplementary group, for every kind of peer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clawd.errors import ConfigError
from clawd.server.access import Who, allows, peer_of
from clawd.units import format_names, parse_names
from tests.daemon import Daemon
from tests.test_ctl import let_in

pytestmark = pytest.mark.plain

Start = Callable[..., Daemon]
NOBODY, GROUP = 65534, 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def as_user(code: str, directory: Path, *groups: int) -> str:
    """What the code printed, run as nobody with these supplementary groups: loaded before it becomes that user."""
    prologue = (
        "import os, sys\nfrom pathlib import Path\nfrom clawd import protocol\nfrom clawd.consumer import Consumer\n"
        "from clawd.ctl.client import Client\n"
        "from clawd.errors import ClawdError\nfrom clawd.producer import Producer\n"
        f"os.setgroups({list(groups)}); os.setresgid({NOBODY}, {NOBODY}, {NOBODY})\n"
        f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\ndirectory = Path(sys.argv[1])\ntry:\n"
    )
    body = "".join(f"    {line}\n" for line in code.splitlines())
    program = f"{prologue}{body}    print('yes')\nexcept ClawdError as error:\n    print(error)\n"
    command = [sys.executable, "-c", program, str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


PRODUCE = "Producer('p', directory).close()"
CONSUME = "Consumer(directory).attach('s', wait=0).read(10)"
CANCEL = "Client(directory).ask(protocol.CancelStream('s'), protocol.StreamCancelled)"
RELOAD = "Client(directory).ask(protocol.Reload(), protocol.Reloaded)"


def opened(start: Start, *flags: str) -> Daemon:
    daemon = start("--spool-bytes", "4M", *flags)
    let_in(daemon)
    for name in ("control.sock", "relay.sock"):
        (daemon.runtime_dir / name).chmod(0o666)
    return daemon


@needs_root
def test_who_is_on_no_list_is_told_so_and_a_group_is_enough(start: Start) -> None:
    flags = [word for key in ("producers", "consumers", "observers", "admins") for word in (f"--{key}", f"@{GROUP}")]
    daemon = opened(start, *flags)
    for code, no in (
        (PRODUCE, "may not be a producer"),
        (CONSUME, "may not be a client as consumer"),
        (CANCEL, "admins may cancel"),
        (RELOAD, "admins may reload"),
    ):
        assert no in as_user(code, daemon.runtime_dir), code
        assert no not in as_user(code, daemon.runtime_dir, 7, GROUP), code
    assert as_user(RELOAD, daemon.runtime_dir, GROUP) == "yes"


@needs_root
def test_an_admin_is_a_matter_of_its_own(start: Start) -> None:
    daemon = opened(start)
    assert as_user(PRODUCE, daemon.runtime_dir) == "yes"
    assert "admins may reload" in as_user(RELOAD, daemon.runtime_dir)


def test_a_peer_is_known_with_its_groups() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        who = peer_of(left)
    assert (who.pid, who.uid) == (os.getpid(), os.geteuid())
    assert who.groups == frozenset((os.getegid(), *os.getgroups()))


def test_lists_of_names() -> None:
    who = Who(1, 12345, frozenset((7, 8)))
    for text, want in (
        ("any", True), ("none", False), ("12345", True), ("12346", False), ("@8", True), ("@9", False),
        ("nosuchuser @nosuchgroup", False), ("root @7", True), ("8", False), ("@12345", False),
    ):  # fmt: skip
        assert allows(parse_names(text), who) is want, text
        assert parse_names(format_names(parse_names(text))) == parse_names(text)
    assert allows((), Who(1, 0))
    for text in ("", "a,b", "any root", "@", "x" * 80, "a:b"):
        with pytest.raises(ConfigError):
            parse_names(text)
