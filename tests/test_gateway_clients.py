# SPDX-License-Identifier: Apache-2.0
"""The gateway read by programs that others wrote: curl, a WebSocket client, OpenAI's client, a browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from clawd.producer import Producer, Stream
from tests.daemon import Daemon, until
from tests.gateway import Gateway

pytestmark = pytest.mark.plain

WORDS = ["Hel", "lo, ", "wör", "ld 🦞", " <b>&amp;</b>\n", '"quoted"', " \u2028 end."]


@pytest.fixture
def gateway(daemon: Daemon) -> Iterator[Gateway]:
    with Gateway(daemon.runtime_dir, "--gone-grace", "200ms") as running:
        yield running


def say(stream: Stream, words: list[str] = WORDS, reason: str = "stop") -> None:
    for word in words:
        stream.write(word)
        time.sleep(0.01)
    stream.close(reason)


def test_curl_sees_text_as_it_comes_and_its_end_cancels(gateway: Gateway, engine: Producer) -> None:
    stream = engine.open("s")
    command = ["curl", "-sN", f"{gateway.url}/v1/streams/s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout
        for word in WORDS:
            stream.write(word)
            while True:  # this word, before the next one was written
                line = curl.stdout.readline()
                assert line, "curl ended"
                if line.startswith("data: "):
                    break
            assert json.loads(line[6:])["text"] == word
        curl.kill()
    until(lambda: stream.cancelled, "the cancel")


def test_curl_fails_on_a_problem(gateway: Gateway) -> None:
    run = subprocess.run(["curl", "-sSf", f"{gateway.url}/v1/streams/none?wait=0"], capture_output=True, text=True)
    assert run.returncode == 22
    assert "404" in run.stderr


# --- WebSocket ---


async def _messages(url: str, **options: Any) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.ws_connect(url, **options) as socket:
        said = [json.loads(message.data) async for message in socket]
        return [each for each in said if each["event"] != "hint"]  # comes when this host is busy


def test_a_websocket_gets_the_same_events(gateway: Gateway, engine: Producer) -> None:
    threading.Thread(target=say, args=(engine.open("s"),)).start()
    said = asyncio.run(_messages(f"{gateway.url}/v1/streams/s/ws"))
    assert "".join(each["text"] for each in said[:-1]) == "".join(WORDS)
    assert {each["event"] for each in said[:-1]} == {"text"}
    assert (said[-1]["event"], said[-1]["reason"]) == ("end", "stop")
    for number, each in enumerate(said):
        rest = asyncio.run(_messages(f"{gateway.url}/v1/streams/s/ws?after={each['id']}")) if number < 2 else None
        assert rest is None or [more["id"] for more in rest][-1] == said[-1]["id"]
        assert rest is None or "".join(more.get("text", "") for more in rest) == "".join(
            more.get("text", "") for more in said[number + 1 :]
        )


def test_a_long_message_and_a_cancel_go_through_a_websocket(gateway: Gateway, engine: Producer) -> None:
    stream = engine.open("s")
    text = "你" * 900
    for _ in range(40):
        stream.write(text)

    async def run() -> list[dict[str, Any]]:
        url = f"{gateway.url}/v1/streams/s/ws"
        got = []
        async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
            async for message in socket:
                got.append(json.loads(message.data))
                if sum(len(each.get("text", "")) for each in got) == 40 * 900 and len(got) < 1000:
                    await socket.send_str("no JSON")
                    await socket.send_json({"op": "cancel"})
        return got

    said = asyncio.run(run())
    assert "".join(each.get("text", "") for each in said) == text * 40
    assert said[-1]["reason"] == "cancelled"
    until(lambda: stream.cancelled, "the cancel")


def test_a_websocket_that_goes_away_cancels(gateway: Gateway, engine: Producer) -> None:
    stream = engine.open("s")

    async def run() -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{gateway.url}/v1/streams/s/ws"):
            return

    asyncio.run(run())
    until(lambda: stream.cancelled, "the cancel")
    until(gateway.is_idle, "nobody")


# --- OpenAI's client ---


class _Service(http.server.BaseHTTPRequestHandler):
    """What takes the question in a service: it names the stream, and sends the client to the gateway for the answer."""

    protocol_version = "HTTP/1.1"
    answer = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(303)
        self.send_header("Location", self.answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _asked(gateway: Gateway, stream: str) -> Iterator[Any]:
    """The chunks of an answer, as OpenAI's client gives them."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install 'clawd[test]'")
    handler = type("Service", (_Service,), {"answer": f"{gateway.url}/v1/streams/{stream}?format=openai"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{service.server_port}"
            with openai.OpenAI(api_key="x", base_url=url, max_retries=0) as client:
                question = [{"role": "user", "content": "?"}]
                with client.chat.completions.create(model="m", messages=question, stream=True) as chunks:
                    yield chunks
        finally:
            service.shutdown()
            thread.join()


@pytest.mark.filterwarnings("ignore")  # of its dependencies
@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "cancelled"])
def test_openais_client_reads_a_stream(gateway: Gateway, engine: Producer, reason: str) -> None:
    stream = engine.open("chatcmpl-1", meta={"model": "tiny"})
    threading.Thread(target=say, args=(stream, WORDS, reason)).start()
    with _asked(gateway, "chatcmpl-1") as answer:
        chunks = list(answer)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(WORDS)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == (reason if reason != "cancelled" else "stop")
    assert {(chunk.id, chunk.object) for chunk in chunks} == {("chatcmpl-1", "chat.completion.chunk")}
    assert chunks[-1].model == "tiny"


