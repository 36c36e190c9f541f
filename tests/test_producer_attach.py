# SPDX-License-Identifier: Apache-2.0
"""Attaching, closing, forking and bad arguments of the SDK, against a clawd played by fake_clawd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import clawd
from clawd.core import lib
from clawd.errors import (
    AttachRefused,
    ControlError,
    ForkedError,
    StreamClosed,
    StreamRefused,
)
from clawd.producer import Producer
from fake_clawd import FakeClawd, Tamper, fill, put

BROKEN: dict[str, Tamper] = {
    "a byte short": lambda answer, fds: (answer[:-1], fds),
    "a byte long": lambda answer, fds: (answer + b"\0", fds),
    "no magic": put(0, b"\0\0\0\0"),
    "another size": put(8, b"\1"),
    "a feature unknown here": put(16, b"\1"),
    "a status unknown here": put(20, b"\x63"),
    "a ring that is no power of two": put(24, (3 << 16).to_bytes(8, "little")),
    "a ring larger than its object": put(24, (1 << 18).to_bytes(8, "little")),
    "a ring below the least": put(24, (2048).to_bytes(8, "little")),
    "another ring_id than CTL": put(32, b"\x99"),
    "no record_max": put(48, b"\0\0\0\0"),
    "two descriptors": lambda answer, fds: (answer, fds[:2]),
    "no descriptor": lambda answer, fds: (answer, []),
    "four descriptors": lambda answer, fds: (answer, [*fds, fds[0]]),
    "fifteen descriptors": lambda answer, fds: (answer, fds * 5),
    "DATA too small": lambda answer, fds: (answer, [fds[1], fds[1], fds[2]]),
    "CTL no shared memory": lambda answer, fds: (answer, [fds[0], fds[2], fds[2]]),
}

LATER: dict[str, Tamper] = {
    "in a struct of this size": lambda answer, fds: (answer[:4] + b"\2\0\0\0" + answer[8:], []),
    "in a longer struct": lambda answer, fds: (answer[:4] + b"\2\0\0\0" + answer[8:] + bytes(500), []),
    "in a shorter struct": lambda answer, fds: (answer[:4] + b"\2\0\0\0" + answer[8:24], []),
    "with descriptors": lambda answer, fds: (answer[:4] + b"\2\0\0\0" + answer[8:], fds),
}


def run(program: str, *arguments: object) -> str:
    """What `program` printed, run by a fresh interpreter that finds this clawd; anything on stderr fails."""
    environment = {**os.environ, "PYTHONPATH": str(Path(clawd.__file__).parent.parent)}
    done = subprocess.run(
        # from Python 3.12 on a fork beside a thread warns; these children do what clawd promises of a fork
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def in_child(action) -> int:
    """Run `action` in a forked child; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_closed_streams_and_producers_say_so(small) -> None:
    producer, ring = small
    stream, left = producer.open("a"), producer.open("b")
    stream.close()
    for call in (lambda: stream.write("x"), lambda: stream.close(), lambda: producer.write_many([(stream, "x")])):
        with pytest.raises(StreamClosed, match='"a" is closed'):
            call()
    producer.close()
    producer.close()
    for call in (lambda: left.write("x", block=5), lambda: left.close(), lambda: producer.open("c")):
        with pytest.raises(StreamClosed, match='producer "small" is closed'):
            call()
    assert not left.cancelled
    assert "closed" in repr(producer)
    assert len(ring.drain()) == 3, "closing the producer ends no stream"


def test_closing_the_producer_releases_threads_that_wait_for_room(small) -> None:
    producer, _ = small
    stream, raised, waiting = producer.open("a"), [], threading.Barrier(4)
    fill(stream)

    def wait() -> None:
        waiting.wait()
        try:
            stream.write("x" * 1000, block=60)
        except StreamClosed as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait()
    producer.close()
    for thread in threads:
        thread.join(timeout=20)
    assert len(raised) == 3


def test_the_handles_of_closed_streams_serve_again_and_the_last_one_has_a_limit(fake: FakeClawd) -> None:
    with Producer("many", fake.directory, 1 << 20) as producer:
        ring = fake.rings[0]
        streams = [producer.open(f"s{index}") for index in range(lib.CLAW_HANDLE_COUNT)]
        with pytest.raises(StreamRefused) as caught:
            producer.open("one too many")
        assert caught.value.code == "limit"
        ring.drain()
        assert sorted(ring.live) == list(range(lib.CLAW_HANDLE_COUNT))
        streams[77].close()
        producer.open("again").write("x")
        ring.drain()
        assert ring.live[77].name == "again"


def test_a_stream_of_another_producer_is_refused_although_handle_and_number_agree(fake: FakeClawd) -> None:
    with Producer("one", fake.directory) as one, Producer("two", fake.directory) as two:
        mine, other = one.open("mine"), two.open("other")
        with pytest.raises(StreamClosed, match='not of producer "one"'):
            one.write_many([(mine, "x"), (other, "y")])
        with pytest.raises(StreamClosed):
            one.write_many([(other, "y" * 200_000)], block=1)
        assert len(fake.rings[0].drain()) == 1


