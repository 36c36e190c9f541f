# SPDX-License-Identifier: Apache-2.0
"""Streams through a real gateway as Server-Sent Events: whole, resumed anywhere, by many, and left at any time."""

from __future__ import annotations

import codecs
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest

from clawd.producer import Producer, Stream
from tests.daemon import PATIENCE_S, Daemon, until
from tests.gateway import Gateway, Told
from tests.history import Got, History, Seen

TEXT = "aß語🦞e\u0301 — 👩\u200d🚀\n\ufeff.\U0001f1e9\U0001f1ea!"


@pytest.fixture
def serve(daemon: Daemon) -> Iterator[Callable[..., Gateway]]:
    """Starts a gateway with flags of the test's choice."""
    with ExitStack() as stack:
        yield lambda *flags, **more: stack.enter_context(Gateway(daemon.runtime_dir, *flags, **more))


@pytest.fixture
def gateway(serve: Callable[..., Gateway]) -> Gateway:
    return serve()


@pytest.fixture
def producer(daemon: Daemon) -> Iterator[Producer]:
    with Producer("engine", daemon.runtime_dir) as made:
        yield made


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


def test_a_stream_is_told_with_ids_counts_and_its_end(gateway: Gateway, producer: Producer, history: History) -> None:
    stream = producer.open("chatcmpl-1/ü?")
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
    gateway: Gateway, producer: Producer, history: History, dice: random.Random
) -> None:
    """Each piece is waited for, so that each is an event: ids name every boundary, within characters too."""
    for name, parts in (
        ("bytes", [TEXT.encode()[at : at + 1] for at in range(len(TEXT.encode()))]),
        ("pieces", pieces(dice, TEXT * 3, 40)),
    ):
        stream = producer.open(name)
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
    gateway: Gateway, producer: Producer, history: History, dice: random.Random
) -> None:
    names = [f"s{number}" for number in range(4)]
    parts = {name: pieces(dice, TEXT * 40, 600) for name in names}
    streams = {name: producer.open(name) for name in names}
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


def test_many_readers_share_one_attachment(gateway: Gateway, producer: Producer, daemon: Daemon) -> None:
    stream = producer.open("s")
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


def test_a_heartbeat_comes_before_the_first_token(serve: Callable[..., Gateway], producer: Producer) -> None:
    gateway = serve("--keepalive", "1s")
    with gateway.read("/v1/streams/later") as events:
        assert events.open().status == 200
        until(lambda: events._more() and events._raw.count(b":\n\n") >= 3, "two heartbeats")
        stream = producer.open("later")
        stream.write("x")
        assert events.next().json() == {"text": "x", "seq": 0, "count": 1}
        assert events.comments >= 3
        stream.close("stop")


@pytest.mark.parametrize("phase", ["before the open", "before the first token", "in the middle"])
@pytest.mark.parametrize("way", ["closed", "reset", "half closed"])
def test_a_reader_that_leaves_cancels_the_stream_after_the_grace(
    serve: Callable[..., Gateway], producer: Producer, daemon: Daemon, phase: str, way: str
) -> None:
    gateway = serve("--gone-grace", "100ms")
    stream = producer.open("s") if phase != "before the open" else None
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
        stream = producer.open("s")
    until(lambda: stream.cancelled, "the cancel")
    until(lambda: gateway.is_idle(), "nothing left of it")
    events.dialled.close()


def test_a_reader_that_comes_back_in_time_goes_on(
    serve: Callable[..., Gateway], producer: Producer, daemon: Daemon
) -> None:
    gateway = serve("--gone-grace", "20s")
    stream = producer.open("s")
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
    serve: Callable[..., Gateway], producer: Producer, daemon: Daemon, history: History
) -> None:
    gateway = serve("--recent-bytes", "64k")
    stream = producer.open("s")
    parts = [b"%06d " % number * 40 for number in range(4000)]  # 1.1 MB, which the spool keeps whole
    slow = gateway.read("/v1/streams/s")
    slow.dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
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


def test_a_reader_that_takes_nothing_is_cut_off_and_can_go_on(
    serve: Callable[..., Gateway], producer: Producer, history: History
) -> None:
    gateway = serve("--stall-timeout", "1s")
    stream = producer.open("s")
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


def test_what_is_missing_is_told_as_a_gap(daemon: Daemon, gateway: Gateway, producer: Producer) -> None:
    stream = producer.open("s")
    for number in range(3000):
        stream.write(b"%04d" % number * 500, block=PATIENCE_S)
    stream.close("stop")
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


def test_delete_cancels_for_everybody(gateway: Gateway, producer: Producer) -> None:
    read, unread = producer.open("read"), producer.open("unread")
    unread.write("some")
    with gateway.read("/v1/streams/read") as events:
        until(lambda: gateway.ask("DELETE", "/v1/streams/read").status == 202, "the cancel")
        until(lambda: read.cancelled, "the cancel")
        assert events.next().json() == {"reason": "cancelled"}
    assert gateway.ask("DELETE", "/v1/streams/unread").json() == {"stream": "unread", "cancelled": True}
    until(lambda: unread.cancelled, "the cancel")
    gateway.ask("DELETE", "/v1/streams/none").check_problem(404, "unknown")


