# SPDX-License-Identifier: Apache-2.0
"""The SDK against a clawd played by fake_clawd, which checks every rule of the ring as it reads."""

from __future__ import annotations

import json
import random
import select
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd.core import lib
from clawd.errors import (
    RingFull,
    RingLost,
    StreamClosed,
    StreamRefused,
)
from clawd.producer import Producer
from fake_clawd import SMALL_RING, Drainer, FakeClawd, Ring, fill
from tests.daemon import Daemon

# --- what goes into the ring


def test_open_write_close_put_exactly_their_records_in_the_ring(fake: FakeClawd) -> None:
    before = time.monotonic_ns()
    with Producer("llama-0", fake.directory) as producer:
        ring = fake.rings[0]
        stream = producer.open("chatcmpl-1", requested_ns=123, meta={"model": "ü"})
        assert stream.write("Hel") is True
        assert stream.write(b"\xe4\xbd", urgent=True, count=3) is True
        assert stream.write(bytearray(b"\xa0")) is True
        stream.close("length")
        records = ring.drain()
    assert [(row.kind, row.flags, row.count, row.seq) for row in records] == [
        (lib.CLAW_OPEN, 0, 0, 1),
        (lib.CLAW_TOKEN, 0, 1, 2),
        (lib.CLAW_TOKEN, lib.CLAW_URGENT, 3, 3),
        (lib.CLAW_TOKEN, 0, 1, 4),
        (lib.CLAW_CLOSE, 0, 0, 5),
    ]
    opened = ring.stream("chatcmpl-1")
    assert (opened.data, opened.reason, opened.requested_ns) == (b"Hel\xe4\xbd\xa0", "length", 123)
    assert json.loads(opened.meta) == {"model": "ü"}
    assert before <= records[0].written_ns <= records[-1].written_ns <= time.monotonic_ns()
    assert fake.hellos[0] == ("llama-0", 0)


def test_an_empty_text_is_accepted_and_writes_nothing(small) -> None:
    producer, ring = small
    stream = producer.open("a")
    ring.drain()
    assert stream.write("") is True
    assert stream.write(b"") is True
    assert producer.write_many([(stream, "")]) == 1
    assert producer.write_many([]) == 0
    assert ring.drain() == []


def test_records_wrap_over_many_laps_of_a_small_ring(small) -> None:
    producer, ring = small
    stream, expected = producer.open("a"), b""
    for turn in range(3000):
        text = bytes([turn % 256]) * (1 + turn * 37 % 1024)
        assert stream.write(text)
        expected += text
        ring.drain()
    assert ring.pos > 300 * SMALL_RING
    assert ring.stream("a").data == expected


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.text(st.sampled_from("aé中🙂"), min_size=300, max_size=900).map(str.encode),
        st.binary(min_size=1000, max_size=3000),
    )
)
def test_long_text_is_cut_between_characters_and_joins_exactly(texts_ring, data: bytes) -> None:
    producer, ring = texts_ring
    stream = producer.open("a")
    stream.write(data, urgent=True, count=9)
    stream.close()
    tokens = [row for row in ring.drain() if row.kind == lib.CLAW_TOKEN]
    assert b"".join(row.payload for row in tokens) == data
    assert [row.count for row in tokens] == [9] + [0] * (len(tokens) - 1)
    assert all(row.flags == lib.CLAW_URGENT for row in tokens)
    assert all(len(row.payload) >= ring.record_max - 3 for row in tokens[:-1])
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    for row in tokens:
        row.payload.decode()


@pytest.fixture(scope="module")
def texts_ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Producer, Ring]]:
    daemon = FakeClawd(tmp_path_factory.mktemp("texts"))
    with Producer("texts", daemon.directory, SMALL_RING, overflow_bytes=0) as producer:
        yield producer, daemon.rings[0]
    daemon.close()


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (b"a" * 1023 + "é".encode() * 10, 1023),
        (b"a" * 1022 + "中".encode() * 10, 1022),
        (b"a" * 1023 + "🙂".encode() * 10, 1023),
        (b"a" * 1021 + "🙂".encode() * 10, 1021),
        (b"a" * 1020 + "🙂".encode() * 10, 1024),
        (b"\x80" * 1100, 1024),  # only continuation bytes
        (b"a" * 1023 + b"\x80" * 50, 1024),  # a stray one behind ASCII
        (b"a" * 1021 + "é".encode() + b"\xa9\xa9\xa9", 1024),  # one too many behind a whole character
    ],
)
def test_where_a_text_is_cut(small, data: bytes, first: int) -> None:
    producer, ring = small
    stream = producer.open("a")
    ring.drain()
    stream.write(data)
    assert [len(row.payload) for row in ring.drain()] == [first, len(data) - first]


