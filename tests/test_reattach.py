# SPDX-License-Identifier: Apache-2.0
"""A producer and the next clawd: it goes on with the same ring by itself, whatever answers meanwhile, and wakes it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import clawd
from clawd.core import ffi, lib
from clawd.errors import RingLost
from clawd.producer import Producer
from cprogram import NATIVE, compile_c
from fake_clawd import Drainer, FakeClawd, Ring, Tamper, put
from tests.daemon import PATIENCE_S, until
from tests.test_producer_attach import run

RING = 4096
STATUS, TEXT = 20, 56  # offsets in struct claw_attached


@pytest.fixture
def pair(fake: FakeClawd) -> Iterator[tuple[Producer, Ring]]:
    with Producer("again", fake.directory, RING) as producer:
        yield producer, fake.rings[0]
        fake.rings[0].drain()


def refusal(status: int, text: bytes = b"") -> Tamper:
    size = ffi.sizeof("struct claw_attached")
    return lambda answer, fds: (
        answer[:STATUS] + status.to_bytes(4, "little") + answer[24:TEXT] + text.ljust(size - TEXT, b"\0"), []
    )  # fmt: skip


WRONG: dict[str, Tamper] = {
    "no descriptor": lambda answer, fds: (answer, []),
    "two descriptors": lambda answer, fds: (answer, [*fds, fds[0]]),
    "nine descriptors": lambda answer, fds: (answer, fds * 9),
    "another ring_id": put(32, b"\x99"),
    "another size of ring": put(24, (8192).to_bytes(8, "little")),
    "another record_max": put(48, b"\0\0\0\0"),
    "a feature unknown here": put(16, b"\1"),
    "another size of answer": put(8, b"\1"),
    "no magic": put(0, b"\0\0\0\0"),
    "a byte short": lambda answer, fds: (answer[:-1], fds),
    "junk": lambda answer, fds: (b"?" * 5000, []),
    "nothing": lambda answer, fds: (b"", []),
    "no room for now": refusal(lib.CLAW_ATTACH_LIMIT),
    "about to stop": refusal(lib.CLAW_ATTACH_STOPPING),
    "a status unknown here": refusal(99),
}


def await_again(fake: FakeClawd, count: int = 1) -> None:
    for _ in range(count):
        assert fake.again.acquire(timeout=PATIENCE_S), "it did not attach again"


def await_swap(ring: Ring) -> None:
    """The kick is the last thing an attach does."""
    until(ring.wakes, "the new eventfd to be written")


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("clawd watch")]


def test_it_goes_on_with_the_next_clawd_by_itself(pair, fake: FakeClawd) -> None:
    producer, ring = pair
    stream = producer.open("a")
    stream.write("before ")
    for turn in range(3):
        fake.stop()
        assert stream.write(f"between{turn} "), "a ring without clawd takes tokens"
        (fake.directory / "control.sock").unlink()
        fake.start()
        await_again(fake)
        await_swap(ring)
        assert stream.write(f"after{turn} ")
        ring.drain()
    assert ring.stream("a").data == b"before between0 after0 between1 after1 between2 after2 "
    assert fake.hellos == [("again", RING)] * 4
    assert len(watchers()) == 1


def test_the_new_eventfd_is_the_one_that_is_signalled(pair, fake: FakeClawd) -> None:
    producer, ring = pair
    stream = producer.open("a")
    fake.restart()
    await_again(fake)
    await_swap(ring)
    for generation in (1, 3):
        ring.words.need_wake = generation
        stream.write("x")
        stream.write("x")
        assert ring.wakes() == 1


def test_a_signal_that_nobody_heard_is_made_good(pair, fake: FakeClawd) -> None:
    """clawd slept, was signalled, died before it woke: its next one goes on with the generation it finds."""
    producer, ring = pair
    stream = producer.open("a")
    ring.words.need_wake = 1
    stream.write("x")
    assert ring.wakes() == 1
    fake.restart()
    await_again(fake)
    until(ring.wakes, "the kick: the SDK has signalled this generation and would not do so again")
    assert stream.write("y")
    assert ring.wakes() == 0


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_not_taken_and_the_next_try_is(pair, fake: FakeClawd, wrong: str) -> None:
    producer, ring = pair
    stream = producer.open("a")
    rules = iter([WRONG[wrong]] * 2)
    fake.tamper = lambda answer, fds: next(rules, lambda *same: same)(answer, fds)
    fake.restart()
    await_again(fake, 3)
    await_swap(ring)
    assert stream.write("x")
    ring.drain()
    assert ring.stream("a").data == b"x"


def test_wrong_answers_leak_no_descriptor(fake: FakeClawd) -> None:
    program = """
import os, sys
from clawd import Producer
producer = Producer("x", sys.argv[1])
def count():
    return len(os.listdir("/proc/self/fd"))
