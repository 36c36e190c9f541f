# SPDX-License-Identifier: Apache-2.0
"""The whole path under the history checker: producer processes, the daemon, clients; attach, credit, cancel, resume."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from clawd.consumer import Consumer
from clawd.errors import AttachError, StreamRefused
from clawd.producer import Producer
from tests import load
from tests.daemon import SANITIZED, Daemon, until
from tests.history import Got, History, Put
from tests.load import Writer

Start = Callable[..., Daemon]
KEEP = "2s" if SANITIZED else "400ms"
"""Long enough to attach in, short enough to wait for."""


def expect(history: History, names: list[str], count: int, seed: int, reason: str = "stop") -> None:
    for name in names:
        history.put(name, *(Put(item.data, item.urgent, item.count) for item in load.tokens(seed, name, count)))
        history.end(name, reason)


def follow_all(consumer: Consumer, history: History, names: list[str], client: str, **options: bool) -> list[Got]:
    """Read each stream to its end, all at once, each from a thread of its own."""
    readings = [(consumer.attach(name), history.reading(name, client)) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda pair: pair[1].follow(pair[0], **options), readings))


@pytest.mark.parametrize("batches", [False, True], ids=["token by token", "in batches"])
def test_many_producers_many_streams_many_clients(daemon: Daemon, history: History, seed: int, batches: bool) -> None:
    count = 300
    groups = [load.names(4, f"p{number}") for number in range(3)]
    names = [name for group in groups for name in group]
    expect(history, names, count, seed)
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        clients = [stack.enter_context(Consumer(daemon.runtime_dir)) for _ in range(3)]
        reads = [
            pool.submit(follow_all, client, history, names, f"client {number}", batches=batches)
            for number, client in enumerate(clients)
        ]
        writers = [stack.enter_context(Writer(daemon.runtime_dir, group[0], 16384)) for group in groups]
        for writer, group in zip(writers, groups, strict=True):
            writer.load(group, count, seed)
        for writer in writers:
            assert writer.wait() == "done"
        for read in reads:
            read.result()
    assert len(history.readings) == 3 * len(names)
    history.check()
    assert daemon.total("tokens") == count * len(names)


def test_a_reading_may_start_before_in_the_middle_of_and_after_its_stream(daemon: Daemon, history: History) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        before = consumer.attach("s")
        stream = producer.open("s", meta={"model": "m"})
        history.put("s", b"one", b"two", b"three")
        history.end("s", "length")
        stream.write("one")
        stream.write("two")
        first = history.reading("s", "before").follow(before, limit=2)
        middle = consumer.attach("s")
        late = history.reading("s", "middle").follow(middle, limit=1)
        stream.write("three")
        stream.close("length")
        for got, reading in ((first, before), (late, middle), (history.reading("s", "after"), consumer.attach("s"))):
            got.follow(reading)
            assert (reading.meta, reading.end_reason, reading.gaps) == ({"model": "m"}, "length", [])
    history.check()


def test_a_text_longer_than_a_record_comes_whole(daemon: Daemon, dice: random.Random) -> None:
    text = "".join(dice.choice("aß語🦞") for _ in range(20_000))
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir, 8192) as producer:
        reading = consumer.attach("s")
        stream = producer.open("s")
        stream.write(text, block=30)
        stream.close(block=30)
        shown = [token.text for token in reading]
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("reason", ["stop", "length", "error:out of memory", "e" * 255])
def test_an_end_reason_reaches_the_reader(daemon: Daemon, reason: str) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        producer.open("s").close(reason)
        reading = consumer.attach("s")
        assert list(reading) == []
        assert reading.end_reason == reason


def test_a_stream_nobody_opens_is_unknown_after_the_wait(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer:
        for wait in (0.0, 0.05):
            with pytest.raises(AttachError) as caught:
                consumer.attach("never", wait=wait).read()
            assert caught.value.code == "unknown"
        daemon.await_total("streams_awaited", 0)
        assert daemon.total("attachments") == 0


def test_an_ended_stream_is_gone_after_keep_and_then_unknown(start: Start) -> None:
    daemon = start("--keep", KEEP, "--spool-bytes", "4M")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        reading = consumer.attach("s")
        stream = producer.open("s")
        stream.write("x")
        stream.close()
        assert [token.data for token in reading] == [b"x"]
        daemon.await_total("streams_gone", 1)
        with pytest.raises(AttachError) as caught:
            consumer.attach("s").read()
        assert caught.value.code == "gone"
        daemon.await_total("streams_gone", 0)
        with pytest.raises(AttachError) as caught:
            consumer.attach("s", wait=0).read()
        assert caught.value.code == "unknown"
        # …and the name is free again
        again = producer.open("s")
        again.write("y")
        token = consumer.attach("s").read()
        assert token is not None
        assert (token.data, again.refused) == (b"y", None)


def test_a_resume_goes_on_where_it_stopped_and_another_incarnation_is_lost(start: Start, history: History) -> None:
    daemon = start("--keep", KEEP, "--spool-bytes", "4M")
    history.put("s", b"a", b"b", b"c")
    history.end("s", "stop")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        for put in history.written["s"].puts:
            stream.write(put.data)
        with consumer.attach("s") as reading:
            history.reading("s", "first").follow(reading, limit=2)
        history.readings.clear()
        position = reading.position
        resumed = consumer.attach("s", position)
        stream.close()
        history.reading("s", "resumed", after=1).follow(resumed)
        history.check()
        until(lambda: "s" not in daemon.streams(), "the name to be free")
        with pytest.raises(AttachError) as caught:
            consumer.attach("s", position).read()
        assert caught.value.code == "lost"
        other = producer.open("s")
        other.write("z")
        with pytest.raises(AttachError) as caught:
            consumer.attach("s", position).read()
        assert caught.value.code == "lost"


def test_a_name_in_use_is_refused_and_its_stream_goes_on(daemon: Daemon, history: History) -> None:
    history.put("s", b"mine", b"still mine")
    history.end("s", "stop")
    with Consumer(daemon.runtime_dir) as consumer, ExitStack() as stack:
        one, two = (stack.enter_context(Producer(name, daemon.runtime_dir)) for name in ("one", "two"))
        reading = consumer.attach("s")
        stream = one.open("s")
        stream.write("mine")
        got = history.reading("s").follow(reading, limit=1)
        second = two.open("s")
        daemon.await_total("refused", 1)
        with pytest.raises(StreamRefused) as caught:
            second.close()
        assert caught.value.code == "exists"
        stream.write("still mine")
        stream.close()
        got.follow(reading)
    history.check()


@pytest.mark.parametrize("when", ["before the open", "before the first token", "in the middle"])
@pytest.mark.parametrize("who", ["once", "twice", "by one of two"])
def test_a_cancel_ends_the_stream_for_everybody(daemon: Daemon, history: History, when: str, who: str) -> None:
    with ExitStack() as stack:
        producer = stack.enter_context(Producer("p", daemon.runtime_dir))
        readings = [stack.enter_context(Consumer(daemon.runtime_dir)).attach("s") for _ in range(2)]
        gots = [history.reading("s", f"client {number}") for number in range(2)]
        history.put("s")

        def cancel() -> None:
            readings[0].cancel()
            if who == "twice":
                readings[0].cancel()

        if when == "before the open":
            daemon.await_total("attachments", 2)
            cancel()
            readings[0]._owner.attach("other")  # one connection's messages are taken in order
            daemon.await_total("attachments", 3)
        stream = producer.open("s")
        if when == "in the middle":
            for data in (b"a", b"b"):
                stream.write(data)
                history.put("s", data)
            for got, reading in zip(gots, readings, strict=True):
                got.follow(reading, limit=2)
        if when != "before the open":
            cancel()
        daemon.await_total("cancelled", 1)
        assert stream.cancelled
        assert stream.refused is None
        assert stream.write("too late") is False
        stream.close("stop")
        history.end("s", "cancelled")
        for got, reading in zip(gots, readings, strict=True):
            got.follow(reading)
        readings[0].cancel()
        assert daemon.total("cancelled") == 1
        # the handle is free again and works
        after = producer.open("t")
        after.write("t")
        assert stack.enter_context(Consumer(daemon.runtime_dir)).attach("t").read() is not None
    history.check()


def test_a_cancel_under_load_cuts_only_its_stream(daemon: Daemon, history: History, seed: int) -> None:
    names, count = load.names(6), 400
    expect(history, names, count, seed)
    for name in names[::2]:
        history.end(name, "cancelled", cut=True)

    def follow(reading, got: Got) -> None:
        if got.stream in names[::2]:
            got.follow(reading, limit=7)
            reading.cancel()
        got.follow(reading)

    with (
        Consumer(daemon.runtime_dir) as consumer,
        Writer(daemon.runtime_dir, buffer_size=4096) as writer,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        reads = [pool.submit(follow, consumer.attach(name), history.reading(name)) for name in names]
        writer.load(names, count // 2, seed, close=False)  # so that the cancels meet live streams
        assert writer.wait() == "done"
        daemon.await_total("cancelled", 3)
        writer.load(names, count, seed, start=count // 2)
        assert writer.wait() == "done"
        for read in reads:
            read.result()
    history.check()


def test_a_lost_producers_committed_tokens_come_then_its_end(daemon: Daemon, history: History, seed: int) -> None:
    names = load.names(5)
    expect(history, names, 60, seed, "producer_lost")
    with Consumer(daemon.runtime_dir) as consumer, Writer(daemon.runtime_dir) as writer:
        writer.load(names, 60, seed, close=False)
        assert writer.wait() == "done"
        writer.kill()
        follow_all(consumer, history, names, "client")
        daemon.log.wait("producer detached", "reason=left")
        assert len(daemon.objects()) == 1, "the ring's objects are gone"
    history.check()


def test_a_producer_that_closes_with_open_streams_is_lost_to_them(daemon: Daemon, history: History) -> None:
    with Consumer(daemon.runtime_dir) as consumer:
        with Producer("p", daemon.runtime_dir) as producer:
            for name in ("a", "b"):
                producer.open(name).write(name)
                history.put(name, name.encode())
                history.end(name, "producer_lost")
        follow_all(consumer, history, ["a", "b"], "client")
    history.check()


def test_the_first_and_urgent_tokens_are_critical_and_overtake(daemon: Daemon) -> None:
    """A reader that has let a long answer queue gets another stream's urgent token before the rest of it."""
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir, 1 << 20) as producer:
        long, short = producer.open("long"), producer.open("short")
        short.write("first")
        reading = consumer.attach("short")
        assert reading.read().klass == 0
        for _ in range(200):
            long.write("x" * 3000)  # many times the window
        big = consumer.attach("long", credit=1 << 26)
        tokens = [big.read()]
        short.write("plain")
        short.write("urgent", urgent=True)
        assert [(token.data, token.klass) for token in (reading.read(), reading.read())] == [
            (b"plain", 2),
            (b"urgent", 0),
        ]
        long.close()
        tokens += list(big)
        assert [token.klass for token in tokens] == [0] + [2] * 199
        assert daemon.total("tokens") == 203


