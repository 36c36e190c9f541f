# SPDX-License-Identifier: Apache-2.0
"""How the client for asyncio ends, and where it must not be used, against a relay that does what each test says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import threading

import pytest

from clawd import protocol
from clawd.aconsumer import AsyncConsumer, AsyncReading
from clawd.errors import ClawdError, ControlError, ReadingClosed, ReadTimeout
from eventloop import attach, came, on_loop, until, waiting
from wire import token

Detach = protocol.Detach


@pytest.mark.parametrize("leave", ["close", "exception in the body"])
@on_loop
async def test_tasks_that_wait_when_the_consumer_closes_get_an_error(relay, leave):
    async def iterate(reading: AsyncReading) -> None:
        async for _ in reading:
            pass

    with contextlib.suppress(ZeroDivisionError):
        async with AsyncConsumer(relay.directory) as consumer:
            pairs = [await attach(relay, consumer, f"s{number}") for number in range(3)]
            tasks = [asyncio.create_task(iterate(reading)) for reading, _ in pairs]
            await waiting(consumer, *(reading for reading, _ in pairs))
            if leave == "close":
                await consumer.aclose()
            else:
                raise ZeroDivisionError
    for task in tasks:
        with pytest.raises(ReadingClosed, match="consumer is closed"):
            await task
    consumer.close()
    pairs[0][0].close()
    for call in (lambda: consumer.attach("t"), pairs[0][0].cancel):
        with pytest.raises(ReadingClosed, match="consumer is closed"):
            call()
    await came(relay, str, lambda seen: seen == "control closed")


@pytest.mark.parametrize("state", ["new", "used", "without its relay"])
@on_loop
async def test_nothing_of_a_closed_consumer_runs_later(relay, state):
    consumer = AsyncConsumer(relay.directory)
    if state != "new":
        reading, _ = await attach(relay, consumer)
        reading.cancel()
    if state == "without its relay":
        relay.stop()
        await until(lambda: consumer._timer_at is not None)
    consumer.close()
    await asyncio.sleep(0.05)  # in which a timer would go off; `on_loop` sees what it raises


@on_loop
async def test_closing_a_reading_detaches_it_and_wakes_the_task_that_reads_it(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer, "a")
        task = asyncio.create_task(reading.read())
        await waiting(consumer, reading)
        reading.close()
        with pytest.raises(ReadingClosed, match='reading of "a" is closed'):
            await task
        assert (await came(relay, Detach)).id == at
        for number, leave in enumerate([contextlib.aclosing, contextlib.nullcontext]):
            reading, at = await attach(relay, consumer, f"b{number}")
            async with leave(reading), reading:
                pass
            assert (await came(relay, Detach)).id == at


@on_loop
async def test_no_daemon_is_an_error_that_says_what_to_do(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ControlError, match="is it running there"):
        async with AsyncConsumer(tmp_path):
            pytest.fail("it must not come here")
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_loop_and_from_another_one_the_error_is_clear(relay):
    with pytest.raises(ClawdError, match="no event loop runs here"):
        AsyncConsumer(relay.directory)

    async def elsewhere(consumer: AsyncConsumer, reading: AsyncReading) -> None:
        for call in (reading.read, reading.read_batch, reading.__anext__):
            with pytest.raises(ClawdError, match="another event loop"):
                await call()
        for plain in (lambda: consumer.attach("t"), reading.cancel, reading.close, consumer.close):
            with pytest.raises(ClawdError, match="another event loop"):
                plain()

    @on_loop
    async def main() -> None:
        async with AsyncConsumer(relay.directory) as consumer:
            reading, at = await attach(relay, consumer)
            await asyncio.to_thread(lambda: asyncio.run(elsewhere(consumer, reading)))
            relay.tell(at, 0, token(b"x"), token(b"y"))
            await until(lambda: reading._inbox.pending)
            # also where it would not have to wait
            await asyncio.to_thread(lambda: asyncio.run(elsewhere(consumer, reading)))
            assert (await reading.read()).data == b"x"

    main()


@on_loop
async def test_a_forked_child_gets_an_error_and_does_not_hide_the_parents_end(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, at = await attach(relay, consumer)
        relay.tell(at, 0, token(b"x"))
        await until(lambda: reading._inbox.pending)
        child_may_end, parent_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            failed = 0
            try:
                for call in (lambda: consumer.attach("t"), lambda: reading.read().send(None), reading.cancel):
                    try:
                        call()
                    except ReadingClosed as error:
                        failed += "after fork" in str(error)
                reading.close()
                consumer.close()
                os.close(parent_end)
                os.read(child_may_end, 1)
            finally:
                os._exit(0 if failed == 3 else 1)
        assert (await reading.read()).data == b"x"
    relay.expect(str, lambda seen: seen == "control closed")
    os.close(parent_end)
    os.close(child_may_end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("close", ["by the body", "after the loop"])
def test_a_loop_may_end_while_tasks_read(relay, close):
    ends: list[str] = []
    left: list[AsyncConsumer] = []

    async def iterate(reading: AsyncReading) -> None:
        try:
            async for _ in reading:
                pass
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    @on_loop
    async def main() -> None:
        consumer = AsyncConsumer(relay.directory)
        pairs = [await attach(relay, consumer, f"s{number}") for number in range(3)]
        tasks = [asyncio.create_task(iterate(reading)) for reading, _ in pairs]
        await waiting(consumer, *(reading for reading, _ in pairs))
        left.extend([consumer, tasks])  # held, so that nothing but the loop's end ends them
        if close == "by the body":
            for task in tasks:
                task.cancel()
            consumer.close()

    main()
    assert ends == ["cancelled"] * 3
    left[0].close()
    relay.expect(str, lambda seen: seen == "control closed")


@on_loop
async def test_a_closed_consumer_leaves_no_descriptor_and_there_is_no_thread(relay):
    async def held() -> int:
        await came(relay, str, lambda seen: seen == "control closed")
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for number in range(6):
        threads = threading.active_count()
        async with AsyncConsumer(relay.directory) as consumer:
            assert threading.active_count() == threads
            await attach(relay, consumer, f"s{number}")
        counts.append(await held())
    # the process's other threads may hold one more for a moment; a leak would add one each time
    assert counts[-1] < counts[0] + 3, counts


@on_loop
async def test_a_task_that_waits_uses_no_processor_time(relay):
    async with AsyncConsumer(relay.directory) as consumer:
        reading, _ = await attach(relay, consumer)
        before = resource.getrusage(resource.RUSAGE_SELF)
        with pytest.raises(ReadTimeout):
            await reading.read(0.6)
        after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


def test_it_is_in_the_package_and_brings_no_zmq_asyncio():
    code = "import sys, clawd; clawd.AsyncConsumer; raise SystemExit('zmq.asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
