# SPDX-License-Identifier: Apache-2.0
"""What the gateway is compared with: an aiohttp endpoint for Server-Sent Events, fed by Redis Streams."""

from __future__ import annotations

import sys

import redis.asyncio
from aiohttp import web


async def stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await answer.prepare(request)
    client: redis.asyncio.Redis = request.app["redis"]
    name, last, seq = request.match_info["name"], "0", 0
    while True:
        found = await client.xread({name: last}, count=64, block=15_000)
        if not found:
            await answer.write(b":\n\n")
            continue
        parts = []
        for last, row in found[0][1]:
            if b"e" in row:
                parts.append(b'event: end\ndata: {"reason":"stop"}\n\n')
                await answer.write(b"".join(parts))
                return answer
            parts.append(b'id: %b\ndata: {"text":"%b","seq":%d,"count":1}\n\n' % (last, row[b"t"], seq))
            seq += 1
        await answer.write(b"".join(parts))


def main() -> None:
    path, port = sys.argv[1:]
    app = web.Application()

    async def connect(app: web.Application) -> None:
        app["redis"] = redis.asyncio.Redis(unix_socket_path=path, max_connections=4096)

    app.on_startup.append(connect)
    app.router.add_get("/v1/streams/{name}", stream)
    web.run_app(app, host="127.0.0.1", port=int(port), access_log=None)


if __name__ == "__main__":
    main()
