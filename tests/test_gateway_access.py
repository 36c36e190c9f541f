# SPDX-License-Identifier: Apache-2.0
"""Who may read, and what the gateway says to everybody else: tokens, origins, limits, requests of every wrong kind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawd.errors import ClawdError, ConfigError, HostError
from clawd.gateway import access, position
from clawd.gateway.position import Position
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon, until
from tests.gateway import COMMAND, Answer, Gateway, read_all

pytestmark = pytest.mark.plain


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.key"
    access.make_key_file(path)
    return path


def clawctl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clawd.ctl.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


# --- keys and tokens ---


def test_a_token_is_good_for_its_stream_its_rights_and_its_time_only(key_file: Path) -> None:
    [key] = access.read_keys(key_file)
    token = access.make_token(key, "s", "rc", 1000)
    assert access.rights_of([key], token, "s", 1000) == "rc"
    assert access.rights_of([bytes(32), key], token, "s", 1000) == "rc"
    assert access.rights_of([key], token, "s", 1000.1) is None
    assert access.rights_of([key], token, "t", 0) is None
    assert access.rights_of([bytes(32)], token, "s", 0) is None
    assert access.rights_of([], token, "s", 0) is None
    for forged in (token.replace("rc", "m", 1), token.replace("1000", "2000"), token[:-1], token + "A", "", "rc.1.x"):
        assert access.rights_of([key], forged, "s", 0) is None


@given(st.text(max_size=80))
def test_nothing_but_a_token_is_one(text: str) -> None:
    assert access.rights_of([bytes(32)], text, "s", 0) is None


@given(st.integers(0, 200), st.integers(0, 127))
def test_a_token_with_one_other_character_is_none(at: int, code: int) -> None:
    token = access.make_token(bytes(32), "s", "r", 9_999_999_999)
    at %= len(token)
    forged = token[:at] + chr(code) + token[at + 1 :]
    if forged != token:
        # the last digit of base64 has bits that mean nothing: then it is the same token
        same = at == len(token) - 1 and forged[:-1] == token[:-1]
        assert access.rights_of([bytes(32)], forged, "s", 0) is None or same


def test_a_key_file_is_made_once_and_refused_when_others_may_read_it(tmp_path: Path, key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(HostError, match="is there already"):
        access.make_key_file(key_file)
    key_file.chmod(0o644)
    with pytest.raises(ConfigError, match="everybody may use"):
        access.read_keys(key_file)
    for text in ("", "abc\n", "g" * 64 + "\n", "0" * 64 + "\nmore\n"):
        (tmp_path / "bad").write_text(text)
        (tmp_path / "bad").chmod(0o600)
        with pytest.raises(ConfigError, match="has a line that is no key"):
            access.read_keys(tmp_path / "bad")
    with pytest.raises(ConfigError, match="cannot read"):
        access.read_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read"):
        access.read_keys(tmp_path)


def test_clawctl_makes_keys_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "k"
    assert clawctl("keys", "gateway", "make", path).stdout.startswith(f"made {path}")
    assert clawctl("keys", "gateway", "make", path).returncode == 1
    [key] = access.read_keys(path)
    token = clawctl("keys", "gateway", "token", "s/ü", "--key-file", path, "--valid", "1min").stdout.strip()
    assert access.rights_of([key], token, "s/ü") == "rc"
    assert access.rights_of([key], token, "s/ü", time.time() + 61) is None
    said = json.loads(clawctl("keys", "gateway", "token", "s", "--key-file", path, "--read-only", "--json").stdout)
    assert access.rights_of([key], said["token"], "s") == said["rights"] == "r"
    token = clawctl("keys", "gateway", "token", "--metrics", "--key-file", path).stdout.strip()
    assert access.rights_of([key], token, "") == "m"
    for arguments in (
        ("gate", "make"), ("gateway", "mak"), ("gateway", "make"), ("gateway", "token", "s"),
        ("gateway", "token", "--key-file", path), ("gateway", "token", "s", "--metrics", "--key-file", path),
        ("gateway", "token", "x" * 256, "--key-file", path),
        ("gateway", "token", "s", "--key-file", path, "--valid", "0"),
        ("gateway", "token", "s", "--key-file", path, "--valid", "soon"),
    ):  # fmt: skip
        run = clawctl("keys", *arguments)
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1), arguments


@pytest.mark.parametrize(
    ("listen", "local"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/x", True), ("127.9.9.9:1", True),
     ("0.0.0.0:1", False), ("[::]:1", False), ("127.0.0.1.example:1", False), ("10.0.0.1:1", False)],
)  # fmt: skip
def test_only_this_hosts_addresses_need_no_key(listen: str, local: bool) -> None:
    assert access.is_local(listen) == local
    if not local:
        command = [sys.executable, "-c", COMMAND, "--config", os.devnull, "--listen", listen]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert run.returncode == 2
        assert run.stderr.startswith(f'clawd-gateway: listen "{listen}" is reached from other hosts, and there is no')
        assert run.stderr.count("\n") == 1


def test_with_a_key_file_nobody_reads_without_a_token(
    serve: Callable[..., Gateway], engine: Producer, key_file: Path
) -> None:
    gateway = serve("--key-file", str(key_file))
    [key] = access.read_keys(key_file)
    late = int(time.time()) + 60
    stream = engine.open("s")
    stream.write("secret")
    good, reads = access.make_token(key, "s", "rc", late), access.make_token(key, "s", "r", late)
    bad = {
        "none": "",
        "foreign": access.make_token(key, "t", "rc", late),
        "of others": access.make_token(bytes(32), "s", "rc", late),
        "expired": access.make_token(key, "s", "rc", int(time.time()) - 1),
        "nonsense": "x" * 5000,
    }
    for name, token in bad.items():
        for method in ("GET", "DELETE"):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            answer = gateway.ask(method, "/v1/streams/s", **headers)
            answer.check_problem(401, "denied")
            assert answer.headers["www-authenticate"].startswith("Bearer"), name
            assert b"secret" not in answer.body
    assert gateway.ask("GET", "/v1/streams/s", Authorization="Basic eDp5").status == 401
    gateway.ask("GET", "/v1/streams/s/ws", Upgrade="websocket", Connection="close, Upgrade").check_problem(
        426, "bad_request"
    )
    gateway.ask("DELETE", f"/v1/streams/s?token={reads}").check_problem(403, "denied")
    gateway.ask("GET", "/metrics").check_problem(401, "denied")
    gateway.ask("GET", f"/metrics?token={good}").check_problem(401, "denied")
    token = access.make_token(key, "", "m", late)
    assert gateway.ask("GET", "/metrics", Authorization=f"Bearer {token}").status == 200
    for where in ({"Authorization": f"bearer  {reads}"}, {}):
        with gateway.read("/v1/streams/s" + ("" if where else f"?token={reads}"), **where) as events:
            assert events.next().json()["text"] == "secret"
    assert gateway.ask("DELETE", "/v1/streams/s", Authorization=f"Bearer {good}").status == 202
    until(lambda: stream.cancelled, "the cancel")
    assert not gateway.log.find(good)


# --- origins ---


@pytest.mark.parametrize(
    ("origin", "allowed", "answer"),
    [(None, (), ""), ("http://h:1", (), ""), ("http://evil", (), None), ("http://evil", ("*",), "*"),
     ("https://a", ("https://a", "https://b"), "https://a"), ("https://c", ("https://a",), None),
     ("null", (), None)],
)  # fmt: skip
def test_a_page_of_another_origin_reads_only_if_it_may(origin, allowed, answer) -> None:
    assert access.allowed_origin(origin, "h:1", allowed) == answer


def test_pages_are_answered_as_cors_says(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve("--allow-origin", "https://chat.example")
    engine.open("s").write("x")
    with gateway.read("/v1/streams/s", Origin="https://chat.example") as events:
        answer = events.open()
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert answer.headers["vary"] == "Origin"
    gateway.ask("GET", "/v1/streams/s", Origin="https://evil.example").check_problem(403, "origin")
    gateway.ask("DELETE", "/v1/streams/s", Origin="https://evil.example").check_problem(403, "origin")
    answer = gateway.ask("OPTIONS", "/v1/streams/s", Origin="https://chat.example")
    assert (answer.status, answer.headers["access-control-allow-methods"]) == (204, "GET, DELETE")
    # an error must be readable to the page, too
    answer = gateway.ask("GET", "/v1/streams/none?wait=0", Origin="https://chat.example")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (404, "https://chat.example")


# --- streams that are not there, and names of every kind ---


def test_streams_that_cannot_be_read_are_said_by_kind(start: Callable[..., Daemon]) -> None:
    daemon = start("--keep", "100ms", "--spool-bytes", "16M")
    with Gateway(daemon.runtime_dir) as gateway, Producer("engine", daemon.runtime_dir) as engine:
        gateway.ask("GET", "/v1/streams/none?wait=0").check_problem(404, "unknown")
        stream = engine.open("s")
        stream.write("x")
        with gateway.read("/v1/streams/s") as events:
            said = events.next()
        gateway.ask("GET", "/v1/streams/s", Last_Event_ID="1-0").check_problem(410, "lost")
        gateway.ask("GET", "/v1/streams/s", Last_Event_ID="1-+1").check_problem(410, "lost")
        stream.close("stop")
        until(lambda: daemon.total("streams_gone") == 1, "its end")
        gateway.ask("GET", "/v1/streams/s").check_problem(410, "gone")
        gateway.ask("GET", "/v1/streams/s", Last_Event_ID=said.id).check_problem(410, "gone")
        # waited for in vain, longer than the answer's status could wait: an event says so
        with gateway.read("/v1/streams/later?wait=1") as events:
            assert events.next().json()["reason"] == "unknown"
        assert gateway.is_idle()


def test_a_name_may_have_any_byte_that_utf8_has(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve()
    names = [chr(code) for code in range(32, 127)] + ["ü", "🦞", "a/b", "..", "%2F", "a b+c", "x" * 255, "\u2028"]
    for name in names:
        stream = engine.open(name)
        stream.write("x")
        stream.close("stop")
        path = "".join(f"%{byte:02X}" for byte in name.encode())
        with gateway.read(f"/v1/streams/{path}") as events:
            assert events.text() == "x", name
    for code in (*range(32), *range(127, 256)):
        gateway.ask("GET", f"/v1/streams/%{code:02X}").check_problem(400, "bad_request")
    gateway.ask("GET", "/v1/streams/").check_problem(400, "bad_request")
    gateway.ask("GET", "/v1/streams/" + "x" * 256).check_problem(400, "bad_request")
    gateway.ask("GET", "/v1/streams/" + "%F0%9F%A6%9E" * 64).check_problem(400, "bad_request")
    for path in ("/", "/v1", "/v1/streams", "/v1/streams/a/b", "/v1/streams/a/ws/b", "/metrics/", "//", "/..", "/%2e"):
        answer = gateway.ask("GET", path)
        assert answer.status == (200 if path == "/" else 404), path
    gateway.ask("POST", "/v1/streams/s").check_problem(405, "method")
    gateway.ask("HEAD", "/v1/streams/s")
    gateway.ask("GET", "/v1/streams/s?format=xml").check_problem(400, "bad_request")
    for wait in ("x", "-1", "nan", "inf"):
        gateway.ask("GET", f"/v1/streams/s?wait={wait}").check_problem(400, "bad_request")


BAD_IDS = (
    "x",
    "1",
    "-1",
    "1-",
    "1-x",
    "4294967296-1",
    "1-99999999999999999999",
    "1-2+",
    "1-2!!",
    "1--1",
    " 1-2 3",
    "1-2+-1",
)


@pytest.mark.parametrize("said", BAD_IDS)
def test_an_id_of_every_wrong_kind_is_refused(said: str) -> None:
    if said != "1-":  # before the first whole token
        with pytest.raises(ClawdError, match="is not the id of an event"):
            position.parse(said)


@given(st.integers(0, 2**32 - 1), st.integers(-1, 2**63 - 1), st.integers(0, 10**9 - 1), st.booleans())
def test_a_position_is_read_as_it_was_written(incarnation: int, seq: int, chars: int, over: bool) -> None:
    at = Position(incarnation, seq, chars, over)
    assert position.parse(str(at)) == at


def test_ids_of_every_wrong_kind_get_a_problem(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve()
    stream = engine.open("s")
    stream.write("x")
    for said in BAD_IDS:
        if said != "1-":
            gateway.ask("GET", "/v1/streams/s", Last_Event_ID=said).check_problem(400, "bad_request")
    gateway.ask("GET", "/v1/streams/s", Last_Event_ID="7-99999999").check_problem(410, "lost")
    with gateway.read("/v1/streams/s", Last_Event_ID="") as events:
        at = events.next().position
    # beyond what there is
    answer = gateway.ask("GET", f"/v1/streams/s?after={at.incarnation}-999")
    assert answer.status in (400, 410), answer


# --- limits ---


def test_connections_beyond_a_limit_are_told_and_closed(serve: Callable[..., Gateway]) -> None:
    gateway = serve("--max-connections", "3", "--max-per-address", "2")
    with ExitStack() as stack:
        for name in "ab":
            assert stack.enter_context(gateway.read(f"/v1/streams/{name}")).open().status == 200
        gateway.ask("GET", "/healthz").check_problem(429, "limit")
        other = stack.enter_context(socket.socket())
        other.bind(("127.0.0.2", 0))
        other.connect(("127.0.0.1", gateway.port))
        other.sendall(b"GET /v1/streams/c HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in other.recv(4096)
        gateway.ask("GET", "/healthz").check_problem(503, "limit")
    until(lambda: gateway.ask("GET", "/healthz").status == 200, "room again")
    figures = gateway.metrics()
    assert figures['clawd_gateway_refused_total{limit="connections"}'] >= 1
    assert figures['clawd_gateway_refused_total{limit="address"}'] >= 1


def test_who_sends_no_whole_request_in_time_is_cut_off(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve("--header-timeout", "1s")
    stream = engine.open("s")
    with ExitStack() as stack:
        honest = stack.enter_context(gateway.read("/v1/streams/s"))
        slow = [stack.enter_context(gateway.dial()) for _ in range(50)]
        for number, dialled in enumerate(slow):
            dialled.sendall(b"GET /v1/streams/s HTTP/1.1\r\nX: "[: number % 33])
        began = time.monotonic()
        over: set[socket.socket] = set()
        while len(over) < len(slow):
            for dialled in slow:
                if dialled not in over:
                    dialled.settimeout(0.01)
                    try:
                        dialled.sendall(b"y")  # a byte now and then does not help
                        if dialled.recv(1) == b"":
                            over.add(dialled)
                    except TimeoutError:
                        continue
                    except OSError:
                        over.add(dialled)
            assert time.monotonic() - began < PATIENCE_S
        stream.write("x")
        assert honest.next().json()["text"] == "x"


def test_requests_that_are_too_long_or_no_http_get_a_problem(serve: Callable[..., Gateway]) -> None:
    gateway = serve("--header-bytes", "1k")
    for request, status in (
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 5000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % number for number in range(5000)) + b"\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nBad Name: x\r\n\r\n", 400),
    ):
        with gateway.dial() as dialled:
            dialled.sendall(request)
            answer = Answer.parse(read_all(dialled))
        assert answer.status in (status, 400), (request[:40], answer)
        answer.check_problem(answer.status, "bad_request")
    assert gateway.ask("GET", "/healthz").status == 200
    assert not gateway.log.find("Traceback")


def test_a_flood_of_reconnects_leaves_nothing(serve: Callable[..., Gateway], engine: Producer) -> None:
    gateway = serve()
    stream = engine.open("s")
    stream.write("x")
    for number in range(300):
        with gateway.read("/v1/streams/s" if number % 3 else "/v1/streams/none?wait=0") as events:
            if number % 2:
                events.open()
    until(gateway.is_idle, "nobody")
    with gateway.read("/v1/streams/s") as events:
        assert events.next().json()["text"] == "x"
    assert gateway.metrics()["clawd_gateway_readers"] <= 1
