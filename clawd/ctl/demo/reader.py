# SPDX-License-Identifier: Apache-2.0
"""The client of the demo: reads one stream to its end and keeps account of what came, in which order and how late."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from clawd.consumer import Reading
from clawd.ctl.demo.delay import Delays
from clawd.ctl.demo.writer import PROGRESS, cost
from clawd.errors import ClawdError, HostError

Show = Callable[[str], None]


@dataclass
class Received:
    """What the client got of one stream."""

    tokens: int = 0
    bytes: int = 0
    digest: str = ""
    gaps: int = 0
    in_order: bool = True
    end_reason: str | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    delays: Delays = field(default_factory=Delays)
    error: Exception | None = None


def read(
    reading: Reading, received: Received, progress: int, step: int, output: BinaryIO | None, show: Show | None
) -> None:
    """Read the stream to its end into `received`.

    The pipe `progress` is told every `step` bytes of cost, so that the producer stays within what clawd keeps. An error
    ends up in `received`, as this runs in a thread of its own.
    """
    try:
        _read(reading, received, progress, step, output, show)
    except (ClawdError, OSError) as error:
        received.error = error


def _read(
    reading: Reading, received: Received, progress: int, step: int, output: BinaryIO | None, show: Show | None
) -> None:
    digest = hashlib.sha256()
    told = expected = 0
    while (batch := reading.read_batch()) is not None:
        now_ns = time.monotonic_ns()
        if batch.count:
            received.in_order &= batch.first_seq == expected and batch.last_seq == expected + batch.count - 1
            expected = batch.last_seq + 1
            received.delays.add(batch.written_ns, now_ns)
            received.first_ns = received.first_ns or now_ns
            received.last_ns = now_ns
            received.tokens += batch.count
            received.bytes += len(batch.data)
            digest.update(batch.data)
            if output:
                _write(output, batch.data)
        paid = cost(received.tokens, received.bytes)
        if paid - told >= step:
            told = paid
            with contextlib.suppress(BrokenPipeError):  # it has written all it had
                os.write(progress, PROGRESS.pack(paid))
        if show:
            show(batch.text)
    if output:
        _write(output, b"", flush=True)
    received.digest = digest.hexdigest()
    received.gaps = len(reading.gaps)
    received.end_reason = reading.end_reason


def _write(output: BinaryIO, data: bytes, *, flush: bool = False) -> None:
    try:
        output.write(data)
        if flush:
            output.flush()
    except OSError as error:
        raise HostError(f"cannot write the output: {error.strerror}") from error
