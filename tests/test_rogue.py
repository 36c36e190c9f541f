# SPDX-License-Identifier: Apache-2.0
"""Hostile producers against a live daemon: each is refused or quarantined with a named reason, its readers are told,
and an honest stream completes beside it under the history checker.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

import counts
from clawd import protocol
from clawd.consumer import Consumer
from clawd.core import ffi, lib
from clawd.producer import Producer
from tests import load
from tests.daemon import NOTHING, Daemon, until
from tests.history import History, Put
from tests.rogue.producer import CLOSE, GAP, OPEN, OPENED, TOKEN, Rogue, dial, hello

CAP = 4096
TOP = 2**64


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all attacks: what the first leaves broken, the next one meets."""
    with Daemon(tmp_path_factory.mktemp("rogue") / "run", "--spool-bytes", "8M") as daemon:
        yield daemon


_numbers = count()


def fresh(name: str) -> str:
    """The daemon keeps ended streams, so each has a name of its own."""
    return f"{name}-{next(_numbers)}"


@contextmanager
def honest(daemon: Daemon, tokens: int = 60) -> Iterator[None]:
    """A stream that is written and read while the block runs, and must come whole."""
    name = fresh("honest")
    history = History()
    items = load.tokens(7, name, tokens)
    history.put(name, *(Put(item.data, item.urgent, item.count) for item in items))
    history.end(name, "stop")
    with Consumer(daemon.runtime_dir) as consumer, Producer("honest", daemon.runtime_dir, CAP) as producer:
        reading, got = consumer.attach(name), history.reading(name)
        stream = producer.open(name)
        half = tokens // 2
        for item in items[:half]:
            stream.write(item.data, urgent=item.urgent, count=item.count, block=20)
        got.follow(reading, limit=half)
        yield
        for item in items[half:]:
            stream.write(item.data, urgent=item.urgent, count=item.count, block=20)
        stream.close(block=20)
        got.follow(reading)
    history.check()
    counts.count(1, "attacks beside an honest stream")


def head(value: Callable[[int], int]) -> Callable[[Rogue], None]:
    return lambda rogue: rogue.publish(value(rogue.head))


def record(*arguments: object, **values: int) -> Callable[[Rogue], None]:
    def attack(rogue: Rogue) -> None:
        rogue.record(*arguments, **values)  # type: ignore[arg-type]
        rogue.publish()

    return attack


def opened(name: bytes, **lengths: int) -> Callable[[Rogue], None]:
    def attack(rogue: Rogue) -> None:
        rogue.open(name, handle=1, **lengths)
        rogue.publish()

    return attack


def repeated_seq(rogue: Rogue) -> None:
    rogue.record(TOKEN, b"once")
    rogue.seq -= 1
    rogue.record(TOKEN, b"again")
    rogue.publish()


def closed_twice(rogue: Rogue) -> None:
    rogue.record(CLOSE, b"stop")
    rogue.record(CLOSE, b"stop")
    rogue.publish()


def zeroed_page(rogue: Rogue) -> None:
    """Punch the ring's page out under a record that is published next."""
    rogue.record(TOKEN, b"unread")
    libc = ctypes.CDLL(None, use_errno=True)
    punch = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    assert libc.fallocate(rogue.data_fd, punch, ctypes.c_long(lib.CLAW_PAGE), ctypes.c_long(CAP)) == 0
    rogue.publish()