def test_write_many_takes_str_bytes_and_any_script_in_one_commit(small) -> None:
    producer, ring = small
    a, b = producer.open("a"), producer.open("b")
    assert producer.write_many([(a, "x"), (b, "yy")]) == 2
    assert producer.write_many([(a, "é"), (b, "中")]) == 2
    assert producer.write_many([(a, b"\xff"), (b, b"zz")]) == 2
    assert producer.write_many([(a, "é"), (b, bytearray(b"q")), (a, "w")]) == 3
    tokens = [row for row in ring.drain() if row.kind == lib.CLAW_TOKEN]
    assert ring.live[0].data == "xé".encode() + b"\xff" + "éw".encode()
    assert ring.live[1].data == "yy中zzq".encode()
    assert all(row.count == 1 for row in tokens)
    assert len({row.written_ns for row in tokens}) == 4, "one clock reading a call"


def test_a_step_like_the_last_one_knows_the_streams_closed_since(small) -> None:
    producer, ring = small
    a, b = producer.open("a"), producer.open("b")
    assert producer.write_many([(a, "1"), (b, "2")]) == 2
    a.close()
    again = producer.open("again")
    with pytest.raises(StreamClosed, match='"a" is closed'):
        producer.write_many([(a, "3"), (b, "4")])
    assert producer.write_many([(again, "5"), (b, "6")]) == 2
    ring.drain()
    assert [ring.stream(name).data for name in ("a", "b", "again")] == [b"1", b"26", b"5"]


# --- a full ring


def test_a_full_ring_refuses_a_write_whole_and_leaves_nothing_behind(small) -> None:
    producer, ring = small
    stream = producer.open("a")
    ring.drain()
    written = fill(stream, "x" * 32)
    assert written == SMALL_RING // 64
    with pytest.raises(RingFull, match=r"is full; is clawd running"):
        stream.write("y")
    for call in (
        lambda: stream.write("y"),
        lambda: stream.write("y" * 2000),
        lambda: producer.write_many([(stream, "y"), (stream, "z")]),
        lambda: producer.open("b"),
        lambda: stream.close("stop", block=0),
        lambda: stream.write("y", block=0.02),
    ):
        with pytest.raises(RingFull) as caught:
            call()
        assert caught.value.written == 0
    ring.drain()
    assert ring.stream("a").data == b"x" * 32 * written
    stream.close()
    ring.drain()
    assert ring.stream("a").reason == "stop"


def test_a_call_that_blocks_goes_on_as_soon_as_there_is_room(small) -> None:
    producer, ring = small
    stream, data = producer.open("a"), random.Random(7).randbytes(200_000)
    with Drainer(ring):
        for start in range(0, len(data), 400):
            assert stream.write(data[start : start + 400], block=10)
        assert producer.open("b", block=10)
        stream.close("stop", block=10)
    assert ring.streams[0].data == data
    assert ring.streams[0].reason == "stop"


def test_a_text_longer_than_the_ring_needs_block_and_then_goes_in_parts(small) -> None:
    producer, ring = small
    stream, text = producer.open("a"), "中文🙂" * 5000
    ring.drain()
    with pytest.raises(RingFull, match="the texts do not fit the ring"):
        producer.write_many([(stream, text)])
    with pytest.raises(RingFull, match="longer than the ring of 4096; write it in parts, with block="):
        stream.write(text)
    assert ring.drain() == []
    with Drainer(ring):
        assert stream.write(text, count=7, block=10)
        assert producer.write_many([(stream, "x" * 3000), (stream, "y" * 3000)], block=10) == 2
    assert ring.stream("a").data == text.encode() + b"x" * 3000 + b"y" * 3000
    assert ring.stream("a").count == 9
    for row in ring.records:
        if row.kind == lib.CLAW_TOKEN:
            row.payload.decode()