# the fake's thread is of no matter to a child that only calls the SDK
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_leaves_its_parent_alone(small) -> None:
    producer, ring = small
    stream = producer.open("a")

    def child() -> None:
        for call in (
            lambda: stream.write("x"),
            lambda: stream.write("x", block=5),
            lambda: producer.write_many([(stream, "x")]),
            lambda: producer.open("b"),
            lambda: stream.close(),
            lambda: stream.cancelled,
        ):
            with pytest.raises(ForkedError, match="attach one here"):
                call()
        assert "forked" in repr(producer)
        producer.close()

    assert in_child(child) == 0
    assert stream.write("still")
    ring.drain()
    assert ring.stream("a").data == b"still"


def test_a_child_of_a_real_program_exits_without_harm_and_attaches_for_itself(fake: FakeClawd) -> None:
    program = """
import os, sys
from clawd import Producer
with Producer("parent", sys.argv[1]) as producer:
    stream = producer.open("p")
    pid = os.fork()
    if pid == 0:
        with Producer("child", sys.argv[1]) as own:
            own.open("c").write("from the child")
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    stream.write("from the parent")
sys.exit(status)
"""
    run(program, fake.directory)
    for ring in fake.rings:
        ring.drain()
    assert [ring.streams[0].data for ring in fake.rings] == [b"from the parent", b"from the child"]


# --- attaching


def test_a_refusal_names_its_code_and_the_daemons_words(fake: FakeClawd) -> None:
    def refuse(answer: bytes, fds: list[int]) -> tuple[bytes, list[int]]:
        return answer[:20] + b"\3\0\0\0" + answer[24:56] + b"no more\nrings".ljust(160, b"\0"), []

    fake.tamper = refuse
    with pytest.raises(AttachRefused, match='clawd refused producer "x": no more rings') as caught:
        Producer("x", fake.directory)
    assert caught.value.code == "limit"


def answers(fake: FakeClawd, rules: dict[str, Tamper]) -> dict[str, tuple[str, int]]:
    """What a producer raises for each answer, and how many descriptors it then has too many."""
    left = iter(rules.values())
    fake.tamper = lambda answer, fds: next(left)(answer, fds)
    program = """
import json, os, sys
from clawd import Producer, errors
rows = []
for _ in range(int(sys.argv[2])):
    before = len(os.listdir("/proc/self/fd"))
    try:
        Producer("x", sys.argv[1])
        said = "attached"
    except (errors.ControlError, errors.AttachRefused) as error:
        said = f"{getattr(error, 'code', None)}: {error.message}"
    rows.append([said, len(os.listdir("/proc/self/fd")) - before])
print(json.dumps(rows))
"""
    rows = json.loads(run(program, fake.directory, len(rules)))
    return dict(zip(rules, map(tuple, rows), strict=True))


def test_an_answer_that_breaks_a_rule_is_refused_and_leaks_no_descriptor(fake: FakeClawd) -> None:
    said = f"None: no sense in what clawd at {fake.directory}/control.sock answered"
    assert answers(fake, BROKEN) == dict.fromkeys(BROKEN, (said, 0))


def test_an_answer_of_another_layout_is_a_refusal_that_names_both(fake: FakeClawd) -> None:
    said = 'layout: clawd refused producer "x": it speaks layout 2, this producer layout 1; upgrade the older one'
    assert answers(fake, LATER) == dict.fromkeys(LATER, (said, 0))


def test_an_attached_producer_keeps_an_eventfd_and_its_connection_and_a_closed_one_nothing(fake: FakeClawd) -> None:
    program = """
import json, os, sys
from clawd import Producer
def kinds():
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return [os.readlink(link).split(":")[-1].strip("[]") if "eventfd" in os.readlink(link) else
            os.readlink(link).split(":")[0] for link in links if os.path.islink(link)]
def new(before):
    rows = kinds()
    for row in before:
        rows.remove(row)
    return sorted(rows)
before = kinds()
producer = Producer("x", sys.argv[1])
open_ones = new(before)
maps = open("/proc/self/maps").read().count("clawd-test")
producer.close()
print(json.dumps([open_ones, maps, new(before), open("/proc/self/maps").read().count("clawd-test")]))
"""
    assert json.loads(run(program, fake.directory)) == [["eventfd", "socket", "socket"], 3, [], 0]


