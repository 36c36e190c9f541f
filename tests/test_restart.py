# SPDX-License-Identifier: Apache-2.0
"""A clawd that is killed, or stopped, and started again: what was committed is there, live producers go on in their
rings, and nothing that is not its own, or not as it left it, is touched or believed.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clawd.consumer import Consumer
from clawd.core import ffi, lib
from clawd.errors import RingLost
from clawd.producer import Producer
from tests import load
from tests.daemon import PATIENCE_S, SHM, Daemon, until
from tests.history import History, Put
from tests.test_ctl import told

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user (root)")
Restart = Callable[[Daemon], Daemon]


def kill_and_start(daemon: Daemon) -> Daemon:
    daemon.kill()
    return daemon.start()


def stop_and_start(daemon: Daemon) -> Daemon:
    daemon.stop()
    return daemon.start()


@pytest.fixture(params=[kill_and_start, stop_and_start])
def restart(request: pytest.FixtureRequest) -> Restart:
    found: Restart = request.param
    return found


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    assert process.stdout
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == line + "\n"


def ctl_of(daemon: Daemon) -> tuple[Path, Any]:
    """The one ring's CTL object and its first page as it is now."""
    (name,) = [name for name in daemon.objects() if name.endswith("-ctl")]
    words = ffi.new("struct claw_ctl *")
    ffi.memmove(words, (SHM / name).read_bytes()[: lib.CLAW_PAGE], lib.CLAW_PAGE)
    return SHM / name, words


def poke(path: Path, field: str, value: int, size: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(ffi.offsetof("struct claw_ctl", field))
        file.write(value.to_bytes(size, "little"))


def attach_again(daemon: Daemon, ring_id: int, ring_bytes: int, uid: int = 0) -> tuple[Any, list[int], socket.socket]:
    """The answer to a producer that attaches its ring again, and the descriptors that came with it."""
    hello = ffi.new(
        "struct claw_hello *",
        {"magic": lib.CLAW_MAGIC, "layout": lib.CLAW_LAYOUT, "size": ffi.sizeof("struct claw_hello"),
         "ring_bytes": ring_bytes, "ring_id": ring_id, "name": b"again"},
    )  # fmt: skip
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(PATIENCE_S)
    before = os.geteuid()
    try:
        if uid:
            os.seteuid(uid)  # SO_PEERCRED is as of connect()
        control.connect(os.fspath(daemon.runtime_dir / "control.sock"))
    finally:
        os.seteuid(before)
    control.send(ffi.buffer(hello)[:])
    packet, rights, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(16))
    fds = array.array("i")
    for _, _, data in rights:
        fds.frombytes(data)
    answer = ffi.new("struct claw_attached *")
    ffi.memmove(answer, packet, len(packet))
    return answer, list(fds), control


# --- streams ---


def test_every_committed_token_is_read_after_a_restart(
    daemon: Daemon, restart: Restart, history: History, seed: int
) -> None:
    names, count = load.names(5), 200
    with Producer("p", daemon.runtime_dir) as producer:
        streams = {name: producer.open(name) for name in names}
        load.write_all(producer, streams, count, seed)
        for name in names[:2]:
            streams[name].close(f"end of {name}")
            history.end(name, f"end of {name}")
        daemon.await_total("tokens", 5 * count)
        daemon.await_total("ended", 2)
        restart(daemon)
        line = daemon.log.wait("recovered streams=3 ended=2 lost=0", "rings=1")
        assert int(line.rpartition("ms=")[2]) < 500
        assert (daemon.total("recovered_streams"), daemon.total("recovered_rings")) == (5, 1)
        for name in names[2:]:
            streams[name].write(b"and more")
            streams[name].close("stop")
            history.end(name, "stop")
        with Consumer(daemon.runtime_dir) as consumer:
            for name in names:
                history.put(name, *(Put(item.data, item.urgent, item.count) for item in load.tokens(seed, name, count)))
                if name in names[2:]:
                    history.put(name, b"and more")
                history.reading(name).follow(consumer.attach(name))
    history.check()
    assert daemon.streams()[names[0]]["reason"] == f"end of {names[0]}"


def test_what_is_written_while_no_clawd_runs_is_taken_by_the_next(daemon: Daemon, history: History) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("before ")
        daemon.await_total("tokens", 1)
        for number in range(3):
            daemon.kill()
            stream.write(f"meanwhile {number} ")
            daemon.start()
            daemon.await_total("tokens", 1)
        stream.close("stop")
        with Consumer(daemon.runtime_dir) as consumer:
            history.put("s", b"before ", *(b"meanwhile %d " % number for number in range(3)))
            history.end("s", "stop")
            history.reading("s").follow(consumer.attach("s"))
        history.check()
        assert daemon.total("opened") == 0
        assert len(daemon.objects()) == 3


def test_a_reader_goes_on_where_it_was(daemon: Daemon, restart: Restart) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        for i in range(10):
            stream.write(f"{i} ")
        reading = consumer.attach("s")
        assert [reading.read(PATIENCE_S).text for _ in range(4)] == ["0 ", "1 ", "2 ", "3 "]  # type: ignore[union-attr]
        position = reading.position
        restart(daemon)
        stream.close("stop")
        with Consumer(daemon.runtime_dir) as other:
            assert [token.text for token in other.attach("s", after=position)] == [f"{i} " for i in range(4, 10)]


def test_a_cancelled_stream_stays_cancelled_and_its_name_taken(daemon: Daemon, restart: Restart) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("x")
        daemon.await_total("tokens", 1)
        assert told(daemon.runtime_dir, "cancel", "s")
        until(lambda: stream.cancelled, "the cancel")
        restart(daemon)
        assert stream.cancelled
        assert daemon.streams()["s"]["reason"] == "cancelled"
        again = producer.open("s")
        daemon.log.wait("stream refused", "reason=exists")
        until(lambda: again.refused == "exists", "the refusal")