# What is done to a ring whose stream "victim" is open on handle 0 and has one token: the reason that must be named
ATTACKS: dict[str, tuple[Callable[[Rogue], None], str]] = {
    "head went back": (head(lambda at: at - 32), "head"),
    "head far back": (head(lambda at: at - CAP), "head"),
    "head beyond the ring": (head(lambda at: at + CAP + 32), "head"),
    "head misaligned": (head(lambda at: at + 8), "head"),
    "head at 2^63": (head(lambda at: 2**63), "head"),
    "head at 2^64-32": (head(lambda at: TOP - 32), "head"),
    "a full ring of zeros": (head(lambda at: at + CAP), "seq"),
    "a record longer than the longest": (record(TOKEN, b"x", length=CAP // 4 + 1), "len"),
    "a length of 2^31": (record(TOKEN, b"x", length=2**31), "len"),
    "a length of 2^32-1": (record(TOKEN, b"x", length=2**32 - 1), "len"),
    "a length beyond head": (record(TOKEN, b"x", length=100), "len"),
    "ring_seq 0": (record(TOKEN, b"x", seq=0), "seq"),
    "ring_seq skips": (record(TOKEN, b"x", seq=4), "seq"),
    "ring_seq 2^64-1": (record(TOKEN, b"x", seq=TOP - 1), "seq"),
    "ring_seq repeated": (repeated_seq, "seq"),
    "kind 0": (record(0, b"x"), "kind"),
    "kind 5": (record(5, b"x"), "kind"),
    "kind 255": (record(255, b"x"), "kind"),
    "an unknown flag": (record(TOKEN, b"x", flags=2), "flags"),
    "all flags": (record(TOKEN, b"x", flags=255), "flags"),
    "reserved not 0": (record(TOKEN, b"x", reserved=1), "flags"),
    "handle 4096": (record(TOKEN, b"x", handle=4096), "handle"),
    "handle 65535": (record(TOKEN, b"x", handle=65535), "handle"),
    "a token without open": (record(TOKEN, b"x", handle=1), "handle"),
    "a close without open": (record(CLOSE, b"stop", handle=1), "handle"),
    "a gap without open": (record(GAP, b"full", handle=1), "handle"),
    "closed twice": (closed_twice, "handle"),
    "opened twice": (record(OPENED, OPEN.pack(0, 1, 0, 0) + b"v"), "handle"),
    "an open too short": (record(OPENED, b"x" * 15, handle=1), "open"),
    "an open longer than it says": (record(OPENED, OPEN.pack(0, 1, 0, 0) + b"vv", handle=1), "open"),
    "a name longer than its record": (opened(b"v", name_len=200), "open"),
    "a name longer than names are": (opened(b"v" * 256), "open"),
    "meta longer than its record": (opened(b"v", meta_len=65535), "open"),
    "an empty name": (opened(b""), "open"),
    "a name that is no UTF-8": (opened(b"v\xff"), "open"),
    "a name with half a character": (opened("é".encode()[:1]), "open"),
    "a name with an overlong character": (opened(b"\xc0\xaf"), "open"),
    "a name with a surrogate": (opened(b"\xed\xa0\x80"), "open"),
    "a name with a line's end": (opened(b"v\n"), "open"),
    "a name with an escape": (opened(b"\x1b[2J"), "open"),
    "a name with NUL": (opened(b"v\0"), "open"),
    "a pace that is none": (opened(b"v", reserved=4), "open"),
    "open's readers longer than its record": (opened(b"v", reserved=1 << 8), "open"),
    "open's reserved not 0": (opened(b"v", reserved=1 << 16), "open"),
    "an empty reason": (record(CLOSE, b""), "close"),
    "a reason too long": (record(CLOSE, b"r" * 256), "close"),
    "a reason with a control character": (record(CLOSE, b"stop\x07"), "close"),
    "a reason that is no UTF-8": (record(CLOSE, b"\xfe"), "close"),
    "a gap's reason empty": (record(GAP, b""), "close"),
    "a gap of nothing": (record(GAP, b"full", count=0), "count"),
    "a page of zeros under an unread record": (zeroed_page, "seq"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_ring_that_breaks_a_rule_is_quarantined_by_name(daemon: Daemon, attack: str) -> None:
    act, reason = ATTACKS[attack]
    quarantined = daemon.total("quarantined")
    with honest(daemon), Consumer(daemon.runtime_dir) as consumer, Rogue(daemon.runtime_dir, CAP) as rogue:
        victim = consumer.attach(name := fresh("victim"))
        rogue.open(name.encode())
        rogue.record(TOKEN, b"true")
        rogue.publish()
        assert victim.read(30).data == b"true"
        act(rogue)
        tokens = list(victim)
        if attack not in ("closed twice", "ring_seq repeated"):
            assert (tokens, victim.end_reason) == ([], "error:quarantined")
        rogue.await_end()
        assert rogue.state() == lib.CLAW_STATE_QUARANTINED
        line = daemon.log.wait("producer detached", "reason=quarantined:", count=quarantined + 1)
        assert line.endswith(f"reason=quarantined:{reason}")
        assert daemon.total("quarantined") == quarantined + 1


def test_a_gap_of_2_32_tokens_is_told_and_no_more(daemon: Daemon) -> None:
    with honest(daemon), Consumer(daemon.runtime_dir) as consumer, Rogue(daemon.runtime_dir) as rogue:
        victim = consumer.attach(name := fresh("victim"))
        rogue.open(name.encode())
        for _ in range(3):
            rogue.record(GAP, b"full", count=2**32 - 1)
        rogue.record(TOKEN, b"far out")
        rogue.record(CLOSE, b"stop")
        rogue.publish()
        assert [(token.seq, token.data) for token in victim] == [(3 * (2**32 - 1), b"far out")]
        assert [(gap.first, gap.last) for gap in victim.gaps] == [
            (n * (2**32 - 1), (n + 1) * (2**32 - 1) - 1) for n in range(3)
        ]
        assert victim.end_reason == "stop"


def test_unread_bytes_that_change_while_they_are_drained_harm_their_stream_alone(
    daemon: Daemon, dice: random.Random
) -> None:
    """Every word of the ring may change at any moment; whatever clawd makes of it, it makes of a private copy."""
    for _ in range(3):
        with honest(daemon, tokens=200), Consumer(daemon.runtime_dir) as consumer, Rogue(daemon.runtime_dir) as rogue:
            victim = consumer.attach(name := fresh("victim"))
            rogue.open(name.encode())
            rogue.record(TOKEN, b"true")
            rogue.publish()
            assert victim.read(30).data == b"true"
            over = threading.Event()

            def scribble(rogue: Rogue = rogue, over: threading.Event = over) -> None:
                while not over.is_set():
                    at = dice.randrange(0, CAP, 4)
                    rogue.put(at, dice.randbytes(4))

            thread = threading.Thread(target=scribble)
            thread.start()
            try:
                while rogue.state() == lib.CLAW_STATE_OPEN:
                    while rogue.head - rogue.ack_pos() < CAP - 64 and rogue.state() == lib.CLAW_STATE_OPEN:
                        rogue.record(TOKEN, b"x" * 20)
                        rogue.publish()
            finally:
                over.set()
                thread.join()
            for token in victim:
                assert len(token.data) <= rogue.record_max
            assert victim.end_reason == "error:quarantined" or victim.end_reason.isprintable()
            rogue.await_end()


def test_random_bytes_in_a_ring_quarantine_it(daemon: Daemon, dice: random.Random) -> None:
    with honest(daemon):
        for _ in range(20):
            with Rogue(daemon.runtime_dir) as rogue:
                rogue.put(0, dice.randbytes(CAP))
                rogue.publish(dice.randrange(1, CAP // 32 + 1) * 32)
                rogue.await_end()
                assert rogue.state() == lib.CLAW_STATE_QUARANTINED


def test_ctl_cannot_be_written_by_its_producer(daemon: Daemon) -> None:
    with Rogue(daemon.runtime_dir) as rogue:
        size = ffi.sizeof("struct claw_ctl")
        with pytest.raises(PermissionError):
            mmap.mmap(rogue.ctl_fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(rogue.ctl_fd, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(rogue.ctl_fd, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(int(ffi.cast("uintptr_t", ffi.from_buffer(rogue.ctl))))
        assert libc.mprotect(address, ctypes.c_size_t(size), 3) == -1
        assert ctypes.get_errno() == errno.EACCES


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_ctl_and_data_cannot_be_opened_again_by_somebody_else(daemon: Daemon) -> None:
    program = (
        "import os, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for fd, flags in ((sys.argv[1], os.O_RDWR), (sys.argv[1], os.O_RDONLY), (sys.argv[2], os.O_RDWR)):\n"
        "    try:\n        os.open(f'/proc/self/fd/{fd}', flags); print('open')\n"
        "    except PermissionError: print('refused')\n"
    )
    with Rogue(daemon.runtime_dir) as rogue:
        done = subprocess.run(
            [sys.executable, "-c", program, str(rogue.ctl_fd), str(rogue.data_fd)],
            pass_fds=(rogue.ctl_fd, rogue.data_fd),
            capture_output=True,
            text=True,
        )
    assert done.stdout.split() == ["refused"] * 3, done.stderr


def test_a_producer_that_shrinks_its_memory_harms_its_stream_alone(tmp_path: Path) -> None:
    """It can: its descriptor of DATA is writable. clawd then reads pages that are not there any more (SIGBUS)."""
    daemon = Daemon(tmp_path / "run", "--spool-bytes", "4M")
    try:
        daemon.start()
        with Rogue(daemon.runtime_dir) as rogue:
            rogue.open(b"victim")
            os.ftruncate(rogue.data_fd, lib.CLAW_PAGE)
            rogue.publish(32)
            rogue.await_end()
        daemon.stop()
    finally:
        daemon.discard()


HELLOS: dict[str, tuple[bytes, int | None]] = {
    "another layout": (hello(layout=2), lib.CLAW_ATTACH_LAYOUT),
    "a feature that is not known": (hello(incompatible=1), lib.CLAW_ATTACH_LAYOUT),
    "another size": (hello(size=8), lib.CLAW_ATTACH_BAD_REQUEST),
    "a byte more": (hello() + b"\0", lib.CLAW_ATTACH_BAD_REQUEST),
    "a byte less": (hello()[:-1], lib.CLAW_ATTACH_BAD_REQUEST),
    "reserved not 0": (hello(reserved=1), lib.CLAW_ATTACH_BAD_REQUEST),
    "a ring that is not known": (hello(ring_id=5), lib.CLAW_ATTACH_LOST),
    "a ring too small": (hello(ring_bytes=2048), lib.CLAW_ATTACH_BAD_REQUEST),
    "a ring too large": (hello(ring_bytes=1 << 27), lib.CLAW_ATTACH_BAD_REQUEST),
    "a ring of 2^64-1": (hello(ring_bytes=TOP - 1), lib.CLAW_ATTACH_BAD_REQUEST),
    "a ring that is no power of two": (hello(ring_bytes=4096 + 32), lib.CLAW_ATTACH_BAD_REQUEST),
    "four bytes": (hello()[:4], lib.CLAW_ATTACH_BAD_REQUEST),
    "another magic": (hello(magic=1), None),
    "all zeros": (bytes(104), None),
}


@pytest.mark.parametrize("wrong", HELLOS)
def test_a_hello_that_is_wrong_is_refused_by_name(daemon: Daemon, wrong: str) -> None:
    packet, status = HELLOS[wrong]
    objects = daemon.objects()
    with honest(daemon, tokens=10), dial(daemon.runtime_dir) as control:
        control.send(packet)
        answer = control.recv(4096)
        if status is None:
            assert json.loads(answer)["code"] == "bad_request"
        else:
            attached = ffi.from_buffer("struct claw_attached *", answer)
            assert (attached.magic, attached.status) == (lib.CLAW_MAGIC, status)
            assert ffi.string(attached.text)
        assert control.recv(4096) == b""
    until(lambda: daemon.objects() == objects, "every ring to be gone")


def test_a_second_hello_ends_the_first_ones_ring(daemon: Daemon) -> None:
    with honest(daemon), Consumer(daemon.runtime_dir) as consumer, Rogue(daemon.runtime_dir) as rogue:
        victim = consumer.attach(name := fresh("victim"))
        rogue.open(name.encode())
        rogue.publish()
        rogue.control.send(hello())
        assert json.loads(rogue.control.recv(4096))["code"] == "bad_request"
        rogue.await_end()
        assert (list(victim), victim.end_reason) == ([], "producer_lost")


def _json(**values: object) -> bytes:
    return json.dumps(values).encode()


PACKETS = {
    "no JSON": b"hello",
    "half a JSON": b'{"op":',
    "JSON but no object": b"[1, 2]",
    "deep JSON": b"[" * 4000,
    "deep JSON that closes": b'{"op":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep objects": b'{"op":' * 600 + b"1" + b"}" * 600,
    "no operation": b"{}",
    "an operation of the relay": _json(op="attach", session="s", id=1, stream="s"),
    "an operation that is a list": _json(op=["hello"]),
    "a field too many": _json(op="cancel_stream", stream="s", more=1),
    "a hello without version": _json(op="hello", role="consumer"),
    "a hello of another version": _json(op="hello", version=99, role="consumer"),
    "a hello of no role": _json(op="hello", version=1, role="root"),
    "a hello with a version that is text": _json(op="hello", version="1", role="consumer"),
    "a name that is half a character": b'{"op":"hello","version":1,"role":"consumer","client":"\\ud800"}',
    "a number without end": b'{"op":"hello","version":' + b"9" * 4000 + b"}",
    "not a number": b'{"op":"hello","version":NaN}',
    "a message too long": b'{"op":"cancel_stream","stream":"s"' + b" " * 4096 + b"}",
    "64 KiB": b"{" * 65536,
    "no UTF-8": b'{"op":"\xff\xfe"}',
}


@pytest.mark.parametrize("wrong", PACKETS)
def test_a_packet_on_the_control_socket_that_is_wrong_is_answered_and_ends_it(daemon: Daemon, wrong: str) -> None:
    with dial(daemon.runtime_dir) as control:
        control.send(PACKETS[wrong])
        assert json.loads(control.recv(4096))["code"] == "bad_request"
        assert control.recv(4096) == b""
    assert daemon.status()["pid"] == daemon.pid


def test_random_packets_on_the_control_socket_do_no_harm(daemon: Daemon, dice: random.Random) -> None:
    good = [hello(), _json(op="hello", version=1, role="consumer"), _json(op="cancel_stream", stream="none")]
    with honest(daemon):
        for _ in range(200):
            with dial(daemon.runtime_dir) as control:
                packet = bytearray(dice.choice([*good, dice.randbytes(dice.randrange(1, 200))]))
                for _ in range(dice.randrange(1, 4)):
                    packet[dice.randrange(len(packet))] = dice.randrange(256)
                control.send(packet)
                control.recv(1 << 16)
    assert daemon.status()["pid"] == daemon.pid


def test_a_peer_that_asks_without_reading_answers_is_let_go(daemon: Daemon) -> None:
    def ask(control: socket.socket) -> None:
        while True:
            control.send(protocol.encode(NOTHING))

    with honest(daemon), dial(daemon.runtime_dir) as control, pytest.raises(OSError, match=r"Broken pipe|reset"):
        ask(control)
    assert daemon.status()["pid"] == daemon.pid


def test_descriptors_sent_to_clawd_are_not_kept(daemon: Daemon) -> None:
    fds = Path(f"/proc/{daemon.pid}/fd")
    with dial(daemon.runtime_dir) as control:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("10i", *[control.fileno()] * 10))]
        counts = []
        for _ in range(20):
            control.sendmsg([protocol.encode(NOTHING)], rights)
            assert json.loads(control.recv(1 << 16))["code"] == "unknown"
            counts.append(len(list(fds.iterdir())))
        assert counts[-1] <= counts[0], counts
