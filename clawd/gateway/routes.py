# SPDX-License-Identifier: Apache-2.0
"""What the gateway answers to a request: which stream, for whom, in which form."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

from aiohttp import WSMsgType, web

from clawd import log, protocol
from clawd.config import Config
from clawd.errors import ClawdError, ReadTimeout
from clawd.gateway import access, position
from clawd.gateway.connection import Connection, Outlet
from clawd.gateway.event import Format, OpenAI, Sse, WebSocket
from clawd.gateway.fan import Hub
from clawd.gateway.figures import Figures
from clawd.gateway.problem import Problem, problem_of
from clawd.gateway.reader import Reader

SERVER = "clawd"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
FIRST_S = 0.5
"""How long an answer waits for what decides its status. Then it is 200, and what comes to light is told as an event:
headers must go out before the first token, or a proxy takes the stream for dead.
"""
CANCEL_S = 2.0
MESSAGE_MAX = 4096
"""Bytes of a WebSocket message from a reader."""
FORMATS: dict[str, type[Format]] = {"": Sse, "openai": OpenAI}


class Asked(NamedTuple):
    """A request's target: path segments, decoded once each, and the query."""

    parts: tuple[str, ...]
    query: dict[str, str]


def parse_target(target: str) -> Asked:
    """Of the target as it stands in the request line. Raises Problem.

    A stream's name may hold any character, also / when it is written %2F: so the path is cut before it is decoded.
    """
    path, _, query = target.partition("?")
    path = re.sub(r"^https?://[^/]*", "", path)  # RFC 9112 3.2.2
    try:
        raw = path.encode("utf-8", "surrogateescape")
        parts = tuple(unquote_to_bytes(part).decode() for part in raw.split(b"/")[1:])
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError as error:
        raise Problem(400, "bad_request", "the path or the query is not UTF-8") from error
    return Asked(parts, dict(pairs))


def check_name(name: str) -> str:
    """A stream's name. Raises Problem."""
    if not 1 <= len(name.encode()) <= protocol.NAME_MAX or _CONTROL.search(name):
        raise Problem(
            400, "bad_request", f"a stream's name has 1 to {protocol.NAME_MAX} bytes and no control characters"
        )
    return name


def _wait_of(query: dict[str, str], most: float) -> float:
    text = query.get("wait", "")
    if not text:
        return most
    try:
        wait = float(text)
    except ValueError:
        wait = math.nan
    if not 0 <= wait < math.inf:
        raise Problem(400, "bad_request", "wait is a number of seconds")
    return min(wait, most)


