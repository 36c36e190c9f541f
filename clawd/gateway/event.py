# SPDX-License-Identifier: Apache-2.0
"""What readers are told, and how it is written: Server-Sent Events, WebSocket messages, chunks as OpenAI's clients
read them. One event is encoded once for each way, however many read it.
"""

from __future__ import annotations

import json
import struct
from json.encoder import encode_basestring
from typing import Protocol

from clawd.gateway.position import Position

_quote = encode_basestring  # the C one: text stays UTF-8


class Story(Protocol):
    """What of a stream every event's envelope needs."""

    name: str
    created: int

    @property
    def model(self) -> str: ...


class Event:
    """One thing to tell. `kind` is text, gap, hint or end; `body` its JSON object without braces; `position` where a
    reader is after it, None where that cannot be said. `tokens` counts the text's, the first of which was written at
    `written_ns`.
    """

    __slots__ = ("_encoded", "body", "kind", "position", "reason", "size", "text", "tokens", "written_ns")

    def __init__(self, kind: str, body: str, position: Position | None, text: str = "", reason: str = "",
                 tokens: int = 0, written_ns: int = 0) -> None:  # fmt: skip
        self.kind = kind
        self.body = body
        self.position = position
        self.text = text
        self.reason = reason
        self.tokens = tokens
        self.written_ns = written_ns
        self.size = 256 + 4 * len(body)  # what keeping it costs, encodings included
        self._encoded: dict[type[Format], bytes] = {}

    def encoded(self, form: type[Format], story: Story) -> bytes:
        data = self._encoded.get(form)
        if data is None:
            data = self._encoded[form] = form.encode(self, story)
        return data


def text_event(text: str, seq: int, tokens: int, position: Position | None, written_ns: int) -> Event:
    """`text` of the `tokens` tokens that end with `seq`."""
    body = f'"text":{_quote(text)},"seq":{seq},"count":{tokens}'
    return Event("text", body, position, text=text, tokens=tokens, written_ns=written_ns)


def gap_event(first: int, last: int, reason: str, position: Position | None) -> Event:
    return Event("gap", f'"first":{first},"last":{last},"reason":{_quote(reason)}', position, reason=reason)


def hint_event(degrade: int, position: Position | None) -> Event:
    """What clawd asks readers to leave out while things are tight: 0 nothing, more is more."""
    return Event("hint", f'"degrade":{degrade}', position)


def end_event(reason: str, message: str | None, position: Position | None) -> Event:
    """The last event. `message` is for people, where the stream did not end by itself."""
    more = f',"message":{_quote(message)}' if message else ""
    return Event("end", f'"reason":{_quote(reason)}{more}', position, text=message or "", reason=reason)


class Format:
    """A way to write events. `frame` is what one write on the wire takes around them."""

    heartbeat = b""
    farewell = b""
    """Says that the gateway stops and the reader should come again."""

    @staticmethod
    def encode(event: Event, story: Story) -> bytes:
        raise NotImplementedError

    @staticmethod
    def greeting(story: Story) -> bytes:
        """What comes before the first event."""
        return b""


RETRY_MS = 1000


class Sse(Format):
    """Server-Sent Events: the WHATWG's text/event-stream."""

    heartbeat = b":\n\n"
    farewell = b"retry: %d\n\n" % RETRY_MS

    @staticmethod
    def encode(event: Event, story: Story) -> bytes:
        at = f"id: {event.position}\n" if event.position else ""
        kind = "" if event.kind == "text" else f"event: {event.kind}\n"
        return f"{at}{kind}data: {{{event.body}}}\n\n".encode()

    @staticmethod
    def greeting(story: Story) -> bytes:
        # A comment, so that what is between sees a body at once
        return b":\n\n"


def _ws_frame(opcode: int, payload: bytes) -> bytes:
    size = len(payload)  # RFC 6455 5.2, unmasked as a server's are
    if size < 126:
        return bytes((0x80 | opcode, size)) + payload
    if size < 65536:
        return struct.pack(">BBH", 0x80 | opcode, 126, size) + payload
    return struct.pack(">BBQ", 0x80 | opcode, 127, size) + payload


class WebSocket(Format):
    """The same events, each a JSON object in a text message."""

    heartbeat = _ws_frame(9, b"")

    @staticmethod
    def encode(event: Event, story: Story) -> bytes:
        at = f'"id":"{event.position}",' if event.position else ""
        return _ws_frame(1, f'{{"event":"{event.kind}",{at}{event.body}}}'.encode())


# What OpenAI's clients know; anything else is an error to them
FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "content_filter": "content_filter",
          "cancelled": "stop"}  # fmt: skip


_ROLE = '{"role":"assistant","content":""}'


class OpenAI(Format):
    """chat.completion.chunk objects over Server-Sent Events, ending in [DONE]. They have no word for a gap: it is an
    error, after which text goes on.
    """

    heartbeat = Sse.heartbeat
    farewell = Sse.farewell

    @staticmethod
    def encode(event: Event, story: Story) -> bytes:
        at = f"id: {event.position}\n" if event.position else ""
        if event.kind == "text":
            delta = f'{{"content":{_quote(event.text)}}}'
            return f"{at}data: {_chunk(story, delta, 'null')}\n\n".encode()
        if event.kind == "gap":
            return f"{at}data: {_error('gap', f'tokens are missing: {event.reason}')}\n\n".encode()
        if event.kind == "hint":  # a comment: they have no word for it
            return f": {event.body}\n\n".encode()
        finish = FINISH.get(event.reason)
        if finish:
            data = _chunk(story, "{}", f'"{finish}"')
        else:
            data = _error(event.reason, event.text or f"the stream ended: {event.reason}")
        return f"{at}data: {data}\n\ndata: [DONE]\n\n".encode()

    @staticmethod
    def greeting(story: Story) -> bytes:
        return f"data: {_chunk(story, _ROLE, 'null')}\n\n".encode()


def _chunk(story: Story, delta: str, finish: str) -> str:
    return (
        f'{{"id":{_quote(story.name)},"object":"chat.completion.chunk","created":{story.created},'
        f'"model":{_quote(story.model)},"choices":[{{"index":0,"delta":{delta},"finish_reason":{finish}}}]}}'
    )


def _error(code: str, message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "clawd", "code": code}})