@pytest.mark.filterwarnings("ignore")
def test_openais_client_is_told_when_the_engine_died(gateway: Gateway, daemon: Daemon) -> None:
    openai = pytest.importorskip("openai")
    producer = Producer("dies", daemon.runtime_dir)
    producer.open("s").write("begun")
    with _asked(gateway, "s") as answer:
        chunks = iter(answer)
        next(chunks)
        assert next(chunks).choices[0].delta.content == "begun"
        producer.close()
        with pytest.raises(openai.APIError, match="producer_lost"):
            next(chunks)


# --- a browser ---


@pytest.fixture
def browse(gateway: Gateway, tmp_path: Path) -> Any:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")

    def run(fragment: str, *more: str) -> str:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--disable-background-networking", "--no-proxy-server", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--virtual-time-budget=4000", *more, f"{gateway.url}/#{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        return done.stdout

    return run


def _shown(page: str) -> tuple[str, str]:
    found = re.search(r'<div id="text"[^>]*>(.*?)</div>\s*<div id="state">(.*?)</div>', page, re.DOTALL)
    assert found, page
    return found[1], found[2]


@pytest.mark.parametrize("way", ["sse", "ws"])
def test_a_browser_shows_a_stream(gateway: Gateway, engine: Producer, browse: Any, way: str, tmp_path: Path) -> None:
    stream = engine.open("chatcmpl-1/ü")
    writer = threading.Thread(target=say, args=(stream, WORDS))
    picture = tmp_path / "page.png"
    writer.start()
    state, looks = "", 0
    while not state.startswith("Ended") and looks < 5:  # a headless browser's time does not wait for a WebSocket
        looks += 1
        page = browse(f"stream=chatcmpl-1%2F%C3%BC&way={way}", "--dump-dom", f"--screenshot={picture}")
        text, state = _shown(page)
    writer.join()
    assert text == "".join(WORDS).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert re.fullmatch(rf"Ended \(stop\): {len(WORDS)} tokens, first after \d+ ms", state), state
    # An EventSource that was told the end stopped asking
    figures = gateway.metrics()
    kind = "stream" if way == "sse" else "ws"
    code = "200" if way == "sse" else "101"
    assert figures[f'clawd_gateway_requests_total{{code="{code}",kind="{kind}"}}'] == looks


def test_a_browser_is_told_that_its_stream_is_over(browse: Any, gateway: Gateway, engine: Producer) -> None:
    engine.open("s").close("stop")
    _, state = _shown(browse("stream=s&way=sse", "--dump-dom"))
    assert state == "Ended (stop): no text"


def test_the_page_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    answer = gateway.ask("GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(rb"(?:src|href)\s*=|https?://|@import|url\(", answer.body)
