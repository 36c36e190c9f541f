# SPDX-License-Identifier: Apache-2.0
"""Who may do what: every operation by root, by the daemon's user, by one who is in the sockets' group only by
supplementary membership, and by nobody. The daemon is an ordinary user's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from clawd import protocol, stats
from clawd.consumer import Consumer
from clawd.ctl.client import Client
from clawd.errors import AttachError, AttachRefused, ClawdError, ControlError, ProducerError
from clawd.page import Page
from clawd.producer import Producer
from tests import become
from tests.daemon import PATIENCE_S, Daemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


class Who(NamedTuple):
    uid: int
    gid: int
    groups: list[int]


SERVER = Who(61001, 61002, [])
PEOPLE = {
    "root": Who(0, 0, []),
    "the daemon's user": SERVER,
    "a supplementary member": Who(61003, 61004, [61005, SERVER.gid]),
    "nobody": Who(65534, 65534, []),
}


class Observer(Consumer):
    _role = "observer"


class Admin(Consumer):
    _role = "admin"
    """What a client calls itself gives it no right."""


def produce(where: Path) -> str:
    with Producer("p", where) as producer:
        producer.open(f"by-{os.geteuid()}").close(block=PATIENCE_S)
    return "ok"


def read(kind: type[Consumer]) -> Callable[[Path], str]:
    def run(where: Path) -> str:
        with kind(where) as consumer:
            token = consumer.attach("live").read(PATIENCE_S)
        return "ok" if token is not None and token.text == "x" else "another token"

    return run


def cancel(kind: type[Consumer], stream: str) -> Callable[[Path], str]:
    def run(where: Path) -> str:
        with kind(where) as consumer:
            reading = consumer.attach(stream)
            assert reading.read(PATIENCE_S) is not None
            reading.cancel()
            reading.read(PATIENCE_S)
        return reading.end_reason or "not ended"

    return run


def ask(request: protocol.Message, answer: type[protocol.Message]) -> Callable[[Path], str]:
    def run(where: Path) -> str:
        with Client(where) as client:
            client.ask(request, answer)
        return "ok"

    return run


def look(where: Path) -> str:
    with Page(where) as page:
        return "ok" if stats.status(page, page.life())["pid"] else "no pid"


# operation: what it does, what root and the daemon's user get, what the group does. Nobody gets to nothing.
OPERATIONS: dict[str, tuple[Callable[[Path], str], str, str]] = {
    "attach a producer": (produce, "ok", "ok"),
    "attach a consumer": (read(Consumer), "ok", "ok"),
    "attach as admin": (read(Admin), "ok", "denied"),
    "tail as an observer": (read(Observer), "ok", "ok"),
    "cancel what one reads": (cancel(Consumer, "mine"), "cancelled", "cancelled"),
    "cancel as an observer": (cancel(Observer, "live"), "denied", "denied"),
    "cancel a stream by name": (
        ask(protocol.CancelStream("named"), protocol.StreamCancelled),
        "ok",
        "denied",
    ),
    "see the figures": (look, "ok", "ok"),
    "see the settings": (ask(protocol.Settings(), protocol.InEffect), "ok", "ok"),
    "reload": (ask(protocol.Reload(), protocol.Reloaded), "ok", "denied"),
    "stop": (ask(protocol.Stop(), protocol.Stopping), "ok", "denied"),
}


def code(error: Exception) -> str:
    """What a refusal comes down to: its code, or that there was nothing to reach."""
    if isinstance(error, AttachError | AttachRefused):
        return error.code
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, PermissionError) or "Permission denied" in str(error):
        return "unreachable"
    return "denied" if str(error).endswith("(denied)") else f"{type(error).__name__}: {error}"


def act(who: Who, operation: Callable[[Path], str], where: Path) -> str:
    """Fork, become `who`, do it: in this interpreter, for another user may not be able to load one."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        try:
            os.setgroups(who.groups)
            os.setresgid(who.gid, who.gid, who.gid)
            os.setresuid(who.uid, who.uid, who.uid)
            outcome = operation(where)
        except (ClawdError, ControlError, ProducerError, OSError) as error:
            outcome = code(error)
        except BaseException as error:
            outcome = repr(error)
        finally:
            os.write(tell, outcome.encode()[:4000])
            os._exit(0)
    os.close(tell)
    with open(told, "rb") as pipe:
        outcome = pipe.read().decode()
    os.waitpid(child, 0)
    return outcome


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Not pytest's directory, which every pytest that starts shuts to others."""
    with tempfile.TemporaryDirectory(prefix="clawd-door-") as directory:
        os.chmod(directory, 0o711)
        yield Path(directory)


@pytest.mark.parametrize("name", PEOPLE)
def test_everybody_may_do_what_is_theirs_and_no_more(open_path: Path, name: str) -> None:
    who = PEOPLE[name]
    runtime_dir = open_path / "run"
    runtime_dir.mkdir(mode=0o750)
    os.chown(runtime_dir, SERVER.uid, SERVER.gid)
    daemon = Daemon(runtime_dir, "--spool-bytes", "4M")
    words = daemon.command[daemon.command.index("clawd") + 1 :]
    daemon.command = become.command(SERVER.uid, SERVER.gid, "clawd.__main__", *words)
    with daemon:
        with Producer("engine", runtime_dir) as producer:
            for stream in [producer.open(stream) for stream in ("live", "mine", "named")]:
                stream.write("x")
            status = daemon.status()
            outcomes = {}
            for operation, (do, _, _) in OPERATIONS.items():
                outcomes[operation] = act(who, do, runtime_dir)
                if operation == "cancel what one reads" and outcomes[operation] != "cancelled":
                    assert daemon.streams()["mine"]["state"] == "live"
            if outcomes["stop"] != "ok":
                assert daemon.streams()["live"]["state"] == "live"
                assert (daemon.streams()["named"]["state"] == "live") == (outcomes["cancel a stream by name"] != "ok")
        if outcomes["stop"] == "ok":
            status["producers"] = 1  # the engine's ring stays for the next clawd
            daemon.await_stop(status)
    place = {"a supplementary member": 2, "nobody": 0}.get(name, 1)
    assert outcomes == {each: row[place] if place else "unreachable" for each, row in OPERATIONS.items()}
