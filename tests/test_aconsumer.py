# SPDX-License-Identifier: Apache-2.0
"""What a task reads through the client for asyncio, against a relay that does what each test says."""

from __future__ import annotations

import asyncio
import itertools

import pytest

import wire
from clawd import protocol
from clawd.aconsumer import _BURST, _RUN, AsyncConsumer
from clawd.errors import AttachError, ClawdError, ControlError, ReadTimeout
from eventloop import arrive, attach, came, on_loop, until, waiting
from fake_relay import PATIENCE_S
from wire import token

Attach, Cancel = protocol.Attach, protocol.Cancel


@on_loop
async def test_a_stream_is_read_as_it_was_written(relay):
    pieces = [bytes([byte]) for byte in "naïve 一二三 🙂".encode()]
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        relay.tell(at, 0, wire.opened(b'{"model":"m"}'))
        for seq, piece in enumerate(pieces):
            relay.tell(at, seq, token(piece))
        relay.tell(at, len(pieces), wire.closed("stop"))
        tokens = [part async for part in reading]
        assert [part.data for part in tokens] == pieces
        assert "".join(part.text for part in tokens) == "naïve 一二三 🙂"
        assert (reading.end_reason, reading.meta, reading.position) == ("stop", {"model": "m"}, f"7-{len(pieces) - 1}")
        assert (await reading.read(), await reading.read_batch()) == (None, None)
    relay.expect(str, lambda seen: seen == "control closed")


