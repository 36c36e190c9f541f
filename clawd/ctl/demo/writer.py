# SPDX-License-Identifier: Apache-2.0
"""One producer process of the demo: writes its text as tokens, at a rate or as fast as the client reads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from clawd.ctl.demo.child import die_with, report
from clawd.ctl.demo.cutting import cut_file
from clawd.errors import ClawdError
from clawd.producer import Producer, Stream

PROGRESS = struct.Struct("<Q")
"""What the client says of itself on stdin: the cost of all it has read."""
BATCH = 512
"""Tokens of one write at most: they fit a quarter of the default ring."""
BLOCK_S = 30.0
_STDIN = 0


def cost(tokens: int, size: int) -> int:
    """What `tokens` of `size` bytes in all take of a stream's retention at most, in bytes."""
    return 32 * tokens + size


class Lead:
    """How far this process is ahead of its client, which clawd keeps only so much for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0
        self._read = 0

    def take(self, spent: int) -> None:
        """Wait until `spent` more is within the limit."""
        self._spent += spent
        self.sleep(0)
        while self._spent - self._read > self._limit:
            self.listen()

    def sleep(self, seconds: float) -> None:
        """Sleep, but hear the demo's end."""
        deadline = time.monotonic() + seconds
        while select.select([_STDIN], [], [], max(0.0, deadline - time.monotonic()))[0]:
            self.listen()

    def listen(self) -> None:
        """Wait for word from the client. Raises SystemExit when the demo has ended."""
        packet = os.read(_STDIN, 512 * PROGRESS.size)
        if not packet:
            raise SystemExit(1)
        (self._read,) = PROGRESS.unpack(packet[-PROGRESS.size :])


def batches(chunks: Iterator[list[bytes]], rate: float, lead: Lead) -> Iterator[list[bytes]]:
    """The tokens that are due, when they are: `rate` a second from the first on; 0 = at once."""
    start = time.monotonic()
    sent = 0
    for tokens in chunks:
        at = 0
        while at < len(tokens):
            count = BATCH
            if rate:
                lead.sleep(start + sent / rate - time.monotonic())
                due = int((time.monotonic() - start) * rate) + 1 - sent
                count = max(1, min(BATCH, due))
            batch = tokens[at : at + count]
            at += len(batch)
            sent += len(batch)
            yield batch


def write(producer: Producer, order: dict[str, Any]) -> dict[str, Any]:
    """Write the whole stream; returns the account of it."""
    lead = Lead(order["lead_bytes"])
    digest = hashlib.sha256()
    tokens = size = 0
    lead.listen()  # the client is there: begin
    requested_ns = time.monotonic_ns()
    stream: Stream = producer.open(order["stream"], requested_ns=requested_ns, block=BLOCK_S)
    with open(order["fd"], "rb") as file:
        for batch in batches(cut_file(file, order["seed"]), order["rate"], lead):
            data = b"".join(batch)
            lead.take(cost(len(batch), len(data)))
            producer.write_many([(stream, token) for token in batch], block=BLOCK_S)
            digest.update(data)
            tokens += len(batch)
            size += len(data)
    stream.close("stop", block=BLOCK_S)
    return {"tokens": tokens, "bytes": size, "digest": digest.hexdigest(), "requested_ns": requested_ns}


def main() -> int:
    order = json.loads(sys.argv[1])
    die_with(order["parent"])
    try:
        with Producer(name=order["stream"], runtime_dir=order["runtime_dir"]) as producer:
            report(**write(producer, order))
    except (ClawdError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):
            report(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
