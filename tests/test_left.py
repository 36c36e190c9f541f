# SPDX-License-Identifier: Apache-2.0
"""What a clawd left in shared memory: only its own, and as it left it, is taken over; and it can be given up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from clawd.consumer import Consumer
from clawd.core import lib
from clawd.errors import RingLost
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, SHM, Daemon
from tests.test_ctl import told
from tests.test_restart import ctl_of, poke, root, tell


def test_objects_of_another_instance_are_not_touched(daemon: Daemon) -> None:
    names = [f"/clawd-test-{os.getpid():016x}", f"/clawd-{daemon.instance}0-spool-0", f"/clawd-{'0' * 16}-stats"]
    others = [posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096) for name in names]
    try:
        daemon.kill()
        daemon.start()
        daemon.stop()
        assert told(daemon.runtime_dir, "stop", "--discard")["objects"] == 1
        assert all((SHM / other.name[1:]).exists() for other in others)
    finally:
        for other in others:
            os.close(other.fd)
            other.unlink()


def link(path: Path) -> None:
    (path.parent / path.name.replace("clawd-", "test-")).hardlink_to(path)


def symlink(path: Path) -> None:
    target = path.parent / path.name.replace("clawd-", "test-")
    path.rename(target)
    path.symlink_to(target)


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "mode": (lambda path: path.chmod(0o640), "mode 640"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), "bytes"),
    "empty": (lambda path: os.truncate(path, 0), "0 bytes"),
    "link": (link, "2 links"),
    "symlink": (symlink, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", ["spool-0", "data", "ctl"])
@pytest.mark.parametrize("case", SPOILED)
def test_an_object_that_is_not_as_it_was_left_is_removed(
    daemon: Daemon, kind: str, case: str, writer: Callable[[Daemon], subprocess.Popen[str]]
) -> None:
    spoil, reason = SPOILED[case]
    tell(writer(daemon), "x")
    daemon.await_total("tokens", 1)
    (name,) = [name for name in daemon.objects() if name.endswith(kind)]
    daemon.kill()
    foreign = SHM / name.replace("clawd-", "test-")
    try:
        spoil(SHM / name)
        daemon.start()
        line = daemon.log.wait("shared memory removed", name)
        if kind != "ctl":
            assert reason in line
        if case in ("link", "symlink"):
            assert foreign.stat().st_size > 0, "not ours to change"
        streams = daemon.streams()
        assert streams == {} if kind == "spool-0" else streams["s"]["reason"] == "producer_lost"
        number = 1 if kind == "spool-0" else 0
        assert [name for name in daemon.objects() if "spool" in name] == [f"clawd-{daemon.instance}-spool-{number}"]
    finally:
        foreign.unlink(missing_ok=True)
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        producer.open("t").write("y")
        assert consumer.attach("t").read(PATIENCE_S).text == "y"  # type: ignore[union-attr]


@root
def test_an_object_of_another_user_is_left_alone(daemon: Daemon) -> None:
    spool = SHM / f"clawd-{daemon.instance}-spool-0"
    squatted = SHM / f"clawd-{daemon.instance}-spool-1"
    daemon.kill()
    spool.unlink()
    squatted.write_bytes(bytes(4096))
    os.chown(squatted, 65534, 65534)
    try:
        daemon.start()
        daemon.log.wait("shared memory left alone", squatted.name, "of user 65534")
        assert squatted.stat().st_size == 4096
        assert (SHM / f"clawd-{daemon.instance}-spool-2").exists()
    finally:
        squatted.unlink()


def test_what_is_of_another_boot_is_swept(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").write("x")
        daemon.await_total("tokens", 1)
        before, id = set(daemon.objects()), daemon.instance
        daemon.kill()
        path = daemon.runtime_dir / "instance"
        path.write_text(f"{id}\n{'0' * 8}-0000-0000-0000-{'0' * 12}\n")
        daemon.start()
        assert daemon.instance == id
        assert not before & set(daemon.objects())
        assert daemon.streams() == {}
        daemon.log.wait("shared memory removed", "of another boot")


def test_a_ring_of_another_boot_is_not_taken_over(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").write("x")
        daemon.await_total("tokens", 1)
        path, _ = ctl_of(daemon)
        daemon.kill()
        poke(path, "boot_id", 0, 16)
        daemon.start()
        assert daemon.streams()["s"]["reason"] == "producer_lost"
        assert not path.exists()


@pytest.mark.parametrize("size", ["8M", "32M"])
def test_another_spool_size(daemon: Daemon, size: str, tmp_path: Path) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").write("x")
        daemon.await_total("tokens", 1)
        daemon.kill()
        with Daemon(daemon.runtime_dir, "--spool-bytes", size) as other:
            assert other.streams()["s"]["tokens"] == 1
            smaller = size == "8M"
            assert other.status()["spool_bytes"] == (16 if smaller else 32) << 20
            assert len(other.objects()) == (3 if smaller else 4)
            assert bool(other.log.find("spool is larger than configured")) == smaller
            producer.open("t").write("y")
            other.await_total("tokens", 1)
        daemon.over = True


# --- giving it up ---


def test_a_stop_that_discards_leaves_nothing(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("x")
        value = told(daemon.runtime_dir, "stop", "--discard")
        assert (value["stopped"], value["discard"]) == (True, True)
        assert daemon.process.wait(PATIENCE_S) == 0
        assert daemon.everything() == []
        with pytest.raises(RingLost, match="let go"):
            stream.write("y")
    daemon.over = True
    daemon.start()
    assert daemon.streams() == {}


def test_what_a_killed_one_left_can_be_discarded(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("x")
        daemon.kill()
        assert told(daemon.runtime_dir, "stop", "--discard", "--dry-run")["objects"] == 4
        assert len(daemon.everything()) == 4
        assert told(daemon.runtime_dir, "stop", "--discard")["objects"] == 4
        assert daemon.everything() == []
        with pytest.raises(RingLost, match="let go"):
            stream.write("y")


def test_a_stop_that_came_by_a_signal_keeps_everything(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").write("x")
        daemon.await_total("tokens", 1)
        status = daemon.status()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.await_stop(status)
        assert ctl_of(daemon)[1].state == lib.CLAW_STATE_OPEN