@on_loop
async def test_batches_join_what_is_there_and_mix_with_single_reads(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        for seq in range(0, 40, 10):
            relay.tell(at, seq, *(token(b"%02d" % (seq + i)) for i in range(10)))
        relay.tell(at, 40, wire.closed("stop"))
        await until(lambda: reading._inbox.done)
        assert [(await reading.read()).data, (await anext(reading)).data] == [b"00", b"01"]
        batch = await reading.read_batch()
        assert batch.data == b"".join(b"%02d" % seq for seq in range(2, 40))
        assert await reading.read_batch() is None
        assert reading.end_reason == "stop"


@on_loop
async def test_a_read_that_times_out_loses_nothing_and_leaves_no_timer(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        before = consumer._loop.time()
        with pytest.raises(ReadTimeout, match='nothing came from "s" in time'):
            await reading.read(0.05)
        with pytest.raises(TimeoutError):
            await reading.read_batch(timeout=0.05)
        assert 0.1 <= consumer._loop.time() - before < PATIENCE_S
        relay.tell(at, 0, token(b"x"))
        assert (await reading.read(PATIENCE_S)).data == b"x"
        with pytest.raises(ReadTimeout):
            await reading.read(0)
        relay.tell(at, 1, token(b"y"))
        arrive(consumer)
        assert (await reading.read(0)).data == b"y"
        assert not [
            handle for handle in consumer._loop._scheduled if "_wake" in repr(handle) and not handle.cancelled()
        ]


@on_loop
async def test_only_the_task_that_has_something_is_woken(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        pairs = [await attach(relay, consumer, f"s{number}") for number in range(20)]
        tasks = [asyncio.create_task(reading.read()) for reading, _ in pairs]
        await waiting(consumer, *(reading for reading, _ in pairs))
        before = dict(consumer._waiters)
        relay.tell(pairs[7][1], 0, token(b"x"))
        assert (await tasks[7]).data == b"x"
        before.pop(pairs[7][0]._inbox)
        assert consumer._waiters == before
        assert not any(waiter.done() for waiter in before.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert consumer._waiters == {}


@pytest.mark.parametrize("use", ["attach", "cancel", "close", "grant"])
@on_loop
async def test_what_arrives_just_before_the_socket_is_used_is_not_forgotten(relay, use):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        other, _ = await attach(relay, consumer, "other")
        task = asyncio.create_task(reading.read())
        await waiting(consumer, reading)
        if use == "grant":
            relay.tell(2, 0, token(bytes(3000)))
            other._inbox.quarter = 1
            await until(lambda: other._inbox.pending)
            assert await other.read()
        relay.tell(at, 0, token(b"x"))
        arrive(consumer)
        # the socket says this once: whoever uses it next takes the news from the descriptor
        {"attach": lambda: consumer.attach("more"), "cancel": other.cancel, "close": other.close,
         "grant": other._take}[use]()  # fmt: skip
        assert (await asyncio.wait_for(task, PATIENCE_S)).data == b"x"


@on_loop
async def test_a_busy_reading_leaves_the_loop_to_others(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        frames, each = 64, 100
        for number in range(frames):
            relay.tell(at, number * each, *(token(b"x") for _ in range(each)))
        relay.tell(at, frames * each, wire.closed("stop"))
        waits: list[int] = []

        async def tick() -> None:
            while True:
                waits.append(len(reading._inbox.pending))
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        await until(lambda: reading._inbox.done)
        assert max(later - sooner for sooner, later in itertools.pairwise(waits)) <= 2 * _BURST
        waits.clear()
        assert len([part async for part in reading]) == frames * each
        assert len(waits) >= frames * each // (_RUN + 1)
        ticker.cancel()


@pytest.mark.parametrize("how", ["read", "read_batch", "anext"])
@on_loop
async def test_a_task_cancelled_when_its_token_is_already_there_leaves_it_to_the_next_read(relay, how):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        read = reading.__anext__ if how == "anext" else getattr(reading, how)
        task = asyncio.ensure_future(read())
        await waiting(consumer, reading)
        relay.tell(at, 0, token(b"x"))
        while not reading._inbox.pending:  # what the loop would do, but it has no turn here
            consumer._turn(relay=True)
        assert consumer._waiters[reading._inbox].done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await read()).data == b"x"


@on_loop
async def test_tasks_cancelled_at_random_moments_lose_nothing(relay, dice):
    rounds = 300
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        got: list[bytes] = []

        async def iterate() -> None:
            async for part in reading:
                got.append(part.data)

        async def read() -> None:
            while (part := await reading.read(dice.choice([None, 0.0005, 1.0]))) is not None:
                got.append(part.data)

        async def read_batches() -> None:
            while (batch := await reading.read_batch()) is not None:
                got.extend(part.data for part in batch.tokens())

        async def read_within() -> None:
            while (part := await asyncio.wait_for(reading.read(), 0.0005)) is not None:
                got.append(part.data)

        async def read_until() -> None:
            async with asyncio.timeout(0.001):
                await iterate()

        count = cancelled = 0
        for _ in range(rounds):
            task = asyncio.create_task(dice.choice([iterate, read, read_batches, read_within, read_until])())
            for _ in range(dice.randrange(3)):
                some = dice.randrange(1, 4)
                relay.tell(at, count, *(token(b"%d" % number) for number in range(count, count + some)))
                count += some
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(dice.choice([0, 0, 0.0002, 0.001]))
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            except TimeoutError:
                pass
        relay.tell(at, count, wire.closed("stop"))
        await iterate()
        assert got == [b"%d" % number for number in range(count)]
        print(f"{cancelled} of {rounds} tasks cancelled, {count} tokens")
        assert cancelled > rounds // 4


@on_loop
async def test_two_tasks_on_one_reading_are_an_error_in_the_second_and_none_in_the_first(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        first = asyncio.create_task(reading.read())
        await waiting(consumer, reading)
        for call in (reading.read, reading.read_batch, reading.__anext__):
            with pytest.raises(ClawdError, match='another task is reading "s"'):
                await call()
        relay.tell(at, 0, token(b"x"), token(b"y"))
        while not reading._inbox.pending:
            consumer._turn(relay=True)
        with pytest.raises(ClawdError, match="another task"):  # also where it would not have to wait
            await anext(reading)
        assert (await first).data == b"x"
        assert (await reading.read()).data == b"y"


@on_loop
async def test_cancel_goes_to_clawd_and_a_refusal_comes_back(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        reading.cancel()
        assert (await came(relay, Cancel)).id == at
        relay.send(protocol.Failure("gone", "it was evicted", at))
        with pytest.raises(AttachError, match="it was evicted"):
            await reading.read()


@pytest.mark.parametrize("cut", ["relay", "control", "both, for a while"])
@on_loop
async def test_a_cut_connection_goes_on_after_the_last_token_and_doubles_nothing(relay, cut):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        relay.tell(at, 0, wire.opened(), *(token(b"%d," % seq) for seq in range(5)))
        assert [(await reading.read()).seq for _ in range(3)] == [0, 1, 2]
        rest = asyncio.create_task(reading.read_batch())
        assert (await rest).count == 2
        task = asyncio.create_task(reading.read(PATIENCE_S))
        await waiting(consumer, reading)
        if cut == "relay":
            relay.drop_relay()
        elif cut == "control":
            relay.drop_control()
        else:
            relay.stop()
            await until(lambda: consumer._timer_at is not None)
            relay.start()
        again = await came(relay, Attach)
        assert (again.id, again.after, again.incarnation) == (at, 4, 7)
        assert again.session == ("session-1" if cut == "relay" else "session-2")
        relay.tell(at, 3, token(b"3,"), token(b"4,"), token(b"5,"))  # more than was asked for
        relay.tell(at, 6, wire.closed("stop"))
        assert (await task).data == b"5,"
        assert await reading.read() is None
        assert consumer._timer_at is None


@on_loop
async def test_without_an_answer_the_reading_fails_at_its_time(relay, monkeypatch):
    monkeypatch.setattr("clawd.link._ANSWER_S", 0.05)
    async with AsyncConsumer(relay.directory) as consumer:
        await came(relay, protocol.Hello)
        relay.stop()
        await until(lambda: consumer._link._session.name is None)
        late, soon = consumer.attach("late", wait=PATIENCE_S), consumer.attach("soon", wait=0.05)
        with pytest.raises(ControlError, match="no answer"):
            await soon.read()
        relay.start()
        at = (await came(relay, Attach)).id
        relay.tell(at, 0, token(b"x"))
        assert (await late.read()).data == b"x"