# --- rings ---


@contextmanager
def standing_still(process: subprocess.Popen[str]) -> Iterator[None]:
    """It lives, and does not attach again by itself."""
    process.send_signal(signal.SIGSTOP)
    yield
    process.send_signal(signal.SIGCONT)


def test_a_producer_attaches_again_by_itself(daemon: Daemon, restart: Restart) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("a")
        daemon.await_total("tokens", 1)
        for _ in range(3):
            restart(daemon)
            daemon.log.wait("producer attached again", "producer=p")
            stream.write("b")
            daemon.await_total("tokens", 1)
        assert len(daemon.objects()) == 3
    daemon.log.wait("producer detached", "reason=left")


def test_a_ring_is_given_to_its_own_producer_once(
    daemon: Daemon, restart: Restart, writer: Callable[[Daemon], subprocess.Popen[str]]
) -> None:
    process = writer(daemon)
    tell(process, "a")
    daemon.await_total("tokens", 1)
    with standing_still(process):
        first = ctl_of(daemon)[1]
        restart(daemon)
        words = ctl_of(daemon)[1]
        assert words.daemon_epoch not in (0, first.daemon_epoch)
        assert bytes(ffi.buffer(words.producer_name)).rstrip(b"\0") == b"w"
        assert (words.producer_uid, words.producer_pid) == (os.geteuid(), process.pid)
        for ring_id, ring_bytes in ((words.ring_id + 1, words.ring_bytes), (words.ring_id, 2 * words.ring_bytes)):
            answer, fds, control = attach_again(daemon, ring_id, ring_bytes)
            assert (answer.status, fds) == (lib.CLAW_ATTACH_LOST, [])
            assert ffi.string(answer.text) == b"this ring is not known here; attach a new one"
            control.close()
        answer, fds, control = attach_again(daemon, words.ring_id, words.ring_bytes)
        assert (answer.status, len(fds)) == (lib.CLAW_ATTACH_OK, 1)
        assert (answer.ring_id, answer.ring_bytes, answer.record_max, answer.daemon_epoch) == (
            words.ring_id, words.ring_bytes, words.record_max, words.daemon_epoch,
        )  # fmt: skip
        os.eventfd_write(fds[0], 1)
        daemon.log.wait("producer attached again", "producer=again")
        until(lambda: ctl_of(daemon)[1].need_wake & 1, "a sleep that its producer is to end")
        again, none, other = attach_again(daemon, words.ring_id, words.ring_bytes)
        assert (again.status, none) == (lib.CLAW_ATTACH_LOST, [])
        other.close()
        control.close()  # its end of file is the end of the producer
        daemon.log.wait("producer detached", "reason=left")
        os.close(fds[0])
        assert daemon.streams()["s"]["reason"] == "producer_lost"


@root
def test_a_ring_of_another_user_is_denied(daemon: Daemon, writer: Callable[[Daemon], subprocess.Popen[str]]) -> None:
    process = writer(daemon)
    tell(process, "a")
    with standing_still(process):
        kill_and_start(daemon)
        words = ctl_of(daemon)[1]
        for path in (daemon.runtime_dir, *daemon.runtime_dir.parents):
            if path != Path("/"):
                path.chmod(path.stat().st_mode | 0o011)
        (daemon.runtime_dir / "control.sock").chmod(0o666)
        answer, fds, control = attach_again(daemon, words.ring_id, words.ring_bytes, uid=65534)
        assert (answer.status, fds) == (lib.CLAW_ATTACH_DENIED, [])
        control.close()


def test_a_producer_that_died_meanwhile_is_drained_and_its_streams_end_once(
    daemon: Daemon, writer: Callable[[Daemon], subprocess.Popen[str]], history: History
) -> None:
    process = writer(daemon)
    tell(process, "before")
    daemon.await_total("tokens", 1)
    daemon.kill()
    tell(process, "meanwhile")
    process.kill()
    process.wait()
    daemon.start()
    daemon.log.wait("producer detached", "producer=w", "reason=left")
    with Consumer(daemon.runtime_dir) as consumer:
        history.put("s", b"before", b"meanwhile")
        history.end("s", "producer_lost")
        history.reading("s").follow(consumer.attach("s"))
        history.check()
        assert len(daemon.objects()) == 1
        kill_and_start(daemon)
        history.reading("s").follow(consumer.attach("s"))
    history.check()


def test_a_producer_that_dies_after_the_start_is_noticed(
    daemon: Daemon, writer: Callable[[Daemon], subprocess.Popen[str]]
) -> None:
    process = writer(daemon)
    tell(process, "before")
    daemon.kill()
    daemon.start()
    tell(process, "after")
    until(lambda: daemon.streams()["s"]["tokens"] == 2, "both tokens")
    process.kill()
    process.wait()
    daemon.log.wait("producer detached", "producer=w", "reason=left")
    assert daemon.streams()["s"]["reason"] == "producer_lost"


def test_what_is_known_bad_stays_so(daemon: Daemon) -> None:
    cases = {"state": (lib.CLAW_STATE_QUARANTINED, "error:quarantined"), "incompatible": (4, "error:layout")}
    for field, (value, reason) in cases.items():
        with Producer("p", daemon.runtime_dir) as producer:
            stream = producer.open(field)
            stream.write("x")
            until(lambda field=field: field in daemon.streams(), "the stream")  # type: ignore[misc]
            path, _ = ctl_of(daemon)
            daemon.kill()
            poke(path, field, value)
            daemon.start()
            assert daemon.streams()[field]["reason"] == reason
            with pytest.raises(RingLost):
                stream.write("y")
        assert not path.exists()
