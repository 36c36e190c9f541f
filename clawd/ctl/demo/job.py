# SPDX-License-Identifier: Apache-2.0
"""The demo's job: start the private daemon and the producers, read their streams, stop everything, however it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from clawd.consumer import Consumer
from clawd.ctl.demo.account import Account
from clawd.ctl.demo.child import end, read_report, start
from clawd.ctl.demo.reader import Received, read
from clawd.ctl.demo.screen import Screen
from clawd.ctl.demo.writer import PROGRESS
from clawd.errors import ClawdError

STOP_S = 10.0
TICK_S = 0.05
PIECES_MAX = 1000
"""Texts that wait to be shown; with more, the client waits as well."""


@dataclass
class Source:
    """One stream to be: its name, its text, where to write what the client gets."""

    name: str
    file: BinaryIO
    output: BinaryIO | None = None


@dataclass
class Part:
    """A stream that runs: its producer's process, its reader's thread."""

    source: Source
    writer: subprocess.Popen[bytes]
    received: Received
    thread: threading.Thread | None = None

    @property
    def progress(self) -> int:
        """The pipe on which the producer hears how far its client is."""
        assert self.writer.stdin
        return self.writer.stdin.fileno()


@contextlib.contextmanager
def private_daemon() -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """(its keeper, runtime directory, stream_bytes) of a daemon that nobody else uses; nothing is left of it after."""
    keeper = start("clawd.ctl.demo.keeper", {})
    try:
        told = read_report(keeper.stdout)
        if not told or "error" in told:
            raise ClawdError(f"cannot start a daemon: {told['error'] if told else 'its keeper ended'}")
        yield keeper, told["runtime_dir"], told["stream_bytes"]
    finally:
        end(keeper, STOP_S)


def start_writers(
    sources: list[Source], runtime_dir: str, seed: int, rate: float, lead_bytes: int, stack: contextlib.ExitStack
) -> list[Part]:
    """A process a source; each waits until its client is there, and is gone when `stack` is unwound."""
    parts = []
    for source in sources:
        order = {
            "parent": os.getpid(),
            "runtime_dir": runtime_dir,
            "stream": source.name,
            "seed": f"{seed} {source.name}",
            "rate": rate,
            "lead_bytes": lead_bytes,
            "fd": source.file.fileno(),
        }
        writer = start("clawd.ctl.demo.writer", order, [source.file.fileno()])
        stack.callback(end, writer, 0)
        parts.append(Part(source, writer, Received()))
    return parts


def check(keeper: subprocess.Popen[bytes], parts: list[Part]) -> None:
    """Raise ClawdError when the daemon, a producer or a reader ended for a wrong reason."""
    if keeper.poll() is not None:
        told = read_report(keeper.stdout)
        raise ClawdError(told["error"] if told else "the daemon's keeper ended")
    for part in parts:
        if part.received.error:
            raise part.received.error
        if part.writer.poll():
            told = read_report(part.writer.stdout)
            why = told["error"] if told else f"it ended with code {part.writer.returncode}"
            raise ClawdError(f"the producer of {part.source.name} failed: {why}")


def run(sources: list[Source], seed: int, rate: float, screen: Screen | None) -> list[Account]:
    """Stream every source at once, `rate` tokens a second each (0 = as fast as the client reads).

    Raises ClawdError or OSError when it cannot be done. Nothing of it runs, and nothing is left, when this returns.
    """
    pieces: queue.Queue[tuple[str, str]] = queue.Queue(PIECES_MAX)
    ended = threading.Event()

    def show(name: str, text: str) -> None:
        while text and not ended.is_set():
            with contextlib.suppress(queue.Full):
                pieces.put((name, text), timeout=TICK_S)
                return

    with contextlib.ExitStack() as stack:
        keeper, runtime_dir, stream_bytes = stack.enter_context(private_daemon())
        lead_bytes = stream_bytes // 2
        parts = start_writers(sources, runtime_dir, seed, rate, lead_bytes, stack)
        stack.callback(_join, parts)
        consumer = stack.enter_context(Consumer(runtime_dir=runtime_dir))
        stack.callback(ended.set)
        for part in parts:
            reading = consumer.attach(part.source.name)
            part.thread = threading.Thread(
                target=read,
                args=(reading, part.received, part.progress, lead_bytes // 8, part.source.output),
                kwargs={"show": functools.partial(show, part.source.name) if screen else None},
                name=f"reader of {part.source.name}",
                daemon=True,
            )
            part.thread.start()
        for part in parts:
            with contextlib.suppress(BrokenPipeError):  # it failed: check() says why
                os.write(part.progress, PROGRESS.pack(0))
        while any(part.thread and part.thread.is_alive() for part in parts) or not pieces.empty():
            _show_pieces(pieces, screen)
            check(keeper, parts)
        check(keeper, parts)
        return [_account(part) for part in parts]


def _join(parts: list[Part]) -> None:
    """Wait for the readers, whose consumer is closed."""
    for part in parts:
        if part.thread and part.thread.ident:
            part.thread.join(STOP_S)


def _show_pieces(pieces: queue.Queue[tuple[str, str]], screen: Screen | None) -> None:
    """Show what arrived in the next moment."""
    texts: dict[str, list[str]] = {}
    with contextlib.suppress(queue.Empty):
        name, text = pieces.get(timeout=TICK_S)
        texts[name] = [text]
        for _ in range(PIECES_MAX):
            name, text = pieces.get_nowait()
            texts.setdefault(name, []).append(text)
    if screen:
        for name, parts in texts.items():
            screen.feed(name, "".join(parts))
        screen.refresh()


def _account(part: Part) -> Account:
    sent = read_report(part.writer.stdout)
    if sent is None or "error" in sent:
        why = sent["error"] if sent else f"it ended with code {part.writer.wait()}"
        raise ClawdError(f"the producer of {part.source.name} failed: {why}")
    return Account(part.source.name, sent, part.received)
