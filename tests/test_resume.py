# SPDX-License-Identifier: Apache-2.0
"""Going on from a position, in another client: after every piece of a text cut anywhere, exactly the rest comes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from clawd.aconsumer import AsyncConsumer
from clawd.consumer import Consumer
from clawd.errors import AttachError, ClawdError
from clawd.producer import Producer, Stream
from tests.daemon import PATIENCE_S, SANITIZED, Daemon, until
from tests.history import History

Start = Callable[..., Daemon]
KEEP = "2s" if SANITIZED else "300ms"
TEXT = "aß語🦞e\u0301 — 👩\u200d🚀\n\ufeff.\U0001f1e9\U0001f1ea!"


def pieces(cut: str, dice: random.Random) -> list[bytes]:
    data = TEXT.encode()
    if cut == "byte by byte":
        return [data[at : at + 1] for at in range(len(data))]
    places = [0, *sorted(dice.sample(range(1, len(data)), 20)), len(data)]
    return [data[at:end] for at, end in pairwise(places)]


def boundaries(consumer: Consumer, name: str, batches: bool) -> Iterator[tuple[str, str | None]]:
    """After each thing that was handed out: where to go on, and what was shown up to there. A piece that ends within a
    character moves no position: whoever goes on there is shown its beginning again.
    """
    shown = settled = ""
    reading = consumer.attach(name)
    position = reading.position
    yield settled, position
    while (got := reading.read_batch(PATIENCE_S) if batches else reading.read(PATIENCE_S)) is not None:
        shown += got.text
        if reading.position != position:
            settled, position = shown, reading.position
        yield settled, position


@pytest.mark.parametrize("cut", ["byte by byte", "anywhere"])
@pytest.mark.parametrize("batches", [False, True], ids=["token by token", "in batches"])
def test_after_every_piece_exactly_the_rest_comes(
    daemon: Daemon, history: History, dice: random.Random, cut: str, batches: bool
) -> None:
    parts = pieces(cut, dice)
    history.put("s", *parts)
    history.end("s", "stop")

    async def rest_in_asyncio(after: str | None) -> str:
        async with AsyncConsumer(daemon.runtime_dir) as consumer, consumer.attach("s", after) as reading:
            return "".join([token.text async for token in reading])

    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        for part in parts:
            stream.write(part)
        stream.close()
        places = list(boundaries(consumer, "s", batches))
        assert places[-1][0] == TEXT
        for shown, position in places:
            assert TEXT.startswith(shown)
            after = -1 if position is None else int(position.partition("-")[2])
            with Consumer(daemon.runtime_dir) as other:
                got = history.reading("s", f"after {position}", after)
                got.follow(other.attach("s", position), batches=batches)
            assert shown + "".join(got.text) == TEXT
            assert shown + asyncio.run(rest_in_asyncio(position)) == TEXT
    assert len(history.readings) == len(places) > (1 if batches else 20)
    history.check()


@pytest.mark.parametrize("batches", [False, True], ids=["token by token", "in batches"])
def test_a_reader_that_goes_and_comes_back_while_it_is_written_shows_it_once(
    daemon: Daemon, dice: random.Random, batches: bool
) -> None:
    parts = pieces("byte by byte", dice) * 4
    shown, position = "", None
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        left = list(parts)

        def write(count: int) -> None:
            for _ in range(min(count, len(left))):
                stream.write(left.pop(0))
            if not left:
                stream.close()

        while True:
            with Consumer(daemon.runtime_dir) as consumer, consumer.attach("s", position) as reading:
                if left:
                    write(dice.randrange(4, 9))  # a character is whole by then
                got = reading.read_batch(PATIENCE_S) if batches else reading.read(PATIENCE_S)
                while got is not None and not (got.text and dice.random() < 0.7):
                    shown += got.text
                    if left:
                        write(4)
                    got = reading.read_batch(PATIENCE_S) if batches else reading.read(PATIENCE_S)
                if got is None:
                    break
                shown += got.text
                position = reading.position
    assert shown == TEXT * 4


def test_a_position_at_the_end_gives_the_end(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        stream.write("x")
        reading = consumer.attach("s")
        assert reading.read(PATIENCE_S) is not None
        again = consumer.attach("s", reading.position)
        assert reading.position == f"{reading.incarnation}-0"
        stream.close("length")
        assert list(again) == []
        assert (again.end_reason, again.position) == ("length", reading.position)
        late = consumer.attach("s", reading.position)
        assert list(late) == []
        assert late.end_reason == "length"


def refusal(consumer: Consumer, name: str, after: str | None, wait: float = 3600) -> str:
    """The code, which must come at once: `wait` is for streams that have not opened."""
    with pytest.raises(AttachError) as caught:
        consumer.attach(name, after, wait=wait).read(PATIENCE_S)
    return caught.value.code


def write(producer: Producer, name: str, *parts: str) -> Stream:
    stream = producer.open(name)
    for part in parts:
        stream.write(part)
    return stream


def test_what_is_not_the_stream_that_was_read_is_lost_and_what_ended_long_ago_is_gone(start: Start) -> None:
    daemon = start("--spool-bytes", "4M", "--keep", KEEP)
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        first = write(producer, "s", "a", "b")
        reading = consumer.attach("s")
        assert [reading.read(PATIENCE_S).seq for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        position, incarnation = str(reading.position), reading.incarnation
        assert incarnation is not None
        other = incarnation ^ 1
        assert refusal(consumer, "s", f"{other}-0") == "lost"
        assert refusal(consumer, "s", f"{incarnation}-2") == "lost"  # it has no such token yet
        assert refusal(consumer, "s", f"{incarnation}-{2**63 - 1}") == "lost"
        assert refusal(consumer, "never", position) == "lost"
        first.close()
        assert list(reading) == []
        daemon.await_total("streams_gone", 1)
        assert refusal(consumer, "s", position) == "gone"
        assert refusal(consumer, "s", None) == "gone"
        again = write(producer, "s", "c")  # the name is free again
        until(lambda: daemon.streams()["s"]["state"] == "live", "the second of this name")
        assert refusal(consumer, "s", position) == "lost"
        reading = consumer.attach("s")
        assert reading.read(PATIENCE_S).data == b"c"  # type: ignore[union-attr]
        assert reading.incarnation != incarnation
        again.close()


def test_a_stream_that_has_not_opened_is_waited_for_no_longer_than_told(daemon: Daemon) -> None:
    with Consumer(daemon.runtime_dir) as consumer, Producer("p", daemon.runtime_dir) as producer:
        begun = time.monotonic()
        assert refusal(consumer, "never", None, wait=0) == "unknown"
        assert refusal(consumer, "never", None, wait=0.2) == "unknown"
        assert time.monotonic() - begun >= 0.2
        early = consumer.attach("s", wait=PATIENCE_S)
        write(producer, "s", "x").close()
        assert [token.text for token in early] == ["x"]


def test_tokens_that_were_evicted_meanwhile_are_one_gap(start: Start, history: History) -> None:
    daemon = start("--spool-bytes", "4M", "--stream-bytes", "16k")
    parts = [b"%03d" % number * 300 for number in range(100)]
    history.put("s", *parts)
    history.end("s", "stop")
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        stream.write(parts[0])
        reading = consumer.attach("s")
        assert reading.read(PATIENCE_S) is not None
        position = reading.position
        reading.close()
        for part in parts[1:]:
            stream.write(part, block=PATIENCE_S)
        stream.close(block=PATIENCE_S)
        for client in range(2):  # and no loop: the second has the same
            got = history.reading("s", f"client {client}", 0).follow(consumer.attach("s", position))
            assert [gap.reason for gap in got.gaps()] == ["evicted"]
    history.check(gaps=True)


@pytest.mark.parametrize(
    "position",
    ["", "7", "7-", "-1", "7--1", "x-1", "7-1-1", "9" * 11 + "-1", f"{2**32}-1", f"1-{2**63}", b"7-1", 7, (7, 1)],
)
def test_what_is_no_position_is_said_at_once_and_clearly(daemon: Daemon, position: str) -> None:
    async def main() -> None:
        async with AsyncConsumer(daemon.runtime_dir) as consumer:
            consumer.attach("s", position)

    with Consumer(daemon.runtime_dir) as consumer, pytest.raises(ClawdError, match="is not a position"):
        consumer.attach("s", position)
    with pytest.raises(ClawdError, match="is not a position"):
        asyncio.run(main())
