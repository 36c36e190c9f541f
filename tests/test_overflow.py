# SPDX-License-Identifier: Apache-2.0
"""What an engine writes while its ring is full: it waits in the SDK, in order, within its bound, or a GAP covers it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd.consumer import Consumer
from clawd.core import lib
from clawd.errors import ForkedError, RingFull, RingLost, StreamRefused
from clawd.producer import Producer, Stream
from fake_clawd import GAP, OPEN, TOKEN, Drainer, FakeClawd, Opened, Ring, fill
from tests.daemon import Daemon, until
from tests.history import History
from tests.test_producer_attach import in_child

RING = 4096
OVERFLOW = 65536
TOKEN_TEXT = "x" * 32


@pytest.fixture
def pair(fake: FakeClawd) -> Iterator[tuple[Producer, Ring]]:
    producer = Producer("over", fake.directory, RING, overflow_bytes=OVERFLOW)
    yield producer, fake.rings[0]
    with Drainer(fake.rings[0]):
        producer.close()


def threads(kind: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"clawd {kind}")]


def mappings(pid: int, size: int) -> int:
    """How many mappings of that size it has that no child gets."""
    rows = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
    return sum(f"Size:{size // 1024:>19} kB" in row and " dc " in row.split("VmFlags:")[-1] for row in rows)


# --- order, and nothing lost


def test_what_the_ring_has_no_room_for_waits_and_follows_in_order(pair) -> None:
    producer, ring = pair
    stream, expected = producer.open("a"), b""
    for number in range(400):
        assert stream.write(f"{number};" * 5)
        expected += f"{number};".encode() * 5
    later = producer.open("b", meta={"x": 1})
    assert producer.write_many([(stream, "one"), (later, "two")]) == 2
    stream.close("length")
    backlog = producer.backlog
    assert backlog.accepted > 300
    assert RING - 200 < backlog.in_ring <= RING
    with Drainer(ring):
        until(lambda: producer.backlog == (0, 0), "the overflow to be moved on with no call at all")
    assert (ring.stream("a").data, ring.stream("a").reason) == (expected + b"one", "length")
    assert (ring.stream("b").data, ring.stream("b").meta) == (b"two", b'{"x":1}')
    assert not ring.stream("a").gaps


def test_each_call_moves_on_first_what_waits(pair) -> None:
    producer, ring = pair
    stream = producer.open("a")
    for _ in range(200):
        stream.write("x" * 32)
    head = ring.head
    ring.drain()
    stream.write("y" * 32)
    assert ring.head > head + RING // 2, "without it nothing is there until the thread was scheduled"


def test_a_short_text_does_not_pass_a_long_one_that_waits(pair) -> None:
    producer, ring = pair
    stream, texts = producer.open("a"), ["1" * 1000, "2" * 1000, "3" * 1000, "4" * 1000, "5", "6"]
    for text in texts:  # the ring has room for the last two, not for the fourth
        stream.write(text)
    with Drainer(ring):
        until(lambda: producer.backlog == (0, 0), "all of it to be taken")
    assert ring.stream("a").data.decode() == "".join(texts)


def test_a_long_text_goes_into_the_overflow_whole_and_a_longer_one_in_parts(pair) -> None:
    producer, ring = pair
    stream, text = producer.open("a"), "中文🙂" * 4000
    assert stream.write(text, count=3)
    assert producer.backlog.accepted > len(text.encode()) // 1024 - 5
    with Drainer(ring):
        assert stream.write(text * 4, count=2, block=20)
        assert producer.write_many([(stream, "x" * 60_000), (stream, "y" * 60_000)], block=20) == 2
        until(lambda: producer.backlog == (0, 0), "all of it to be taken")
    row = ring.stream("a")
    assert row.data == (text * 5 + "x" * 60_000 + "y" * 60_000).encode()
    assert (row.count, row.gaps) == (7, [])
    for record in ring.records[:-100]:
        if record.kind == TOKEN:
            record.payload.decode()


def test_a_refusal_reaches_a_stream_that_was_opened_in_the_overflow(pair) -> None:
    producer, ring = pair
    first = producer.open("a")
    for _ in range(100):
        first.write("x" * 32)
    late = producer.open("late")
    with Drainer(ring):
        until(lambda: producer.backlog == (0, 0), "all of it to be taken")
    ring.stop("late", lib.CLAW_STOPPED_DRAINING)
    with pytest.raises(StreamRefused, match="about to stop") as caught:
        late.write("x")
    assert caught.value.code == "stopping"


calls = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 300)),
    st.tuples(st.just("write"), st.integers(0, 3), st.integers(1, 2500)),
    st.tuples(st.just("write"), st.integers(0, 3), st.integers(1, 60)),
    st.tuples(st.just("many"), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=5)),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("drain")),
)


@settings(max_examples=int(os.environ.get("CLAWD_TEST_EXAMPLES", "120")), deadline=None, print_blob=True)
@given(st.sampled_from([0, 4096, 16384]), st.lists(calls, min_size=15, max_size=120))
def test_any_order_of_calls_arrives_in_order_or_is_covered(directory: Path, overflow: int, plan: list) -> None:
    fake = FakeClawd(directory)
    try:
        producer = Producer("any", directory, RING, overflow_bytes=overflow)
        ring, number = fake.rings[0], 0
        live: list[tuple[Stream, Opened]] = []
        model: list[Opened] = []
        untold: dict[str, int] = {}

        def pieces(data: bytes) -> int:
            return -(-len(data) // 1024)

        def took(row: Opened, data: bytes) -> None:
            if data and untold.get(row.name):
                row.gaps.append((len(row.data), untold.pop(row.name), "ring_full"))
            row.data += data

        def dropped(row: Opened, data: bytes) -> None:
            if data:
                untold[row.name] = untold.get(row.name, 0) + pieces(data)

        for step, (what, *arguments) in enumerate(plan):
            data = bytes([step % 250 + 1])
            try:
                if what == "open":
                    name = f"{step}-" + "n" * (arguments[0] % 200)
                    live.append((producer.open(name), Opened(name, b"", 0, 0)))
                    model.append(live[-1][1])
                elif what == "drain":
                    ring.drain()
                elif live and what == "write":
                    stream, row = live[arguments[0] % len(live)]
                    data *= arguments[1]
                    try:
                        assert stream.write(data)
                        took(row, data)
                    except RingFull:
                        dropped(row, data)
                elif live and what == "many":
                    step_of = [(*live[index % len(live)], data * size) for index, size in arguments[0]]
                    try:
                        assert producer.write_many([(stream, text) for stream, _, text in step_of]) == len(step_of)
                        for _, row, text in step_of:
                            took(row, text)
                    except RingFull:
                        for _, row, text in step_of:
                            dropped(row, text)
                elif live and what == "close":
                    stream, row = live[arguments[0] % len(live)]
                    stream.close("stop", block=None)
                    took(row, b"")
                    if untold.get(row.name):
                        row.gaps.append((len(row.data), untold.pop(row.name), "ring_full"))
                    row.reason = "stop"
                    live.remove((stream, row))
            except RingFull:
                number += 1  # an OPEN or CLOSE that was not taken: nothing of it is there
        with Drainer(ring):
            producer.close(20)
        got = [(row.name, row.data, row.reason, row.gaps) for row in ring.streams]
        assert got == [(row.name, row.data, row.reason, row.gaps) for row in model]
    finally:
        fake.close()
        (directory / "control.sock").unlink()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


def test_a_daemon_that_stands_still_for_a_while_loses_nothing(daemon: Daemon, history: History) -> None:
    tokens = [f"{number} " * 20 for number in range(3000)]
    history.put("still", *(token.encode() for token in tokens))
    history.end("still", "stop")
    with Producer("p", daemon.runtime_dir, RING) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream, reading = producer.open("still"), consumer.attach("still")
        daemon.await_total("streams_live", 1)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for token in tokens:
                assert stream.write(token)
            stream.close("stop")
            assert producer.backlog.accepted > 2900
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        history.reading("still").follow(reading)
    history.check()


# --- no room at all


@pytest.mark.parametrize("overflow", [4096, OVERFLOW, 1 << 24])
def test_the_bound_is_exact(fake: FakeClawd, overflow: int) -> None:
    producer = Producer("bound", fake.directory, RING, overflow_bytes=overflow)
    stream = producer.open("a")  # 64 bytes, as each token
    written = fill(stream, TOKEN_TEXT)
    assert (written + 1) * 64 == RING + overflow
    assert producer.backlog == (overflow // 64, RING)
    if overflow > OVERFLOW:  # more than a reader in plain Python takes in a moment
        with pytest.raises(RingFull, match=f"{overflow // 64} records never"):
            producer.close(0)
        return
    with Drainer(fake.rings[0]):
        stream.close("stop")
        producer.close(20)
    row = fake.rings[0].stream("a")
    assert row.data == b"x" * 32 * written
    assert row.gaps == [(len(row.data), 1, "ring_full")]


def test_what_was_dropped_is_told_before_the_streams_next_record(pair) -> None:
    producer, ring = pair
    a, b = producer.open("a"), producer.open("b")
    kept = fill(a, TOKEN_TEXT) * 32
    for call in (
        lambda: a.write("x"),
        lambda: a.write("y" * 3000),  # 3 records
        lambda: a.write("z" * 100_000),  # longer than all of the room: 98
        lambda: producer.write_many([(a, "1"), (b, "2"), (b, "3"), (b, "")]),
        lambda: producer.write_many([(b, "4")], block=0.01),
    ):
        with pytest.raises(RingFull):
            call()
    with Drainer(ring):
        until(lambda: producer.backlog == (0, 0), "room")
        assert a.write("!")
        assert producer.write_many([(b, "?"), (a, "!")]) == 2
        until(lambda: producer.backlog == (0, 0), "them to be taken")
    assert ring.stream("a").data == b"x" * kept + b"!!"
    assert ring.stream("a").gaps == [(kept, 1 + 1 + 3 + 98 + 1, "ring_full")], "pour's own, x, y, z and the step's"
    assert ring.stream("b").gaps == [(0, 3, "ring_full")]


def test_a_loss_at_the_end_is_told_before_the_close_and_does_not_follow_the_handle(pair) -> None:
    producer, ring = pair
    first = producer.open("a")
    fill(first, TOKEN_TEXT)
    with Drainer(ring):
        first.close("stop", block=20)
        second = producer.open("b", block=20)
        second.write("x")
        until(lambda: producer.backlog == (0, 0), "them to be taken")
    kinds = [record.kind for record in ring.records]
    assert kinds[-4:] == [GAP, lib.CLAW_CLOSE, OPEN, TOKEN]
    assert len({record.handle for record in ring.records}) == 1
    assert ring.stream("b").gaps == []


def test_a_text_cut_off_by_its_deadline_is_lost_from_there_on(pair) -> None:
    producer, ring = pair
    stream = producer.open("a")
    with pytest.raises(RingFull) as caught:
        stream.write(b"z" * 200_000, block=0.02)
    assert 0 < caught.value.written < 200_000
    with Drainer(ring):
        stream.close("stop", block=20)
        until(lambda: producer.backlog == (0, 0), "it to be taken")
    [(at, count, _)] = ring.stream("a").gaps
    assert at == caught.value.written
    assert count >= (200_000 - at) // 1024


def test_with_block_a_call_waits_when_the_overflow_is_full_and_holds_nobody_up(pair) -> None:
    producer, ring = pair
    stream = producer.open("a")
    kept, waiting, done = fill(stream, TOKEN_TEXT), threading.Event(), []

    def wait() -> None:
        waiting.set()
        done.append(stream.write("late", block=60))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    turns, before = 0, time.monotonic()
    while time.monotonic() < before + 0.3:  # with the interpreter held by one that waits this would stand still
        turns += 1
    assert turns > 10_000
    assert not done
    with Drainer(ring):
        thread.join(20)
        until(lambda: producer.backlog == (0, 0), "it to be taken")
    assert done == [True]
    assert ring.stream("a").data == b"x" * 32 * kept + b"late"


def test_closing_a_stream_needs_no_room_in_the_ring(pair) -> None:
    producer, ring = pair
    stream = producer.open("a")
    for _ in range(100):
        stream.write("x" * 32)
    before = time.monotonic()
    stream.close("stop")
    assert time.monotonic() - before < 1
    with Drainer(ring):
        until(lambda: producer.backlog == (0, 0), "it to be taken")
    assert ring.stream("a").reason == "stop"


# --- the end


def test_closing_waits_for_the_overflow(fake: FakeClawd) -> None:
    producer = Producer("over", fake.directory, RING)
    stream = producer.open("a")
    for _ in range(5000):
        stream.write("x" * 32)
    with Drainer(fake.rings[0]):
        producer.close()
    assert len(fake.rings[0].stream("a").data) == 160_000
    assert threads("flush") == threads("watch") == []


def test_closing_says_how_much_found_no_room(fake: FakeClawd) -> None:
    producer = Producer("over", fake.directory, RING)
    stream = producer.open("a")
    for _ in range(163):
        stream.write("x" * 32)
    with pytest.raises(RingFull, match='producer "over" is closed and 100 records never got into the ring'):
        producer.close(0.05)
    producer.close()
    assert threads("flush") == threads("watch") == []
    fake.rings[0].drain()
    assert fake.rings[0].stream("a").data == b"x" * 32 * 63
    assert not fake.rings[0].is_held()


def test_what_went_wrong_first_is_not_hidden_by_what_the_end_lost(fake: FakeClawd, monkeypatch) -> None:
    monkeypatch.setattr(Producer.close, "__defaults__", (0.0,))

    def fail() -> None:
        with Producer("over", fake.directory, RING) as producer:
            stream = producer.open("a")
            for _ in range(64):
                stream.write("x" * 32)
            raise KeyError

    with pytest.raises(KeyError) as caught:
        fail()
    assert "1 record never got into the ring" in caught.value.__notes__[0]


def test_a_ring_that_was_let_go_of_takes_the_overflow_with_it(fake: FakeClawd) -> None:
    producer = Producer("over", fake.directory, RING)
    stream = producer.open("a")
    for _ in range(64):
        stream.write("x" * 32)
    fake.rings[0].words.state = lib.CLAW_STATE_QUARANTINED
    with pytest.raises(RingLost, match="quarantined"):
        stream.write("x")
    with pytest.raises(RingLost, match="is quarantined; 1 record never got into the ring"):
        producer.close()
    assert threads("flush") == []


def test_the_thread_ends_and_the_memory_is_given_back(pair) -> None:
    producer, ring = pair
    assert (threads("flush"), mappings(os.getpid(), OVERFLOW + 4096)) == ([], 0), "nothing before it is needed"
    stream = producer.open("a")
    for turn in range(2):
        for _ in range(100):
            stream.write("x" * 32)
        assert len(threads("flush")) == 1
        assert mappings(os.getpid(), OVERFLOW + 4096) == 1
        with Drainer(ring):
            until(lambda: not threads("flush"), "the thread's end")
        assert mappings(os.getpid(), OVERFLOW + 4096) == 0
        assert len(ring.stream("a").data) == 3200 * (turn + 1)


def test_the_thread_is_not_busy_while_clawd_stands_still(pair) -> None:
    producer, _ = pair
    stream = producer.open("a")
    for _ in range(100):
        stream.write("x" * 32)
    [thread] = threads("flush")
    stat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    before, start = int(stat.read_text().split()[0]), time.monotonic_ns()
    while time.monotonic_ns() < start + 500_000_000:
        time.sleep(0.1)
    used = (int(stat.read_text().split()[0]) - before) / (time.monotonic_ns() - start)
    assert used < 0.1, f"{used:.0%} of a processor"


# the fake's thread is of no matter to a child that only calls the SDK
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_part_in_it(pair) -> None:
    producer, ring = pair
    stream = producer.open("a")
    for _ in range(100):
        stream.write("x" * 32)
    assert mappings(os.getpid(), OVERFLOW + 4096) == 1

    def child() -> None:
        assert mappings(os.getpid(), OVERFLOW + 4096) == 0
        for call in (lambda: stream.write("x"), lambda: producer.backlog, lambda: stream.close()):
            with pytest.raises(ForkedError):
                call()
        producer.close()
        assert threads("flush") == []

    assert in_child(child) == 0
    with Drainer(ring):
        until(lambda: producer.backlog == (0, 0), "the parent's to be taken")
    assert ring.stream("a").data == b"x" * 3200