def test_an_idle_path_sends_a_frame_a_token_and_a_busy_one_packs(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        reading = consumer.attach("s")
        stream = producer.open("s", pace="off")
        stream.write("first")
        assert reading.read() is not None
        before = daemon.total("frames")
        for number in range(50):
            stream.write(f"{number}")
            assert reading.read().data == b"%d" % number
        assert daemon.total("frames") - before == 50
        producer.write_many([(stream, f"{number} ") for number in range(500)])
        assert b"".join(reading.read().data for _ in range(500)) == b"".join(b"%d " % n for n in range(500))
        assert daemon.total("frames") - before < 50 + 50


def test_a_client_that_reads_nothing_costs_bounded_memory(start: Start, history: History, seed: int) -> None:
    daemon = start("--spool-bytes", "2M", "--stream-bytes", "256k", "--max-streams", "64")
    count = 2000 if SANITIZED else 4000
    slow, used = [], []
    with Consumer(daemon.runtime_dir) as idle, Consumer(daemon.runtime_dir) as busy, Writer(daemon.runtime_dir) as one:
        for turn in range(8):
            names = load.names(4, f"t{turn}")
            expect(history, names, count, seed)
            slow += [(idle.attach(name, credit=4096), history.reading(name, "idle")) for name in names]
            one.load(names, count, seed)
            follow_all(busy, history, names, "busy", batches=True)
            assert one.wait() == "done"
            used.append(daemon.private_bytes())
        passed = daemon.total("frame_bytes") * 6 // 8
        # the 1 MiB of frames a turn is touched bit by bit
        assert SANITIZED or passed > 3 << 20, f"{passed} bytes are no load"
        assert SANITIZED or used[-1] - used[1] < 2 << 20, f"memory grows while a client reads nothing: {used}"
        for reading, got in slow:
            got.follow(reading)
            assert len(reading.gaps) <= 1, "one hole is one gap"
        assert any(reading.gaps for reading, _ in slow)
        assert not any(event for got in history.readings if got.client == "busy" for event in got.gaps())
    history.check(gaps=True)


def test_streams_that_do_not_fit_the_spool_lose_by_gaps_alone(start: Start, history: History, seed: int) -> None:
    daemon = start("--spool-bytes", "1M", "--stream-bytes", "64k")
    names, count = load.names(8), 3000
    expect(history, names, count, seed)
    with Consumer(daemon.runtime_dir) as consumer, Writer(daemon.runtime_dir, buffer_size=1 << 20) as writer:
        readings = [(consumer.attach(name, credit=1024), history.reading(name)) for name in names]
        daemon.await_total("attachments", 8)
        writer.load(names, count, seed)
        assert writer.wait() == "done"
        daemon.await_total("ended", 8)
        for reading, got in readings:
            got.follow(reading)
        assert daemon.total("evicted_blocks") > 0
        assert daemon.total("gaps") > 0
    history.check(gaps=True)


def test_a_stream_whose_last_block_was_evicted_goes_on_after_a_gap(start: Start, history: History) -> None:
    daemon = start("--spool-bytes", "1M", "--stream-bytes", "1M")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        quiet, busy = producer.open("quiet"), producer.open("busy")
        reading = consumer.attach("quiet", credit=1)
        for data in (b"0" * 3000, b"1" * 3000):  # a block each, with room for a small one behind the first
            quiet.write(data)
            history.put("quiet", data)
        got = history.reading("quiet").follow(reading, limit=1)
        for _ in range(400):
            busy.write("b" * 3500, block=10)
        daemon.await_total("tokens", 402)
        quiet.write("small")
        history.put("quiet", b"small")
        history.end("quiet", "stop")
        quiet.close()
        got.follow(reading)
        history.reading("quiet", "late").follow(consumer.attach("quiet"))
        assert [len(reading.gaps)] == [1]
    history.check(gaps=True)


def test_a_killed_client_is_noticed_though_its_stream_is_silent(daemon: Daemon) -> None:
    program = (
        "import sys; from clawd.consumer import Consumer\n"
        "consumer = Consumer(sys.argv[1]); readings = [consumer.attach(f's{n}') for n in range(5)]\n"
        "print(readings[0].read().text, flush=True); readings[1].read()"
    )
    with Producer("p", daemon.runtime_dir) as producer:
        producer.open("s0").write("here")
        with subprocess.Popen(
            [sys.executable, "-c", program, str(daemon.runtime_dir)], stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdout.readline() == "here\n"
            status = daemon.status()
            assert (status["clients"], status["totals"]["attachments"]) == (1, 5)
            client.kill()
            client.wait()
        daemon.log.wait("client gone")
        status = daemon.status()
        assert (status["clients"], status["totals"]["attachments"]) == (0, 0)


def test_a_limit_of_readings_refuses_the_next_and_no_other(start: Start) -> None:
    daemon = start("--max-attachments", "3", "--spool-bytes", "4M")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        readings = [consumer.attach(f"s{number}") for number in range(3)]
        daemon.await_total("attachments", 3)
        with pytest.raises(AttachError) as caught:
            consumer.attach("s3").read()
        assert caught.value.code == "limit"
        readings[0].close()
        again = consumer.attach("s3")
        producer.open("s3").write("x")
        assert again.read().data == b"x"


def test_a_limit_of_clients_refuses_the_next_and_no_other(start: Start) -> None:
    daemon = start("--max-clients", "2", "--max-producers", "1", "--spool-bytes", "4M")
    with ExitStack() as stack, Producer("p", daemon.runtime_dir) as producer:
        consumers = [stack.enter_context(Consumer(daemon.runtime_dir)) for _ in range(2)]
        readings = [consumer.attach("s") for consumer in consumers]
        stream = producer.open("s")
        stream.write("x")
        assert [reading.read().data for reading in readings] == [b"x", b"x"]
        third = stack.enter_context(Consumer(daemon.runtime_dir))
        with pytest.raises(AttachError) as caught:
            third.attach("s").read()
        assert caught.value.code == "limit"
        stream.write("y")
        assert [reading.read().data for reading in readings] == [b"y", b"y"]


def test_a_refused_client_gets_in_once_there_is_room(start: Start) -> None:
    daemon = start("--max-clients", "1", "--spool-bytes", "4M")
    with ExitStack() as stack, Producer("p", daemon.runtime_dir) as producer:
        first = stack.enter_context(Consumer(daemon.runtime_dir))
        producer.open("s").write("x")
        assert first.attach("s").read().data == b"x"
        second = stack.enter_context(Consumer(daemon.runtime_dir))
        with pytest.raises(AttachError):
            second.attach("s").read()
        first.close()
        daemon.log.wait("client gone")
        assert second.attach("s", wait=0).read(30).data == b"x"


def test_streams_without_a_place_are_refused_and_others_complete(start: Start, history: History) -> None:
    daemon = start("--max-streams", "4", "--spool-bytes", "4M")
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        streams = [producer.open(f"s{number}") for number in range(4)]
        over = producer.open("over")
        daemon.await_total("refused", 1)
        assert over.refused == "limit"
        for stream in streams:
            stream.write("x")
            stream.close()
            history.put(stream.name, b"x")
            history.end(stream.name, "stop")
        with pytest.raises(StreamRefused):
            over.write("x")
        over.close()
        follow_all(consumer, history, list(history.written), "client")
        daemon.await_total("attachments", 0)
        # what ended and nobody reads makes way
        last = producer.open("last")
        last.write("x")
        assert consumer.attach("last").read().data == b"x"
        assert last.refused is None
    history.check()
