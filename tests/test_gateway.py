# SPDX-License-Identifier: Apache-2.0
"""Streams through a real gateway as Server-Sent Events: whole, resumed anywhere, by many, and left at any time."""

from __future__ import annotations

import codecs
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest

from clawd.producer import Producer, Stream
from tests.daemon import PATIENCE_S, Daemon, until
from tests.gateway import Events, Gateway, Told
from tests.history import Got, History, Seen

pytestmark = pytest.mark.plain

TEXT = "aß語🦞e\u0301 — 👩\u200d🚀\n\ufeff.\U0001f1e9\U0001f1ea!"


class Story:
    """What a stream's tokens show, as a reader of its events must get it."""

    def __init__(self, history: History, stream: str) -> None:
        self._history, self._stream = history, stream
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts = [decoder.decode(put.data) for put in history.written[stream].puts]
        self._rest = decoder.decode(b"", True)
        self.whole = "".join([*self._texts, self._rest])

    def take(self, got: Got, told: Told, skip: int = 0) -> None:
        """Note an event as the tokens it says it has; a text that is not theirs is noted as torn."""
        if told.kind == "end":
            got.finish(told.json()["reason"])
            return
        said = told.json()
        puts = self._history.written[self._stream].puts
        first = said["seq"] - said["count"] + 1
        due = "".join(self._texts[first : said["seq"] + 1])[skip:]
        rest = self._rest if said["count"] == 0 else ""
        good = said["text"] == due + rest
        for seq in range(first, said["seq"] + 1):
            klass = 0 if seq == 0 else self.classes[seq]
            got.events.append(Seen(seq, puts[seq].data if good else b"torn", klass, 1))
        got.text.append(said["text"])

    @property
    def classes(self) -> list[int]:
        from tests.history import _classes

        return _classes(self._history.written[self._stream].puts)


def write(history: History, stream: Stream, pieces: list[bytes], reason: str = "stop") -> None:
    history.put(stream.name, *pieces)
    history.end(stream.name, reason)
    for piece in pieces:
        stream.write(piece, block=PATIENCE_S)
    stream.close(reason)


def pieces(dice: random.Random, text: str, count: int) -> list[bytes]:
    data = text.encode()
    places = [0, *sorted(dice.sample(range(1, len(data)), count)), len(data)]
    return [data[at:end] for at, end in pairwise(places)]


def test_a_stream_is_told_with_ids_counts_and_its_end(gateway: Gateway, engine: Producer, history: History) -> None:
    stream = engine.open("chatcmpl-1/ü?")
    with gateway.read("/v1/streams/chatcmpl-1%2F%C3%BC%3F") as events:
        answer = events.open()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-cache, no-transform"
        assert "content-encoding" not in answer.headers
        write(history, stream, [TEXT.encode()[at : at + 1] for at in range(len(TEXT.encode()))])
        told = list(events)
    assert told[-1].kind == "end"
    assert told[-1].json() == {"reason": "stop"}
    assert "".join(each.json()["text"] for each in told[:-1]) == TEXT
    assert sum(each.json()["count"] for each in told[:-1]) == len(TEXT.encode())
    assert told[-1].position.seq == len(TEXT.encode()) - 1
    assert told[-1].position.over
    assert events.ended


def test_after_every_event_exactly_the_rest_comes(
    gateway: Gateway, engine: Producer, history: History, dice: random.Random
) -> None:
    """Each piece is waited for, so that each is an event: ids name every boundary, within characters too."""
    for name, parts in (
        ("bytes", [TEXT.encode()[at : at + 1] for at in range(len(TEXT.encode()))]),
        ("pieces", pieces(dice, TEXT * 3, 40)),
    ):
        stream = engine.open(name)
        at: list[tuple[str, str]] = [("", "")]
        with gateway.read(f"/v1/streams/{name}") as events:
            shown = ""
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            history.put(name, *parts)
            history.end(name, "length")
            following = iter(events)
            for piece in parts:
                stream.write(piece)
                if decoder.decode(piece):
                    told = next(following)
                    shown += told.json()["text"]
                    at.append((told.id, shown))
            stream.close("length")
            assert next(following).json() == {"reason": "length"}
        assert len(at) > 15
        whole = shown
        for said, before in at:
            headers = {"Last-Event-ID": said} if said else {}
            with gateway.read(f"/v1/streams/{name}", **headers) as events:
                assert before + events.text() == whole, said
            with gateway.read(f"/v1/streams/{name}?after={said.replace('+', '%2B')}") as events:
                assert before + events.text() == whole, said
        assert gateway.ask("GET", f"/v1/streams/{name}", Last_Event_ID=f"{at[-1][0]}!").status == 204


