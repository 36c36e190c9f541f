# SPDX-License-Identifier: Apache-2.0
"""The synchronous client as an application uses it, against a relay that does what each test says."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import wire
from clawd import protocol
from clawd.consumer import Consumer, Gap
from clawd.errors import ClawdError, ControlError, ReadingClosed, ReadTimeout
from fake_relay import PATIENCE_S, until
from wire import token

Attach, Detach = protocol.Attach, protocol.Detach


def test_a_stream_cut_inside_characters_is_read_as_it_was_written(relay, consumer):
    text = "naïve 一二三 🙂 end"
    pieces = [bytes([byte]) for byte in text.encode()]
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    relay.tell(at, 0, wire.opened(b'{"model":"m"}'))
    for seq, piece in enumerate(pieces):
        relay.tell(at, seq, token(piece, written_ns=seq))
    relay.tell(at, len(pieces), wire.closed("stop"))
    tokens = list(reading)
    assert [part.data for part in tokens] == pieces
    assert "".join(part.text for part in tokens) == text
    assert [part.written_ns for part in tokens] == list(range(len(pieces)))
    assert not any("\ufffd" in part.text for part in tokens)
    assert reading.end_reason == "stop"
    assert reading.meta == {"model": "m"}
    assert reading.incarnation == 7
    assert reading.position == f"7-{len(pieces) - 1}"
    assert reading.gaps == []
    assert reading.read() is None


@pytest.mark.parametrize(
    ("stream", "more"),
    [("", {}), ("x" * 256, {}), ("\ud800", {}), ("s", {"credit": 0}), ("s", {"credit": 1 << 31}), ("s", {"wait": 1e9}),
     ("s", {"wait": float("nan")}), ("s", {"on_gone": "drop"}), ("s", {"grace": -1.0}), ("s", {"grace": 1e9}),
     ("s", {"after": "nonsense"}), ("s", {"after": "99999999999-1"})],
)  # fmt: skip
def test_an_attach_that_cannot_be_right_raises_at_once(consumer, stream, more):
    with pytest.raises(ClawdError):
        consumer.attach(stream, more.pop("after", None), **more)


def test_gaps_are_listed_and_reading_goes_on(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    relay.tell(at, 0, token(b"a"), wire.gap(4, "evicted"), token(b"b"))
    relay.tell(at, 6, wire.gap(2, "ring_full"), wire.closed("error:engine"))
    assert [part.seq for part in reading] == [0, 5]
    assert reading.gaps == [Gap(1, 4, "evicted"), Gap(6, 7, "ring_full")]
    assert reading.end_reason == "error:engine"


def test_closing_a_reading_detaches_it_and_late_frames_are_acked_but_not_kept(relay, consumer):
    with consumer.attach("s") as reading:
        at = relay.expect(Attach).id
    assert relay.expect(Detach).id == at
    reading.close()
    with pytest.raises(ReadingClosed):
        reading.read()
    for seq in range(8):
        relay.tell(at, seq, token(bytes(3500)))
    until(lambda: relay.acked.get(1))
    assert not reading._inbox.pending


def test_no_daemon_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ControlError, match="is it running there"):
        Consumer(tmp_path)
    monkeypatch.setenv("CLAWD_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(ControlError, match="elsewhere"):
        Consumer()


def test_a_read_that_times_out_loses_nothing(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        reading.read(0.05)
    with pytest.raises(ReadTimeout):
        reading.read_batch(timeout=0.05)
    assert 0.1 <= time.monotonic() - before < PATIENCE_S
    relay.tell(at, 0, token(b"x"), wire.closed("stop"))
    assert reading.read(PATIENCE_S).data == b"x"
    assert reading.read(0) is None


def test_batches_join_what_is_there_and_mix_with_single_reads(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    for seq in range(0, 40, 10):
        relay.tell(at, seq, *(token(b"%02d" % (seq + i), written_ns=seq + i) for i in range(10)))
    relay.tell(at, 40, wire.closed("stop"))
    until(lambda: reading._inbox.done)
    assert [reading.read().data for _ in range(3)] == [b"00", b"01", b"02"]
    batch = reading.read_batch()
    assert batch.data == b"".join(b"%02d" % seq for seq in range(3, 40))
    assert (batch.first_seq, batch.last_seq, batch.count) == (3, 39, 37)
    assert list(batch.written_ns) == list(range(3, 40))
    assert [part.data for part in batch.tokens()] == [b"%02d" % seq for seq in range(3, 40)]
    assert reading.position == "7-39"
    assert reading.read_batch() is None
    assert reading.end_reason == "stop"


def test_many_readings_in_several_threads_each_get_their_own(relay, consumer):
    readings = [consumer.attach(f"s{number}") for number in range(8)]
    at = {attach.stream: attach.id for attach in (relay.expect(Attach) for _ in readings)}

    def read(reading):
        return reading.stream, b"".join(part.data for part in reading)

    with ThreadPoolExecutor(len(readings)) as pool:
        results = [pool.submit(read, reading) for reading in readings]
        for seq in range(100):
            segments = [wire.Segment(number, number, seq, (token(b"%s:%d " % (stream.encode(), seq)),))
                        for stream, number in at.items()]  # fmt: skip
            relay.send(wire.frame(1, segments))
        for number in at.values():
            relay.tell(number, 100, wire.closed("stop"), incarnation=number)
        for result in results:
            stream, got = result.result(PATIENCE_S)
            assert got == b"".join(b"%s:%d " % (stream.encode(), seq) for seq in range(100))


def test_a_waiting_thread_takes_over_when_the_one_that_watched_the_sockets_leaves(relay, consumer):
    first, second = consumer.attach("first"), consumer.attach("second")
    at = {attach.stream: attach.id for attach in (relay.expect(Attach), relay.expect(Attach))}
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.read, PATIENCE_S)
        until(lambda: consumer._leader is first._inbox)
        two = pool.submit(second.read, PATIENCE_S)
        until(lambda: second._inbox in consumer._followers)
        relay.tell(at["first"], 0, token(b"1"))
        assert one.result(PATIENCE_S).data == b"1"
        until(lambda: consumer._leader is second._inbox)
        relay.tell(at["second"], 0, token(b"2"))
        assert two.result(PATIENCE_S).data == b"2"


def test_a_follower_is_woken_by_the_leader_and_times_out_by_itself(relay, consumer):
    first, second, third = (consumer.attach(name) for name in ("first", "second", "third"))
    at = {attach.stream: attach.id for attach in (relay.expect(Attach) for _ in range(3))}
    with ThreadPoolExecutor(3) as pool:
        one = pool.submit(first.read, PATIENCE_S)
        until(lambda: consumer._leader is first._inbox)
        two = pool.submit(second.read, PATIENCE_S)
        three = pool.submit(third.read, 0.05)
        with pytest.raises(ReadTimeout):
            three.result(PATIENCE_S)
        relay.tell(at["second"], 0, token(b"2"))
        assert two.result(PATIENCE_S).data == b"2"
        assert not one.done()
        relay.tell(at["first"], 0, token(b"1"))
        assert one.result(PATIENCE_S).data == b"1"


def test_the_keeper_receives_acks_and_reconnects_while_the_application_does_not_read(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    for seq in range(6):
        relay.tell(at, seq, token(bytes(3500)))
    until(lambda: relay.acked.get(1) and len(reading._inbox.pending) == 6)
    relay.drop_relay()
    assert relay.expect(Attach).after == 5
    relay.stop()
    relay.start()
    relay.expect(Attach, lambda attach: attach.session == "session-2")


def test_the_keeper_sleeps_while_nothing_happens(relay, consumer):
    consumer.attach("s")
    relay.expect(Attach)
    until(lambda: consumer._leader is not None)
    pumps = 0
    pump = consumer._link.pump

    def counted(**how):
        nonlocal pumps
        pumps += 1
        return pump(**how)

    consumer._link.pump = counted
    threading.Event().wait(0.5)
    assert pumps <= 2


@pytest.mark.parametrize("waiting", ["leader", "follower"])
def test_closing_the_consumer_ends_iteration_in_other_threads_with_a_clear_error(relay, waiting):
    consumer = Consumer(relay.directory)
    first, second = consumer.attach("first"), consumer.attach("second")
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(list, first)]
        until(lambda: consumer._leader is first._inbox)
        if waiting == "follower":
            results.append(pool.submit(list, second))
            until(lambda: second._inbox in consumer._followers)
        consumer.close()
        for result in results:
            with pytest.raises(ReadingClosed, match="consumer is closed"):
                result.result(PATIENCE_S)
    consumer.close()
    assert not consumer._keeper.is_alive()
    with pytest.raises(ReadingClosed):
        consumer.attach("s")
    relay.expect(str, lambda seen: seen == "control closed")


def test_closing_a_reading_wakes_the_thread_that_reads_it(relay, consumer):
    reading = consumer.attach("s")
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(reading.read, PATIENCE_S)
        until(lambda: consumer._leader is reading._inbox)
        reading.close()
        with pytest.raises(ReadingClosed, match='reading of "s" is closed'):
            result.result(PATIENCE_S)


def test_closed_consumers_leave_no_descriptor_and_no_thread(relay):
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with Consumer(relay.directory) as consumer:
        consumer.attach("s")
    before = held()
    for _ in range(5):
        with Consumer(relay.directory) as consumer, pytest.raises(ReadTimeout):
            consumer.attach("s").read(0.01)
        relay.expect(str, lambda seen: seen == "control closed")
    until(lambda: held() <= before)


def test_a_forked_child_gets_an_error_and_does_not_hide_the_parents_end(relay):
    consumer = Consumer(relay.directory)
    reading = consumer.attach("s")
    relay.expect(Attach)
    child_may_end, parent_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        failed = 0
        for call in (lambda: consumer.attach("t"), lambda: reading.read(0), reading.cancel):
            try:
                call()
            except ReadingClosed as error:
                failed += "after fork" in str(error)
        consumer.close()
        os.close(parent_end)
        os.read(child_may_end, 1)
        os._exit(0 if failed == 3 else 1)
    consumer.close()
    relay.expect(str, lambda seen: seen == "control closed")
    os.close(parent_end)
    os.close(child_may_end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_reader_that_waits_uses_no_processor_time(relay, consumer):
    reading = consumer.attach("s")
    relay.expect(Attach)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ReadTimeout):
        reading.read(0.6)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


def test_without_pyzmq_the_error_says_what_to_install():
    code = """
import sys
sys.modules["zmq"] = None
from clawd.errors import ClawdError
try:
    import clawd.consumer
except ClawdError as error:
    assert "pip install 'clawd[consumer]'" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
