# SPDX-License-Identifier: Apache-2.0
"""Errors as HTTP answers: problem details of RFC 9457."""

from __future__ import annotations

import json
from http import HTTPStatus

from aiohttp import web

from clawd.errors import AttachError, ClawdError, ControlError

_STATUS = {"unknown": 404, "gone": 410, "lost": 410, "denied": 403, "limit": 503, "bad_request": 400}
"""By the code of a refused attach."""


class Problem(Exception):
    """A request that cannot be served. `code` is for programs, as clawd's own; `detail` is for people."""

    def __init__(self, status: int, code: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> bytes:
        return json.dumps(
            {
                "type": "about:blank",
                "title": HTTPStatus(self.status).phrase,
                "status": self.status,
                "detail": self.detail,
                "code": self.code,
            }
        ).encode()

    def response(self) -> web.Response:
        headers = {"Cache-Control": "no-store", **self.headers}
        answer = web.Response(
            status=self.status, body=self.body(), content_type="application/problem+json", headers=headers
        )
        if self.status in (400, 408, 431):  # what comes next on this connection may be anything
            answer.force_close()
        return answer

    def raw(self) -> bytes:
        """The whole answer, for a connection that is not even listened to."""
        body = self.body()
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\nContent-Type: application/problem+json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


def problem_of(error: ClawdError) -> Problem:
    """What a reader is told of `error`."""
    if isinstance(error, AttachError):
        status = _STATUS.get(error.code, 500)
        return Problem(status, error.code, str(error), **({"Retry_After": "1"} if status == 503 else {}))
    if isinstance(error, ControlError):
        return Problem(503, "unavailable", "clawd cannot be reached", Retry_After="1")
    return Problem(500, "error", error.message)