def test_readers_cut_off_anywhere_and_resumed_get_it_whole(
    gateway: Gateway, engine: Producer, history: History, dice: random.Random
) -> None:
    names = [f"s{number}" for number in range(4)]
    parts = {name: pieces(dice, TEXT * 20, 300) for name in names}
    streams = {name: engine.open(name) for name in names}
    for name in names:
        history.put(name, *parts[name])
        history.end(name, "stop")
    stories = {name: Story(history, name) for name in names}
    seeds = [dice.getrandbits(32) for _ in range(12)]
    faults: list[str] = []

    def read(name: str, seed: int) -> None:
        mine, shown, said = random.Random(seed), "", ""
        over = False
        while not over:
            with gateway.read(f"/v1/streams/{name}", **({"Last_Event_ID": said} if said else {})) as events:
                stay = mine.choice([1, 2, 5, 20, 1000])
                for told in events:
                    over = told.kind == "end"
                    shown += "" if over else told.json()["text"]
                    said = told.id
                    stay -= 1
                    if stay == 0:
                        break
        if shown != stories[name].whole:
            faults.append(f"{name}, seed {seed}: {shown[:80]!r}")

    def whole(name: str, number: int) -> None:
        got = history.reading(name, f"reader {number}")
        with gateway.read(f"/v1/streams/{name}") as events:
            for told in events:
                stories[name].take(got, told)

    threads = [threading.Thread(target=read, args=(dice.choice(names), seed)) for seed in seeds]
    threads += [threading.Thread(target=whole, args=(name, number)) for name in names for number in range(2)]
    for thread in threads:
        thread.start()
    for at in range(max(map(len, parts.values()))):
        for name in names:
            if at < len(parts[name]):
                streams[name].write(parts[name][at], block=PATIENCE_S)
        if at % 20 == 0:
            time.sleep(0.005)  # so that it is a stream and not a file
    for name in names:
        streams[name].close("stop")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert faults == []
    history.check()


def test_many_readers_share_one_attachment(gateway: Gateway, engine: Producer, daemon: Daemon) -> None:
    stream = engine.open("s")
    stream.write("begun ")
    with ExitStack() as stack:
        readers = [stack.enter_context(gateway.read("/v1/streams/s")) for _ in range(20)]
        firsts = [events.next().json()["text"] for events in readers]
        assert set(firsts) == {"begun "}
        assert daemon.streams()["s"]["attachments"] == 1
        late = stack.enter_context(gateway.read("/v1/streams/s"))
        assert late.next().json()["text"] == "begun "
        assert daemon.streams()["s"]["attachments"] == 1
        stream.write("and ended")
        stream.close("stop")
        assert {events.text() for events in [*readers, late]} == {"and ended"}