def test_the_mapping_holds_the_lock_until_death_and_a_forked_child_does_not(fake: FakeClawd) -> None:
    program = """
import os, sys
from clawd import Producer
producer = Producer("x", sys.argv[1])
if os.fork() == 0:
    sys.stdin.read()  # until the test lets go, long after the parent's death
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(clawd.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program, fake.directory],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        assert fake.let_go.wait(20)
        assert fake.rings[0].is_held()
        process.kill()
        process.wait()
        assert not fake.rings[0].is_held()


def test_closing_gives_the_lock_back(fake: FakeClawd) -> None:
    with Producer("x", fake.directory):
        assert fake.let_go.wait(20)
        assert fake.rings[0].is_held()
    assert not fake.rings[0].is_held()


def test_without_a_daemon_the_error_names_the_path_and_asks_the_question(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ControlError) as caught:
        Producer("x", tmp_path)
    path = tmp_path / "control.sock"
    assert str(caught.value) == f"cannot reach clawd at {path}: No such file or directory; is it running?"
    monkeypatch.setenv("CLAWD_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(ControlError, match="elsewhere"):
        Producer("x")
    with pytest.raises(ControlError, match="File name too long"):
        Producer("x", tmp_path / ("d" * 120))


def test_a_daemon_that_hangs_up_is_reported(fake: FakeClawd) -> None:
    fake.tamper = lambda answer, fds: (b"", [])
    with pytest.raises(ControlError, match="Connection reset"):
        Producer("x", fake.directory)


# --- arguments


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p, s: Producer("", "/x"), ValueError, "name must be 1 to 63 bytes"),
        (lambda p, s: Producer("x" * 64, "/x"), ValueError, "name must be 1 to 63 bytes"),
        (lambda p, s: Producer(5, "/x"), TypeError, "name must be str"),
        (lambda p, s: Producer("a\0b", "/x"), ValueError, "control"),
        (lambda p, s: Producer("x", "/x", 5000), ValueError, "buffer_size must be a power of two"),
        (
            lambda p, s: Producer("x", "/x", overflow_bytes=5000),
            ValueError,
            "overflow_bytes must be 0, or it must be a",
        ),
        (lambda p, s: Producer("x", "/x", overflow_bytes=1 << 31), ValueError, "overflow_bytes must be 0, or it"),
        (lambda p, s: p.close(-1), ValueError, "timeout must be at least 0"),
        (lambda p, s: Producer("x", "/x", 1 << 30), ValueError, "buffer_size must be a power of two"),
        (lambda p, s: p.open(""), ValueError, "stream name must be 1 to 255 bytes"),
        (lambda p, s: p.open("é" * 128), ValueError, "stream name must be 1 to 255 bytes"),
        (lambda p, s: p.open(b"x"), TypeError, "stream name must be str"),
        (lambda p, s: p.open("x", meta=[1]), TypeError, "meta must be a dict"),
        (lambda p, s: p.open("x", meta={"a": "b" * 2000}), ValueError, "meta must be at most 1007 bytes"),
        (lambda p, s: p.open("x", meta={"a": float("nan")}), ValueError, "JSON"),
        (lambda p, s: p.open("x", requested_ns=-1), ValueError, "requested_ns"),
        (lambda p, s: p.open("x", block=-1), ValueError, "block must be at least 0"),
        (lambda p, s: s.write("x", block=-1), ValueError, "block must be at least 0"),
        (lambda p, s: p.write_many([], block="1"), TypeError, "block must be seconds"),
        (lambda p, s: s.write(5), TypeError, "text must be str or bytes, not int"),
        (lambda p, s: s.write(None), TypeError, "text must be str or bytes"),
        (lambda p, s: s.write("\ud800"), ValueError, "surrogates"),
        (lambda p, s: s.write("x", count=-1), ValueError, "count must be an integer"),
        (lambda p, s: s.write("x", count=2**31), ValueError, "count must be an integer"),
        (lambda p, s: s.write("x", count="1"), ValueError, "count must be an integer"),
        (lambda p, s: s.close(""), ValueError, "reason must be 1 to 255 bytes"),
        (lambda p, s: s.close("x" * 256), ValueError, "reason must be 1 to 255 bytes"),
        (lambda p, s: s.close("x", block="1"), TypeError, "block must be seconds"),
        (lambda p, s: p.write_many([(s, 5)]), TypeError, "text must be str or bytes"),
        (lambda p, s: p.write_many([(s, "x", 1)]), TypeError, "pairs of a stream and its text"),
        (lambda p, s: p.write_many([s]), TypeError, "pairs of a stream and its text"),
        (lambda p, s: p.write_many([("a", "x")]), TypeError, "pairs of a stream and its text"),
    ],
)
def test_a_bad_argument_is_one_clear_line_and_writes_nothing(small, call, error, words: str) -> None:
    producer, ring = small
    stream = producer.open("a")
    ring.drain()
    with pytest.raises(error, match=words) as caught:
        call(producer, stream)
    assert "\n" not in str(caught.value)
    assert ring.drain() == []


def test_a_str_that_lies_about_its_length_reads_nothing_beyond_the_texts(small) -> None:
    class Liar(str):
        def __len__(self) -> int:
            return 900

    producer, ring = small
    stream = producer.open("a")
    ring.drain()
    with pytest.raises(clawd.errors.ProducerError, match="Invalid argument"):
        producer.write_many([(stream, Liar("x"))])
    assert ring.drain() == []


def test_importing_the_producer_needs_neither_zmq_nor_posix_ipc() -> None:
    program = "import sys, clawd; clawd.Producer; print([m for m in ('zmq', 'posix_ipc') if m in sys.modules])"
    assert run(program) == "[]\n"
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = clawd.nothing_here