def test_a_long_text_that_runs_out_of_time_says_how_much_went_in(small) -> None:
    producer, ring = small
    stream = producer.open("a")
    ring.drain()
    with pytest.raises(RingFull, match=r"after \d+ of 10000 bytes") as caught:
        stream.write(b"z" * 10_000, block=0.02)
    ring.drain()
    assert len(ring.stream("a").data) == caught.value.written > 0


def test_an_acknowledgement_beyond_what_was_written_loses_the_ring(small) -> None:
    producer, ring = small
    stream = producer.open("a")
    ring.words.ack_pos = 1 << 40
    for _ in range(3):
        stream.write("x" * 1000)
    with pytest.raises(RingLost, match="makes no sense"):
        stream.write("x" * 1000)


# --- waking clawd


def test_each_sleep_of_clawd_is_signalled_once_and_no_waking_moment_is(small) -> None:
    producer, ring = small
    stream = producer.open("a")
    assert ring.wakes() == 0, "0 is awake"
    for generation in range(1, 9):
        ring.words.need_wake = generation
        for _ in range(3):
            stream.write("x")
            producer.write_many([(stream, "y"), (stream, "z")])
        assert ring.wakes() == generation % 2
        ring.drain()


def test_a_full_ring_wakes_a_clawd_that_went_to_sleep_on_it(small) -> None:
    producer, ring = small
    stream = producer.open("a")
    fill(stream)
    ring.words.need_wake = 1
    for _ in range(2):
        with pytest.raises(RingFull):
            stream.write("x" * 1000)
    assert ring.wakes() == 1


# --- what clawd tells the producer


def test_a_cancel_is_seen_at_once_and_later_texts_are_dropped(small) -> None:
    producer, ring = small
    stream, other = producer.open("a"), producer.open("b")
    stream.write("kept")
    ring.drain()
    assert not stream.cancelled
    ring.stop("a", lib.CLAW_STOPPED_CANCELLED)
    assert stream.cancelled
    assert not other.cancelled
    assert stream.write("dropped") is False
    assert stream.write("d" * 2000) is False
    assert producer.write_many([(stream, "dropped"), (other, "kept")]) == 1
    stream.close("cancelled")
    ring.drain()
    assert ring.stream("a").data == b"kept"
    assert ring.stream("a").reason == "cancelled"
    assert ring.stream("b").data == b"kept"
    assert stream.cancelled, "still known when closed"


def test_a_stop_meant_for_an_earlier_stream_does_not_touch_the_next_on_its_handle(small) -> None:
    producer, ring = small
    first = producer.open("a")
    ring.drain()
    ring.stop("a", lib.CLAW_STOPPED_CANCELLED)
    first.close()
    second = producer.open("b")
    ring.drain()
    assert list(ring.live) == [0], "the same handle"
    assert not second.cancelled
    assert second.write("x")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (lib.CLAW_STOPPED_EXISTS, "exists"),
        (lib.CLAW_STOPPED_LIMIT, "limit"),
        (lib.CLAW_STOPPED_NO_SPACE, "no_space"),
        (lib.CLAW_STOPPED_DRAINING, "stopping"),
    ],
)
def test_a_refused_stream_raises_with_its_code_and_its_close_frees_the_handle(small, reason: int, code: str) -> None:
    producer, ring = small
    stream, silent, other = producer.open("a"), producer.open("quiet"), producer.open("b")
    ring.drain()
    ring.stop("a", reason)
    ring.stop("quiet", reason)
    assert stream.refused == code
    with pytest.raises(StreamRefused, match='"a"') as caught:
        stream.write("x")
    assert caught.value.code == code
    with pytest.raises(StreamRefused):
        producer.write_many([(other, "kept"), (stream, "x")])
    stream.close()
    with pytest.raises(StreamRefused):
        silent.close()
    with pytest.raises(StreamClosed):
        silent.close()
    ring.drain()
    with pytest.raises(StreamClosed, match='"a" is closed'):
        producer.write_many([(other, "x" * 3000), (other, "x" * 3000), (stream, "y")], block=10)
    assert ring.stream("b").data == b"kept", "the rest of the step is written"
    assert [row.name for row in ring.live.values()] == ["b"]