print(count(), flush=True)
sys.stdin.readline()
print(count(), flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(clawd.__file__).parent.parent)}
    rules = iter([lambda *same: same, *WRONG.values()])
    fake.tamper = lambda answer, fds: next(rules, lambda *same: same)(answer, fds)
    with subprocess.Popen(
        [sys.executable, "-c", program, fake.directory],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        before = process.stdout.readline()
        fake.restart()
        await_again(fake, len(WRONG) + 1)
        await_swap(fake.rings[0])
        fake.restart()  # after this the one before is settled to the last descriptor
        await_again(fake)
        await_swap(fake.rings[0])
        process.stdin.write("\n")
        process.stdin.flush()
        # between the swap and the close of what was swapped there are more for a moment
        assert int(process.stdout.readline()) - int(before) in range(3)


LOST: dict[str, int] = {
    "lost": lib.CLAW_ATTACH_LOST,
    "denied": lib.CLAW_ATTACH_DENIED,
    "bad_request": lib.CLAW_ATTACH_BAD_REQUEST,
}


@pytest.mark.parametrize("code", LOST)
def test_a_clawd_that_does_not_have_the_ring_ends_it_in_its_words(fake: FakeClawd, code: str) -> None:
    producer = Producer("again", fake.directory, RING)
    stream = producer.open("a")
    fake.tamper = refusal(LOST[code], b"this ring\nis not known here")
    fake.restart()
    await_again(fake)
    until(lambda: "let go" in repr(producer), "the refusal to be there")
    for call in (lambda: stream.write("x"), lambda: producer.open("b"), lambda: producer.write_many([(stream, "x")])):
        with pytest.raises(RingLost, match='the ring of producer "again" is lost: this ring is not known here; attach'):
            call()
    assert not stream.cancelled
    until(lambda: not watchers(), "its thread's end")
    producer.close()


def test_another_layout_ends_it_too(fake: FakeClawd) -> None:
    producer = Producer("again", fake.directory, RING)
    stream = producer.open("a")
    fake.tamper = put(4, b"\2")
    fake.restart()
    until(lambda: "let go" in repr(producer), "the refusal to be there")
    with pytest.raises(RingLost, match="it speaks layout 2, this producer layout 1"):
        stream.write("x")
    producer.close()


def test_it_is_there_soon_after_clawd(pair, fake: FakeClawd) -> None:
    _, ring = pair
    took = []
    for _ in range(5):
        fake.stop()
        (fake.directory / "control.sock").unlink()
        back = time.monotonic() + 0.1
        while time.monotonic() < back:  # the time a clawd takes to start
            time.sleep(0.01)
        start = time.monotonic()
        fake.start()
        await_again(fake)
        took.append(time.monotonic() - start)
        await_swap(ring)
    print(f"attached again after {sorted(took)[2] * 1000:.1f} ms")
    assert sorted(took)[2] < 0.1, took


def test_closing_while_clawd_is_gone_ends_all(fake: FakeClawd) -> None:
    producer = Producer("again", fake.directory, RING)
    assert len(watchers()) == 1
    fake.stop()
    producer.open("a").write("x")
    producer.close()
    assert watchers() == []


def test_a_producer_that_nobody_refers_to_gives_its_ring_back(fake: FakeClawd) -> None:
    producer = Producer("again", fake.directory, RING)
    gc.disable()  # at once, not when the collector comes by
    try:
        assert fake.let_go.wait(PATIENCE_S)
        assert fake.rings[0].is_held()
        del producer
        until(lambda: not fake.rings[0].is_held(), "the lock to be given back")
        until(lambda: not watchers(), "its thread's end")
    finally:
        gc.enable()


def test_a_program_ends_although_its_producer_looks_for_clawd(fake: FakeClawd) -> None:
    program = """
import os, sys
from clawd import Producer
producer = Producer("x", sys.argv[1], 4096)
stream = producer.open("a")
os.unlink(sys.argv[1] + "/control.sock")
print("here", flush=True)
sys.stdin.readline()
for _ in range(100):
    stream.write("x" * 32)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(clawd.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program, fake.directory],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "here\n"
        fake.stop()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(PATIENCE_S) == 0


def test_a_child_of_a_producer_without_clawd_attaches_nothing(fake: FakeClawd) -> None:
    program = """
import os, sys
from clawd import Producer
producer = Producer("x", sys.argv[1], 4096)
pid = os.fork()
if pid == 0:
    producer.close()
    del producer
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
producer.open("a").write("x")
producer.close()
sys.exit(status)
"""
    run(program, fake.directory)
    assert len(fake.hellos) == 1
    fake.rings[0].drain()
    assert fake.rings[0].stream("a").data == b"x"


def test_tokens_written_beside_it_are_all_there(fake: FakeClawd) -> None:
    count = 20_000
    producer = Producer("again", fake.directory, RING)
    ring, done = fake.rings[0], threading.Event()

    def write() -> None:
        stream = producer.open("a")
        for number in range(count):
            stream.write(f"{number};", block=PATIENCE_S)
        stream.close("stop")
        done.set()

    thread = threading.Thread(target=write)
    restarts = 0
    with Drainer(ring):
        thread.start()
        while not done.is_set() or restarts < 5:
            fake.restart()
            await_again(fake)
            await_swap(ring)
            restarts += 1
        thread.join()
        producer.close(PATIENCE_S)
    assert ring.stream("a").data.decode() == "".join(f"{number};" for number in range(count))
    assert (ring.stream("a").reason, ring.stream("a").gaps) == ("stop", [])


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_an_engine_in_c_attaches_again_in_a_thread_of_its_own(fake: FakeClawd, tmp_path: Path, sanitizer: str) -> None:
    flags = ("-O1", f"-fsanitize={sanitizer}", "-pthread", *(("-Wno-tsan",) if sanitizer == "thread" else ()))
    program, count = compile_c(tmp_path / "race", [NATIVE / "reattach_race.c"], *flags), 20_000
    # a sanitizer of the interpreter's is not one of the program's
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ["setarch", "-R"] if sanitizer == "thread" else []  # ThreadSanitizer wants addresses where it knows them
    if command and subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("setarch -R does not work here")
    command += [str(program), str(fake.directory), str(count), str(RING)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert fake.attached.wait(PATIENCE_S)
        ring = fake.rings[0]
        with Drainer(ring):
            while process.poll() is None:
                fake.restart()
                until(lambda: fake.again.acquire(blocking=False) or process.poll() is not None, "it or its end")
                until(lambda: ring.wakes() or process.poll() is not None, "the kick")
            output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert int(output) >= 3
    assert ring.stream("race").data.decode() == "".join(f"{number};" for number in range(count))
    assert ring.stream("race").reason == "stop"