def test_a_heartbeat_comes_before_the_first_token(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve("--keepalive", "1s")
    with gateway.read("/v1/streams/later") as events:
        assert events.open().status == 200
        until(lambda: events._more() and events._raw.count(b":\n\n") >= 3, "two heartbeats")
        stream = engine.open("later")
        stream.write("x")
        assert events.next().json() == {"text": "x", "seq": 0, "count": 1}
        assert events.comments >= 3
        stream.close("stop")


@pytest.mark.parametrize("phase", ["before the open", "before the first token", "in the middle"])
@pytest.mark.parametrize("way", ["closed", "reset", "half closed"])
def test_a_reader_that_leaves_cancels_the_stream_after_the_grace(
    serve: Callable[..., Gateway], engine: Producer, daemon: Daemon, phase: str, way: str
) -> None:
    gateway = serve("--gone-grace", "100ms")
    stream = engine.open("s") if phase != "before the open" else None
    events = gateway.read("/v1/streams/s")
    if phase == "in the middle":
        assert stream
        stream.write("x")
        assert events.next().json()["text"] == "x"
    else:
        until(lambda: daemon.streams().get("s", {}).get("attachments") or daemon.total("streams_awaited"), "the attach")
    if way == "reset":
        events.dialled.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if way == "half closed":
        events.dialled.shutdown(socket.SHUT_WR)
    else:
        events.dialled.close()
    if stream is None:
        until(lambda: not daemon.total("attachments"), "its end")
        stream = engine.open("s")
    until(lambda: stream.cancelled, "the cancel")
    until(lambda: gateway.is_idle(), "nothing left of it")
    events.dialled.close()


def test_a_reader_that_comes_back_in_time_goes_on(
    serve: Callable[..., Gateway], engine: Producer, daemon: Daemon
) -> None:
    gateway = serve("--gone-grace", "20s")
    stream = engine.open("s")
    stream.write("one ")
    with gateway.read("/v1/streams/s") as events:
        first = events.next()
    until(lambda: daemon.streams()["s"]["attachments"] == 0, "the reader's end")
    stream.write("two")
    with gateway.read("/v1/streams/s", Last_Event_ID=first.id) as events:
        assert events.next().json()["text"] == "two"
        assert not stream.cancelled
        stream.close("stop")
        assert events.next().json() == {"reason": "stop"}


def test_a_slow_reader_is_bounded_and_slows_nobody(
    serve: Callable[..., Gateway], engine: Producer, daemon: Daemon, history: History
) -> None:
    gateway = serve("--recent-bytes", "64k")
    stream = engine.open("s")
    parts = [b"%06d " % number * 40 for number in range(1500)]  # 420 kB, which the spool keeps whole
    slow = gateway.read("/v1/streams/s")
    slow.dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
    with gateway.read("/v1/streams/s") as fast:
        until(lambda: daemon.streams()["s"]["attachments"] == 1, "both")
        writer = threading.Thread(target=write, args=(history, stream, parts))
        writer.start()
        text = fast.text()
        writer.join()
    assert text.encode() == b"".join(parts)
    # and the slow one, when it reads at last, gets every token too, from an attachment of its own
    assert slow.text() == text
    slow.dialled.close()


def test_a_reader_that_caught_up_shares_the_attachment_again(
    serve: Callable[..., Gateway], engine: Producer, daemon: Daemon
) -> None:
    gateway = serve("--recent-bytes", "16k")
    stream = engine.open("s")
    text = "".join(f"{number:06} " * 200 for number in range(400))  # 560 kB
    with gateway.read("/v1/streams/s") as fast, gateway.read("/v1/streams/s") as slow:
        slow.dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        until(lambda: gateway.metrics()["clawd_gateway_readers"] == 2, "both")
        shown = {fast: "", slow: ""}
        following = {events: iter(events) for events in (fast, slow)}
        for at in range(0, len(text), 1400):
            stream.write(text[at : at + 1400], block=PATIENCE_S)
        for events in (fast, slow):
            while len(shown[events]) < len(text):
                shown[events] += next(following[events]).json()["text"]
            assert shown[events] == text
        assert gateway.metrics()["clawd_gateway_moved_total"] >= 1
        until(lambda: daemon.streams()["s"]["attachments"] == 1, "one attachment for both")
        stream.write("both")
        assert [next(following[events]).json()["text"] for events in (fast, slow)] == ["both", "both"]
        stream.close("stop")
        assert [next(following[events]).json() for events in (fast, slow)] == [{"reason": "stop"}] * 2


def test_a_reader_that_takes_nothing_costs_a_bounded_memory(
    serve: Callable[..., Gateway], engine: Producer, daemon: Daemon
) -> None:
    gateway = serve("--recent-bytes", "64k")
    streams = [engine.open(f"s{number}") for number in range(4)]
    with ExitStack() as stack:
        readers = [stack.enter_context(gateway.read(f"/v1/streams/s{number}")) for number in range(4)]
        for events, stream in zip(readers, streams, strict=True):
            events.dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stream.write("begun")
            events.next()
        before = gateway.private_bytes()
        for _ in range(200):
            for stream in streams:
                stream.write("x" * 8000, block=PATIENCE_S)
        until(lambda: daemon.total("text_bytes") == 4 * (5 + 200 * 8000), "all of it")
        sent = -1
        # Nothing announces that the gateway takes no more; a look that is too short would only be too kind
        while sent != (sent := daemon.total("sent")):
            time.sleep(0.3)
        # 1.6 MB each: one that kept what it could not hand on would have four times that, and encoded again
        grown = (gateway.private_bytes() - before) / len(streams)
        print(f"{grown / 1024:.0f} kB a reader that takes nothing")
        assert grown < 1_000_000
        assert daemon.total("attachments") == 4


def test_a_reader_that_takes_nothing_is_cut_off_and_can_go_on(
    serve: Callable[..., Gateway], engine: Producer, history: History
) -> None:
    gateway = serve("--stall-timeout", "1s")
    stream = engine.open("s")
    events = gateway.read("/v1/streams/s")
    events.dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.write("begun ")
    first = events.next()
    write(history, stream, [b"%06d " % number * 400 for number in range(1000)])  # 2.8 MB: more than any socket takes
    gateway.await_figure("clawd_gateway_stalled_total", 1)
    text, said = "begun ", first.id
    with events:
        for told in events:  # what had been sent before the cut
            text += told.json()["text"]
            said = told.id
        assert not events.ended
    with gateway.read("/v1/streams/s", Last_Event_ID=said) as events:
        text += events.text()
    assert text == "begun " + b"".join(put.data for put in history.written["s"].puts).decode()


def test_what_is_missing_is_told_as_a_gap(daemon: Daemon, gateway: Gateway, engine: Producer) -> None:
    stream = engine.open("s")
    for number in range(3000):
        stream.write(b"%04d" % number * 500, block=PATIENCE_S)
    stream.close("stop")
    until(lambda: daemon.streams()["s"]["state"] == "ended", "the end: what waits in the engine may evict more")
    with gateway.read("/v1/streams/s") as events:
        told = list(events)
    [at] = [number for number, each in enumerate(told) if each.kind == "gap"]
    gap, after = told[at].json(), told[at + 1].json()
    assert gap == {"first": told[at - 1].json()["seq"] + 1, "last": gap["last"], "reason": "evicted"}
    assert told[at].position.seq == gap["last"] == after["seq"] - after["count"]
    assert told[-2].json()["seq"] == 2999
    # Whoever was cut off before it is told the same, and after it nothing of it
    with gateway.read("/v1/streams/s", Last_Event_ID=told[at - 1].id) as events:
        assert events.next().json() == gap
    with gateway.read("/v1/streams/s", Last_Event_ID=told[at].id) as events:
        assert events.next().kind == "message"


def test_an_engine_that_dies_ends_its_streams_with_the_reason(gateway: Gateway, daemon: Daemon) -> None:
    producer = Producer("dies", daemon.runtime_dir)
    stream = producer.open("s")
    stream.write(b"half \xe4\xbd")
    with gateway.read("/v1/streams/s") as events:
        assert events.next().json()["text"] == "half "
        producer.close()
        told = list(events)
    assert [each.kind for each in told] == ["message", "end"]
    assert told[0].json()["text"] == "\ufffd"
    assert told[1].json()["reason"] == "producer_lost"


@pytest.mark.slow
def test_a_thousand_readers_of_one_stream_get_it_whole(
    serve: Callable[..., Gateway], engine: Producer, daemon: Daemon, history: History
) -> None:
    gateway = serve("--max-per-address", "2000")
    stream = engine.open("s")
    stream.write("begun")
    with ExitStack() as stack:
        readers = [stack.enter_context(gateway.read("/v1/streams/s")) for _ in range(1000)]
        assert all(events.next().json()["text"] == "begun" for events in readers)
        before = time.monotonic()
        parts = [b" %04d" % number for number in range(300)]
        texts: list[str] = []

        def read(some: list[Events]) -> None:
            texts.extend(events.text() for events in some)

        threads = [threading.Thread(target=read, args=(readers[at::8],)) for at in range(8)]
        for thread in threads:
            thread.start()
        for part in parts:
            stream.write(part)
            time.sleep(0.01)
        stream.close("stop")
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert set(texts) == {b"".join(parts).decode()}
        assert len(texts) == 1000
        figures = gateway.metrics()
        sent = figures["clawd_gateway_tokens_total"]
        print(f"{sent / (time.monotonic() - before):.0f} tokens/s to 1,000 readers,"
              f" {figures['clawd_gateway_moved_total']:.0f} read for themselves")  # fmt: skip
        assert sent == 301 * 1000
        assert daemon.total("attachments") <= 1