class Routes:
    """Serves requests. `is_draining`: nothing new begins."""

    def __init__(
        self, config: Config, hub: Hub | None, figures: Figures, metrics: Callable[[], bytes], keys: list[bytes]
    ) -> None:
        self._config = config
        self._hub = hub
        self._figures = figures
        self._metrics = metrics
        self._keys = keys
        self.is_draining = False
        self.readers: set[Reader] = set()

    async def serve(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        """Answer one request."""
        kind = "other"
        origin: str | None = None
        try:
            asked = parse_target(request.raw_path)
            kind, handle = self._find(request, asked)
            origin = self._origin(request)
            answer = await handle(request, connection, asked, origin or "")
        except Problem as problem:
            answer = problem.response()
            self._allow(answer, origin)
        except ClawdError as error:
            answer = problem_of(error).response()
            self._allow(answer, origin)
        self._figures.requests[kind, answer.status] += 1
        if not answer.prepared:
            answer.headers["Server"] = SERVER
        return answer

    def _find(self, request: web.BaseRequest, asked: Asked) -> tuple[str, Handle]:
        parts, method = asked.parts, request.method
        one: dict[tuple[str, ...], Handle] = {
            ("metrics",): self._get_metrics,
            ("healthz",): self._get_health,
            ("readyz",): self._get_ready,
        }
        if self._hub is not None:
            one[("",)] = self._get_page
        rows: dict[str, Handle]
        if parts in one:
            kind, rows = parts[0] or "page", {"GET": one[parts]}
        elif self._hub is not None and parts[:2] == ("v1", "streams") and len(parts) == 3:
            kind, rows = "stream", {"GET": self._get_stream, "DELETE": self._cancel, "OPTIONS": self._preflight}
        elif self._hub is not None and parts[:2] == ("v1", "streams") and parts[3:] == ("ws",):
            kind, rows = "ws", {"GET": self._get_messages}
        else:
            raise Problem(
                404, "not_found", "there is /v1/streams/NAME, /v1/streams/NAME/ws, /metrics, /healthz, /readyz"
            )
        if method not in rows:
            raise Problem(405, "method", f"{kind} takes {', '.join(rows)}", Allow=", ".join(rows))
        return kind, rows[method]

    # ---- who may

    def _origin(self, request: web.BaseRequest) -> str:
        headers = request.headers
        origin = access.allowed_origin(headers.get("Origin"), headers.get("Host"), self._config.allow_origin)
        if origin is None:
            raise Problem(403, "origin", "pages of this origin may not read here; see allow_origin")
        return origin

    def _check_rights(self, request: web.BaseRequest, asked: Asked, stream: str, wanted: str) -> None:
        """`wanted` is one letter of access.RIGHTS."""
        if not self._keys:
            return
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if kind.lower() == "bearer" else asked.query.get("token", "")
        if not token:
            raise Problem(401, "denied", "a token is needed", WWW_Authenticate="Bearer")
        rights = access.rights_of(self._keys, token, stream)
        if rights is None:
            raise Problem(401, "denied", "this token is none for it", WWW_Authenticate='Bearer error="invalid_token"')
        if wanted not in rights:
            raise Problem(403, "denied", "this token does not allow that")

    @staticmethod
    def _allow(answer: web.StreamResponse, origin: str | None) -> None:
        if origin:
            answer.headers["Access-Control-Allow-Origin"] = origin
            answer.headers["Vary"] = "Origin"

    async def _preflight(
        self, request: web.BaseRequest, _: Connection, asked: Asked, origin: str
    ) -> web.StreamResponse:
        answer = web.Response(status=204)
        self._allow(answer, origin)
        answer.headers["Access-Control-Allow-Methods"] = "GET, DELETE"
        answer.headers["Access-Control-Allow-Headers"] = "Authorization, Last-Event-ID"
        answer.headers["Access-Control-Max-Age"] = "600"
        return answer

    # ---- streams

    def _begin(self, request: web.BaseRequest, asked: Asked, form: type[Format]) -> Reader:
        """Raises Problem and ClawdError."""
        assert self._hub is not None
        name = check_name(asked.parts[2])
        self._check_rights(request, asked, name, "r")
        if self.is_draining:
            raise Problem(503, "stopping", "the gateway is being stopped", Retry_After="1", Connection="close")
        said = asked.query.get("after") or request.headers.get("Last-Event-ID") or ""
        try:
            after = position.parse(said) if said else None
        except ClawdError as error:
            raise Problem(400, "bad_request", str(error)) from error
        if after is not None and after.over:
            # What makes an EventSource stop asking
            raise _Nothing
        wait = _wait_of(asked.query, self._config.open_wait / 1e9)
        return Reader(self._hub, self._figures, form, name, after, wait)

    async def _get_stream(
        self, request: web.BaseRequest, connection: Connection, asked: Asked, origin: str
    ) -> web.StreamResponse:
        form = FORMATS.get(asked.query.get("format", ""))
        if form is None:
            raise Problem(400, "bad_request", "format is openai, or is left out")
        try:
            reader = self._begin(request, asked, form)
        except _Nothing:
            answer: web.StreamResponse = web.Response(status=204)
            self._allow(answer, origin)
            return answer
        try:
            await self._check_first(reader)
            is_chunked = request.version >= (1, 1)
            headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no", "Server": SERVER}
            answer = web.StreamResponse(headers=headers)
            answer.content_type = "text/event-stream"
            answer.charset = "utf-8"
            self._allow(answer, origin)
            if is_chunked:
                answer.enable_chunked_encoding()
            await answer.prepare(request)
            await answer.write(form.greeting(reader.fan))
            await self._follow(reader, connection, Outlet(connection, is_chunked=is_chunked))
            await answer.write_eof()
            return answer
        finally:
            self._end(reader, connection)

    async def _check_first(self, reader: Reader) -> None:
        await reader.wait_first(FIRST_S)
        if reader.fan.error is not None:
            raise reader.fan.error

    async def _follow(self, reader: Reader, connection: Connection, outlet: Outlet) -> None:
        connection.reader = reader
        self.readers.add(reader)
        reader.start(outlet)
        await reader.done

    def _end(self, reader: Reader, connection: Connection) -> None:
        connection.reader = None
        self.readers.discard(reader)
        reader.leave()

    async def _get_messages(
        self, request: web.BaseRequest, connection: Connection, asked: Asked, origin: str
    ) -> web.StreamResponse:
        answer = web.WebSocketResponse(compress=False, max_msg_size=MESSAGE_MAX, timeout=2.0)
        if not answer.can_prepare(request):
            raise Problem(426, "bad_request", "this is for WebSocket", Upgrade="websocket", Connection="Upgrade")
        try:
            reader = self._begin(request, asked, WebSocket)
        except _Nothing:
            raise Problem(410, "gone", "the end of this stream was told") from None
        try:
            await self._check_first(reader)
            await answer.prepare(request)
            hear = asyncio.ensure_future(self._hear(answer, reader, lambda: self._check_rights(
                request, asked, reader.name, "c")))  # fmt: skip
            follow = asyncio.ensure_future(self._follow(reader, connection, Outlet(connection, is_chunked=False)))
            try:
                await asyncio.wait((hear, follow), return_when=asyncio.FIRST_COMPLETED)
            finally:
                hear.cancel()
                follow.cancel()
                await asyncio.wait((hear, follow))
            reason = reader.done.result() if reader.done.done() else ""
            await answer.close(code=1012 if reason == "stopping" else 1000, message=reason.encode()[:100])
            return answer
        finally:
            self._end(reader, connection)

    @staticmethod
    async def _hear(answer: web.WebSocketResponse, reader: Reader, check: Callable[[], None]) -> None:
        """What a reader says: it may cancel. Returns when it has gone."""
        async for message in answer:
            if message.type is not WSMsgType.TEXT:
                continue
            try:
                said = json.loads(message.data)
            except (ValueError, RecursionError):
                continue
            if isinstance(said, dict) and said.get("op") == "cancel":
                try:
                    check()
                    reader.fan.reading.cancel()
                except (Problem, ClawdError):
                    continue

    async def _cancel(self, request: web.BaseRequest, _: Connection, asked: Asked, origin: str) -> web.StreamResponse:
        assert self._hub is not None
        name = check_name(asked.parts[2])
        self._check_rights(request, asked, name, "c")
        fan = self._hub.main(name)
        if fan is not None:
            fan.reading.cancel()
        else:
            # One token, or the refusal, says that clawd has heard it: what comes later cannot overtake it
            with self._hub.consumer().attach(name, wait=0.0, credit=1) as reading:
                reading.cancel()
                try:
                    await reading.read_batch(CANCEL_S)
                except ReadTimeout:
                    log.warning("a cancel was not answered", stream=name)
        answer = web.Response(
            status=202, body=json.dumps({"stream": name, "cancelled": True}).encode(), content_type="application/json"
        )
        self._allow(answer, origin)
        return answer

    # ---- the gateway itself

    async def _get_metrics(
        self, request: web.BaseRequest, _: Connection, asked: Asked, origin: str
    ) -> web.StreamResponse:
        self._check_rights(request, asked, "", "m")
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _get_health(self, *_: object) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _get_ready(self, *_: object) -> web.StreamResponse:
        if self.is_draining:
            raise Problem(503, "stopping", "the gateway is being stopped", Retry_After="1")
        if self._hub is not None:
            self._hub.consumer()
        return web.Response(text="ready\n")

    async def _get_page(self, *_: object) -> web.StreamResponse:
        page = files("clawd.gateway").joinpath("page.html").read_bytes()
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)


Handle = Callable[[web.BaseRequest, Connection, Asked, str], Awaitable[web.StreamResponse]]


class _Nothing(Exception):
    """The reader has got all there ever will be."""
