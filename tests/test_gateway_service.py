# SPDX-License-Identifier: Apache-2.0
"""The gateway as a service: cancelled streams, drains, restarts of clawd, listeners, and text that is filtered."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import pytest

import eventloop
from clawd.aconsumer import AsyncConsumer
from clawd.gateway.event import OpenAI, Sse
from clawd.gateway.fan import Fan, Terms
from clawd.gateway.figures import Figures
from clawd.producer import Producer
from eventloop import on_loop
from tests.daemon import Daemon, until
from tests.gateway import Gateway

pytestmark = pytest.mark.plain


def test_delete_cancels_for_everybody(gateway: Gateway, engine: Producer) -> None:
    read, unread = engine.open("read"), engine.open("unread")
    unread.write("some")
    with gateway.read("/v1/streams/read") as events:
        until(lambda: gateway.ask("DELETE", "/v1/streams/read").status == 202, "the cancel")
        until(lambda: read.cancelled, "the cancel")
        assert events.next().json() == {"reason": "cancelled"}
    assert gateway.ask("DELETE", "/v1/streams/unread").json() == {"stream": "unread", "cancelled": True}
    until(lambda: unread.cancelled, "the cancel")
    gateway.ask("DELETE", "/v1/streams/none").check_problem(404, "unknown")


def test_draining_lets_streams_end_and_says_when_not(
    serve: Callable[..., Gateway], engine: Producer, daemon: Daemon
) -> None:
    gateway = serve("--drain-timeout", "1s")
    ends, stays = engine.open("ends"), engine.open("stays")
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
    with Producer("engine", daemon.runtime_dir) as engine:
        stream = engine.open("s")
        stream.write("again")
        stream.close("stop")
        with gateway.read("/v1/streams/s") as events:
            assert events.text() == "again"


def test_it_runs_without_clawd_and_says_so(tmp_path, engine: Producer, daemon: Daemon) -> None:
    with Gateway(tmp_path / "nothing here") as gateway:
        gateway.process.send_signal(signal.SIGHUP)
        gateway.log.wait("restart to apply")
        gateway.ask("GET", "/readyz").check_problem(503, "unavailable")
        gateway.ask("GET", "/v1/streams/s").check_problem(503, "unavailable")
        assert gateway.ask("GET", "/healthz").status == 200


def test_a_unix_socket_serves_and_replaces_one_that_was_left(
    serve: Callable[..., Gateway], engine: Producer, tmp_path
) -> None:
    path = tmp_path / "gateway.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    gateway = serve(listen=f"unix:{path}")
    stream = engine.open("s")
    stream.write("x")
    stream.close("stop")
    with gateway.read("/v1/streams/s") as events:
        assert events.text() == "x"
    assert path.stat().st_mode & 0o777 == 0o660
    gateway.stop()
    assert not path.exists()


def test_an_old_client_without_chunks_gets_the_stream_as_it_is(gateway: Gateway, engine: Producer) -> None:
    stream = engine.open("s")
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


def test_filters_stop_and_redact_across_tokens(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve("--stop-phrases", '["<|end|>"]', "--redact", '["\\\\b\\\\d{4}\\\\b"]')
    stream = engine.open("s")
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


def test_events_resume_through_filters(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve("--redact", '["\\\\d{4}"]', "--gone-grace", "20s")
    stream = engine.open("s")
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


@on_loop
async def test_a_reader_is_told_what_to_leave_out(daemon: Daemon, engine: Producer) -> None:
    class Tight(AsyncConsumer):
        degrade = 2  # as clawd's frames say when a client's network is bad

    terms = Terms(65_536, 1.0, 1.0, lambda: None)
    async with Tight(daemon.runtime_dir) as consumer:
        fan = Fan(consumer, "s", None, 1.0, terms, Figures())
        stream = engine.open("s")
        stream.write("x")
        stream.close("stop")
        await eventloop.until(lambda: fan.over)
        assert [event.kind for event in fan.events] == ["text", "hint", "end"]
        hint = fan.events[1]
        assert hint.position == fan.events[0].position
        assert f'id: {hint.position}\nevent: hint\ndata: {{"degrade":2}}\n\n'.encode() == hint.encoded(Sse, fan)
        assert hint.encoded(OpenAI, fan) == b': "degrade":2\n\n'
        fan.close()