@pytest.mark.parametrize(("state", "word"), [(2, "quarantined"), (3, "let go")])
def test_a_ring_that_clawd_let_go_of_is_lost_for_every_call(small, state: int, word: str) -> None:
    producer, ring = small
    stream = producer.open("a")
    ring.words.state = state
    for call in (
        lambda: stream.write("x", block=5),
        lambda: producer.write_many([(stream, "x")]),
        lambda: producer.open("b", block=5),
        lambda: stream.close(),
    ):
        with pytest.raises(RingLost, match=word):
            call()
    assert word in repr(producer)
    assert len(ring.drain()) == 1


def test_a_quarantine_ends_a_wait_for_room(small) -> None:
    producer, ring = small
    stream = producer.open("a")
    fill(stream)
    timer = threading.Timer(0.05, lambda: setattr(ring.words, "state", lib.CLAW_STATE_QUARANTINED))
    timer.start()
    with pytest.raises(RingLost):
        stream.write("x" * 1000, block=60)
    timer.join()


def test_threads_and_producers_interleave_without_a_torn_or_lost_token(fake: FakeClawd) -> None:
    producers = [Producer(f"p{index}", fake.directory, SMALL_RING << index) for index in range(3)]
    rounds, failures = 300, []

    def work(producer: Producer, name: str) -> None:
        try:
            stream = producer.open(name, block=30)
            for turn in range(rounds):
                if turn % 3:
                    stream.write(f"{name}:{turn};", block=30)
                else:
                    producer.write_many([(stream, f"{name}:"), (stream, f"{turn};")], block=30)
            stream.close("stop", block=30)
        except BaseException as error:
            failures.append(error)

    with Drainer(fake.rings[0]), Drainer(fake.rings[1]), Drainer(fake.rings[2]):
        threads = [
            threading.Thread(target=work, args=(producer, f"{producer.name}-{index}"))
            for producer in producers
            for index in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for producer in producers:
            producer.close()
    assert failures == []
    for ring in fake.rings:
        assert len(ring.streams) == 4
        for row in ring.streams:
            assert row.data.decode() == "".join(f"{row.name}:{turn};" for turn in range(rounds))
            assert row.reason == "stop"


# --- what clawd says


def test_hints_are_none_until_clawd_has_a_wish(small) -> None:
    producer, ring = small
    assert producer.hints is None
    ring.words.hint_seq, ring.words.target_rate, ring.words.degrade, ring.words.hint_reason = 2, 25_000, 1, 7
    assert producer.hints == (25_000, 1, 7)
    assert (producer.hints.target_rate, producer.hints.degrade, producer.hints.reason) == (25_000, 1, 7)
    ring.words.hint_seq = 3  # being changed, for ever
    assert producer.hints is None
    producer.close()
    with pytest.raises(StreamClosed, match='producer "small" is closed'):
        _ = producer.hints


def test_the_descriptor_is_readable_once_clawd_is_gone(small, fake: FakeClawd) -> None:
    producer, _ = small
    assert select.select([producer], [], [], 0)[0] == []
    fake.stop()
    assert select.select([producer], [], [], 20)[0] == [producer]
    producer.close()
    with pytest.raises(StreamClosed):
        producer.fileno()


@pytest.mark.parametrize("bad", ["a\nb", "\x1b[2J", "nul\0", "del\x7f"])
def test_control_characters_are_refused_before_clawd_sees_them(daemon: Daemon, bad: str) -> None:
    with pytest.raises(ValueError, match="control characters"):
        Producer(bad, daemon.runtime_dir)
    with Producer("p", daemon.runtime_dir) as producer:
        with pytest.raises(ValueError, match="control characters"):
            producer.open(bad)
        stream = producer.open("good \u00a0 name…")
        with pytest.raises(ValueError, match="control characters"):
            stream.close(bad)
        stream.write("x")
        stream.close()
    daemon.await_total("ended", 1)
    assert daemon.total("quarantined") == 0
