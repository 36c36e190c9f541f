# SPDX-License-Identifier: Apache-2.0
"""What a client says on both sockets, and what it makes of what it hears there."""

from __future__ import annotations

import pytest

import wire
from clawd import protocol
from clawd.consumer import Consumer
from clawd.core import lib
from clawd.errors import AttachError, ControlError, ProtocolError, ReadTimeout
from fake_relay import PATIENCE_S, FakeRelay, until
from wire import token

Attach, Cancel, Detach = protocol.Attach, protocol.Cancel, protocol.Detach


def test_attach_says_what_was_asked(relay, consumer):
    consumer.attach("s", "9-41", wait=1.5, credit=5000)
    attach = relay.expect(Attach)
    assert (attach.stream, attach.after, attach.incarnation) == ("s", 41, 9)
    assert (attach.credit, attach.cancel, attach.session) == (5000, False, "session-1")
    assert 1000 < attach.wait_ms <= 1500
    assert (attach.on_gone, attach.grace_ms) == ("keep", 30_000)


def test_what_is_to_become_of_an_unread_stream_is_said_again_after_a_reconnect(relay, consumer):
    consumer.attach("s", on_gone="cancel", grace=1.5)
    first = relay.expect(Attach)
    relay.drop_relay()
    again = relay.expect(Attach)
    assert [(said.on_gone, said.grace_ms) for said in (first, again)] == [("cancel", 1500)] * 2


@pytest.mark.parametrize("order", ["connected first", "welcome first"])
def test_attach_waits_for_both_the_session_and_the_connection(tmp_path, order):
    with FakeRelay(tmp_path) as relay:
        relay.greet = relay.answer_probes = False
        with Consumer(tmp_path) as consumer:
            consumer.attach("s")
            relay.expect(protocol.Hello)
            relay.expect(str, lambda seen: seen == "probe")
            steps = [lambda: relay.say_connected(1), relay.welcome]
            if order == "welcome first":
                steps.reverse()
            steps[0]()
            relay.send(protocol.Pong())
            assert not [message for message in relay.seen() if isinstance(message, Attach)]
            steps[1]()
            assert relay.expect(Attach).session == "session-1"