def test_draining_lets_streams_end_and_says_when_not(
    serve: Callable[..., Gateway], producer: Producer, daemon: Daemon
) -> None:
    gateway = serve("--drain-timeout", "1s")
    ends, stays = producer.open("ends"), producer.open("stays")
    with gateway.read("/v1/streams/ends") as one, gateway.read("/v1/streams/stays") as other:
        ends.write("a")
        stays.write("b")
        assert (one.next().json()["text"], other.next().json()["text"]) == ("a", "b")
        assert gateway.ask("GET", "/readyz").status == 200
        gateway.terminate()
        gateway.log.wait("gateway stopping")
        gateway.ask("GET", "/readyz").check_problem(503, "stopping")
        gateway.ask("GET", "/v1/streams/ends").check_problem(503, "stopping")
        ends.write("c")
        ends.close("stop")
        assert one.text() == "c"
        assert list(other) == []
        assert (other.ended, other.retry) == (True, "1000")
    gateway.await_stop()
    assert not stays.cancelled


def test_a_restarted_clawd_is_found_again(daemon: Daemon, serve: Callable[..., Gateway]) -> None:
    gateway = serve()
    assert gateway.ask("GET", "/readyz").status == 200
    daemon.stop()
    daemon.start()
    with Producer("engine", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("again")
        stream.close("stop")
        with gateway.read("/v1/streams/s") as events:
            assert events.text() == "again"


def test_it_runs_without_clawd_and_says_so(tmp_path, producer: Producer, daemon: Daemon) -> None:
    with Gateway(tmp_path / "nothing here") as gateway:
        gateway.ask("GET", "/readyz").check_problem(503, "unavailable")
        gateway.ask("GET", "/v1/streams/s").check_problem(503, "unavailable")
        assert gateway.ask("GET", "/healthz").status == 200


def test_a_unix_socket_serves_and_replaces_one_that_was_left(
    serve: Callable[..., Gateway], producer: Producer, tmp_path
) -> None:
    path = tmp_path / "gateway.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    gateway = serve(listen=f"unix:{path}")
    stream = producer.open("s")
    stream.write("x")
    stream.close("stop")
    with gateway.read("/v1/streams/s") as events:
        assert events.text() == "x"
    assert path.stat().st_mode & 0o777 == 0o660
    gateway.stop()
    assert not path.exists()


def test_an_old_client_without_chunks_gets_the_stream_as_it_is(gateway: Gateway, producer: Producer) -> None:
    stream = producer.open("s")
    stream.write("x")
    stream.close("stop")
    with gateway.dial() as dialled:
        dialled.sendall(b"GET /v1/streams/s HTTP/1.0\r\n\r\n")
        data = b""
        while part := dialled.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.endswith(b'event: end\ndata: {"reason":"stop"}\n\n')


def test_filters_stop_and_redact_across_tokens(serve: Callable[..., Gateway], producer: Producer) -> None:
    gateway = serve("--stop-phrases", '["<|end|>"]', "--redact", '["\\\\b\\\\d{4}\\\\b"]')
    stream = producer.open("s")
    for piece in ("pin ", "12", "34", ", ok <", "|en"):
        stream.write(piece)
    with gateway.read("/v1/streams/s") as events:
        text = ""
        while text != "pin [redacted], ok ":
            told = events.next()
            text += told.json()["text"]
            assert "pin [redacted], ok ".startswith(text)
        stream.write("d|> never shown")
        rest = list(events)
        assert "".join(told.json().get("text", "") for told in rest) == ""
        assert rest[-1].json() == {"reason": "stop"}
    until(lambda: stream.cancelled, "the cancel")


def test_events_resume_through_filters(serve: Callable[..., Gateway], producer: Producer) -> None:
    gateway = serve("--redact", '["\\\\d{4}"]', "--gone-grace", "20s")
    stream = producer.open("s")
    said: list[tuple[str, str]] = [("", "")]
    with gateway.read("/v1/streams/s") as events:
        shown = ""
        for piece in ("pin 12", "34 or 1", "2 or ", "567", "8 ", "or 9 you"):
            stream.write(piece)
            told = events.next() if piece != "567" else None
            if told:
                shown += told.json()["text"]
                said.append((told.id, shown))
        stream.close("stop")
        rest = events.text()
        assert shown + rest == "pin [redacted] or 12 or [redacted] or 9 you"
    for at, before in said:
        with gateway.read("/v1/streams/s", **({"Last_Event_ID": at} if at else {})) as again:
            assert before + again.text() == shown + rest, at