def test_a_cut_connection_goes_on_after_the_last_token_and_doubles_nothing(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    relay.tell(at, 0, wire.opened(), *(token(b"%d," % seq) for seq in range(5)))
    assert [reading.read(PATIENCE_S).seq for _ in range(3)] == [0, 1, 2]
    relay.drop_relay()
    again = relay.expect(Attach)
    assert (again.id, again.after, again.incarnation, again.session) == (at, 4, 7, "session-1")
    assert relay.connection == 2
    relay.tell(at, 3, token(b"3,"), token(b"4,"), token(b"5,"))  # more than was asked for
    relay.tell(at, 6, token(b"6,"), connection=1)  # of the old connection, and the next one
    relay.tell(at, 5, token(b"5,"), token(b"6,"), token(b"7,"), wire.closed("stop"))
    assert [(part.seq, part.data) for part in reading] == [(seq, b"%d," % seq) for seq in range(3, 8)]
    assert reading.end_reason == "stop"


def test_a_reading_that_has_seen_only_its_open_asks_for_the_same_incarnation_from_the_start(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    relay.tell(at, 0, wire.opened())
    until(lambda: reading.incarnation == 7)
    relay.drop_relay()
    again = relay.expect(Attach)
    assert (again.after, again.incarnation) == (-1, 7)


def test_a_reading_that_has_ended_is_not_attached_again(relay, consumer):
    done, live = consumer.attach("done"), consumer.attach("live")
    at = {relay.expect(Attach).stream: number for number in (1, 2)}
    relay.tell(at["done"], 0, token(b"x"), wire.closed("stop"))
    assert [part.data for part in done] == [b"x"]
    relay.drop_relay()
    assert relay.expect(Attach).stream == "live"
    relay.tell(at["live"], 0, wire.closed("stop"))
    assert list(live) == []
    assert not [message for message in relay.seen() if isinstance(message, Attach)]


def test_acks_count_every_charged_byte_of_the_connection_and_only_grow(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    charged = 0
    for seq in range(60):
        charged += relay.tell(at, seq, token(bytes(2000))) + lib.CLAW_FRAME_CHARGE
        assert reading.read(PATIENCE_S).seq == seq
    until(lambda: relay.acked.get(1, [0])[-1] > charged - lib.CLAW_WINDOW // 4)
    assert relay.acked[1] == sorted(relay.acked[1])
    assert relay.acked[1][-1] <= charged
    relay.drop_relay()
    relay.expect(Attach)
    relay.tell(at, 60, token(bytes(1000)), connection=1)  # late: read, but not of this connection
    for seq in range(61, 70):
        size = relay.tell(at, seq, token(bytes(3000)))
        assert reading.read(PATIENCE_S).seq == seq - 1
    until(lambda: 2 in relay.acked)
    assert all(acked % (size + lib.CLAW_FRAME_CHARGE) == 0 for acked in relay.acked[2])
    assert max(relay.acked[2]) <= 9 * (size + lib.CLAW_FRAME_CHARGE)


def test_credit_follows_what_the_application_reads_and_stops_with_it(relay, consumer):
    reading = consumer.attach("s", credit=4000)
    at = relay.expect(Attach).id
    cost = len(token(b"x").pack())
    for seq in range(0, 120, 10):
        relay.tell(at, seq, *[token(b"x")] * 10)
    other = consumer.attach("other")  # a round trip: all the frames before were received
    relay.tell(relay.expect(Attach).id, 0, wire.closed("stop"))
    assert list(other) == []
    assert at not in relay.credits
    for _ in range(100):
        reading.read(PATIENCE_S)
    relay.expect(wire.Flow, lambda flow: flow.credits.get(at, 0) >= 4000 + 60 * cost)
    assert relay.credits[at] == sorted(relay.credits[at])
    assert relay.credits[at][-1] <= 4000 + 100 * cost


def test_credit_restarts_with_an_attach_and_takes_off_what_is_unread(relay, consumer):
    reading = consumer.attach("s", credit=4000)
    at = relay.expect(Attach).id
    cost = len(token(b"x").pack())
    relay.tell(at, 0, *[token(b"x")] * 50)
    relay.tell(at, 50, *[token(b"x")] * 50)
    until(lambda: len(reading._inbox.pending) == 2)
    relay.drop_relay()
    assert relay.expect(Attach).credit == 4000 - 100 * cost
    relay.tell(at, 100, token(b"x"))
    for _ in range(101):
        reading.read(PATIENCE_S)
    with pytest.raises(ReadTimeout):
        reading.read(0)
    # the last page is paid for too: the whole credit is there again, relative to the new attach
    relay.expect(wire.Flow, lambda flow: flow.credits.get(at) == 4000 - 100 * cost + 100 * cost)


@pytest.mark.parametrize("code", ["unknown", "gone", "lost", "limit", "denied", "bad_request"])
def test_a_refused_attach_raises_with_its_code_after_what_had_come(relay, consumer, code):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    relay.tell(at, 0, token(b"x"))
    relay.send(protocol.Failure(id=at, code=code, text="because"))
    assert reading.read(PATIENCE_S).data == b"x"
    for _ in range(2):
        with pytest.raises(AttachError, match="because") as caught:
            next(reading)
        assert caught.value.code == code
    assert consumer.attach("another") is not None


def test_cancel_is_said_once_and_again_after_a_reconnect_until_the_end_comes(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    reading.cancel()
    reading.cancel()
    assert relay.expect(Cancel).id == at
    relay.drop_relay()
    again = relay.expect(Attach)
    assert again.cancel
    relay.tell(at, 0, wire.opened(), wire.closed("cancelled"))
    assert list(reading) == []
    assert reading.end_reason == "cancelled"
    reading.cancel()
    assert not [message for message in relay.seen() if isinstance(message, Cancel)]


def test_cancel_before_the_connection_travels_with_the_attach(tmp_path):
    with FakeRelay(tmp_path) as relay:
        relay.answer_probes = False
        with Consumer(tmp_path) as consumer:
            consumer.attach("s").cancel()
            relay.expect(str, lambda seen: seen == "probe")
            relay.say_connected(1)
            assert relay.expect(Attach).cancel


def test_a_restarted_daemon_gets_a_new_hello_and_the_old_readings(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    relay.tell(at, 0, token(b"a"), token(b"b"))
    assert reading.read(PATIENCE_S).data == b"a"
    relay.stop()
    late = consumer.attach("late")  # while nobody is there
    with pytest.raises(ReadTimeout):
        late.read(0.05)
    relay.start()
    relay.expect(protocol.Hello)
    first = {attach.stream: attach for attach in (relay.expect(Attach), relay.expect(Attach))}
    while relay.attached[at].session != "session-2" or relay.attached[late._inbox.id].session != "session-2":
        relay.expect(Attach)
    assert first["s"].after == 1
    relay.tell(at, 2, token(b"c"), wire.closed("stop"))
    assert [part.data for part in reading] == [b"b", b"c"]


def test_a_lost_control_connection_alone_is_made_again_and_readings_get_the_new_session(relay, consumer):
    reading = consumer.attach("s")
    at = relay.expect(Attach).id
    relay.tell(at, 0, token(b"a"))
    assert reading.read(PATIENCE_S).data == b"a"
    relay.drop_control()
    assert relay.expect(Attach).session == "session-2"
    assert relay.connection == 1


def test_a_session_that_clawd_does_not_know_is_made_again_and_the_reading_goes_on(relay, consumer):
    reading = consumer.attach("s")
    first = relay.expect(protocol.Attach)
    relay.send(protocol.Failure(code="session", text="not known", id=first.id))
    again = relay.expect(protocol.Attach, lambda attach: attach.session != first.session)
    relay.tell(again.id, 0, wire.opened(), wire.token(b"x"))
    assert reading.read(PATIENCE_S).text == "x"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (protocol.Failure(code="denied", text="not your clawd"), "not your clawd"),
        (protocol.Welcome(version=99, session="s", instance="i"), "version 99"),
        (protocol.Pong(), "nonsense"),
    ],
)
def test_a_refused_hello_fails_every_reading_and_later_attaches(tmp_path, answer, says):
    with FakeRelay(tmp_path) as relay:
        relay.greet = False
        with Consumer(tmp_path) as consumer:
            reading = consumer.attach("s")
            relay.expect(protocol.Hello)
            relay._do(lambda: relay._controls[-1].send(protocol.encode(answer)))
            with pytest.raises(ControlError, match=says):
                reading.read(PATIENCE_S)
            with pytest.raises(ControlError, match=says):
                consumer.attach("another")


def test_a_daemon_that_is_stopping_is_asked_again(tmp_path):
    with FakeRelay(tmp_path) as relay:
        relay.greet = False
        with Consumer(tmp_path) as consumer:
            consumer.attach("s")
            relay.expect(protocol.Hello)
            failure = protocol.Failure(code="stopping", text="")
            relay._do(lambda: relay._controls[-1].send(protocol.encode(failure)))
            relay.greet = True
            relay.expect(protocol.Hello)
            assert relay.expect(Attach).session == "session-1"


@pytest.mark.parametrize(
    "nonsense",
    [b"\xda", b"\xda\x01" + bytes(40), b"\xff", b"{", b'{"op":"attach"}', wire.frame(1, [])[:-1]],
)
def test_a_message_that_cannot_be_right_fails_the_readings_and_not_the_process(relay, consumer, nonsense):
    reading = consumer.attach("s")
    relay.expect(Attach)
    relay.send(nonsense)
    with pytest.raises(ProtocolError):
        reading.read(PATIENCE_S)
    again = consumer.attach("s")
    relay.tell(relay.expect(Attach).id, 0, wire.closed("stop"))
    assert list(again) == []


def test_a_hole_in_the_sequence_fails_that_reading_only_and_detaches_it(relay, consumer):
    bad, good = consumer.attach("bad"), consumer.attach("good")
    at = {attach.stream: attach.id for attach in (relay.expect(Attach), relay.expect(Attach))}
    segments = [
        wire.Segment(at["bad"], 7, 1, (token(b"x"),)),
        wire.Segment(at["good"], 8, 0, (token(b"y"), wire.closed("stop"))),
        wire.Segment(999, 8, 0, (token(b"nobody's"),)),
    ]
    relay.send(b"")
    relay.send(wire.frame(1, segments))
    with pytest.raises(ProtocolError, match="token 1 came where 0 was due"):
        bad.read(PATIENCE_S)
    assert [part.data for part in good] == [b"y"]
    assert relay.expect(Detach).id == at["bad"]


def test_an_unread_record_keeps_only_its_own_bytes_alive(relay, consumer):
    slow, busy = consumer.attach("slow"), consumer.attach("busy")
    at = {attach.stream: attach.id for attach in (relay.expect(Attach), relay.expect(Attach))}
    records = (token(bytes(3000)), token(bytes(3000)))
    segments = [wire.Segment(at["busy"], 7, 0, records), wire.Segment(at["slow"], 7, 0, (token(b"x"),))]
    relay.send(wire.frame(1, segments))
    until(lambda: slow._inbox.pending)
    assert len(slow._inbox.pending[0][0]) == len(token(b"x").pack())
    assert slow.read(0).data == b"x"
    assert busy.read_batch(0).data == bytes(6000)


def test_a_reading_that_never_reached_clawd_gives_up_after_its_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("clawd.link._ANSWER_S", 0.05)
    with FakeRelay(tmp_path) as relay:
        relay.answer_probes = False
        with Consumer(tmp_path) as consumer:
            waiting = consumer.attach("s", wait=PATIENCE_S)
            given_up = consumer.attach("t", wait=0.05)
            with pytest.raises(ControlError, match="no answer from clawd"):
                given_up.read(PATIENCE_S)
            with pytest.raises(ReadTimeout):
                waiting.read(0)
