# SPDX-License-Identifier: Apache-2.0
"""Tokens, batches, text and position, from segments put into an inbox by hand."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wire
from clawd.core import ffi, lib
from clawd.errors import ClawdError
from clawd.inbox import Inbox
from clawd.reading import BaseReading, Gap, parse_position

EXAMPLES = int(os.environ.get("CLAWD_TEST_EXAMPLES", "200"))
ALL = "一二、three🙂 é" * 3


class Owner:
    def __init__(self) -> None:
        self.grants: list[int] = []

    def _ended(self, inbox: Inbox) -> None:
        pass

    def _grant(self, inbox: Inbox) -> None:
        self.grants.append(inbox.new_limit())


def put(inbox: Inbox, first_seq: int, *records: wire.Record, incarnation: int = 7, current: bool = True) -> str | None:
    data = wire.frame(1, [wire.Segment(1, incarnation, first_seq, records)])
    part = ffi.new("struct claw_part *")
    assert lib.claw_frame_split(data, len(data), part, 1, ffi.new("uint32_t *")) == 1
    page = (data[part.offset : part.offset + part.len], part.first_seq, part.tokens, part.flags)
    return inbox.accept(page, incarnation, part.end_seq, current)


def begin(after: tuple[int, int] | None = None, credit: int = 1 << 20) -> tuple[BaseReading, Inbox]:
    inbox = Inbox("s", after, credit, 0.0)
    inbox.begin()
    return BaseReading(Owner(), inbox), inbox


def drain(reading: BaseReading, how) -> tuple[bytes, str, list[int]]:
    """All that is there, token by token or in batches as `how()` says; checks what each of them promises."""
    data, text, seqs = b"", "", []
    while True:
        if how():
            batch = reading._take_batch()
            if batch is None:
                return data, text, seqs
            tokens = list(batch.tokens())
            assert b"".join(token.data for token in tokens) == batch.data
            assert "".join(token.text for token in tokens) == batch.text
            if batch.count:
                assert [token.seq for token in tokens] == list(range(batch.first_seq, batch.last_seq + 1))
                assert [token.written_ns for token in tokens] == list(batch.written_ns)
        else:
            token = reading._take()
            if token is None:
                return data, text, seqs
            tokens = [token]
        for token in tokens:
            data += token.data
            text += token.text
            if token.count:  # else it is the rest of a text cut by the end
                seqs.append(token.seq)


def shown_by(position: str | None, pieces: list[bytes]) -> bytes:
    return b"" if position is None else b"".join(pieces[: parse_position(position)[1] + 1])


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(st.data())
def test_any_bytes_cut_anywhere_come_back_and_no_character_is_shown_in_halves(data):
    whole = data.draw(st.one_of(st.binary(max_size=60), st.text(max_size=30).map(str.encode), st.just(ALL.encode())))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    reading, inbox = begin()
    got, text, seqs = b"", "", []
    seq = 0
    while seq < len(pieces):
        count = data.draw(st.integers(1, 6))
        run = [wire.token(piece, written_ns=seq + i) for i, piece in enumerate(pieces[seq : seq + count])]
        assert put(inbox, seq, *run) is None
        seq += len(run)
        if data.draw(st.booleans()):
            more = drain(reading, lambda: data.draw(st.booleans()))
            got, text, seqs = got + more[0], text + more[1], seqs + more[2]
            shown = shown_by(reading.position, pieces)
            assert text.startswith(shown.decode(errors="replace"))
            assert whole.decode(errors="replace").startswith(text)
            if whole == ALL.encode():
                assert text.encode().startswith(shown)
    assert put(inbox, seq, wire.closed("stop")) is None
    more = drain(reading, lambda: data.draw(st.booleans()))
    assert got + more[0] == whole
    assert text + more[1] == whole.decode(errors="replace")
    assert seqs + more[2] == list(range(len(pieces)))
    assert reading.end_reason == "stop"
    assert reading.position == f"7-{len(pieces) - 1}"
    assert inbox.consumed == inbox.received


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(st.data())
def test_a_resume_at_the_position_shows_the_rest_of_the_text(data):
    whole = ALL.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=30)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    stop = data.draw(st.integers(0, len(pieces)))
    first, inbox = begin()
    if stop:
        put(inbox, 0, *(wire.token(piece) for piece in pieces[:stop]))
    text = drain(first, lambda: data.draw(st.booleans()))[1]
    after = None if first.position is None else parse_position(first.position)
    second, inbox = begin(after)
    assert second.position == first.position
    start = inbox.expected
    put(inbox, start, *(wire.token(piece) for piece in pieces[start:]), wire.closed("stop"))
    rest = drain(second, lambda: data.draw(st.booleans()))[1]
    # a token that shows one character and begins another comes again as a whole, never its second half alone
    assert shown_by(first.position, pieces).decode() + rest == ALL
    assert ALL.startswith(text)
    assert len(text) + len(rest) >= len(ALL)


@pytest.mark.parametrize("batches", [False, True])
def test_invalid_bytes_are_replaced_and_stall_nothing(batches):
    reading, inbox = begin()
    put(inbox, 0, wire.token(b"a\xff"), wire.token(b"\xe4\xbd"), wire.token(b"b"))
    assert drain(reading, lambda: batches)[1] == "a\ufffd\ufffdb"
    assert reading.position == "7-2"


@pytest.mark.parametrize("batches", [False, True])
def test_a_gap_is_told_and_a_character_it_cut_is_shown_as_replaced_with_the_next_token(batches):
    reading, inbox = begin()
    put(inbox, 0, wire.token(b"a"), wire.token(b"\xf0\x9f"), wire.gap(3, "evicted"), wire.token(b"b"), wire.gap(1, "x"))
    data, text, seqs = drain(reading, lambda: batches)
    assert (data, text, seqs) == (b"a\xf0\x9fb", "a\ufffdb", [0, 1, 5])
    assert reading.gaps == [Gap(2, 4, "evicted"), Gap(6, 6, "x")]
    put(inbox, 7, wire.closed("length"))
    assert drain(reading, lambda: batches) == (b"", "", [])
    assert reading.end_reason == "length"


def test_an_end_inside_a_character_is_shown_by_a_last_token_without_data():
    reading, inbox = begin()
    put(inbox, 0, wire.token(b"a"), wire.token(b"\xf0\x9f"), wire.closed("stop"))
    tokens = [reading._take() for _ in range(3)]
    assert [(token.seq, token.text, token.data, token.count) for token in tokens] == [
        (0, "a", b"a", 1),
        (1, "", b"\xf0\x9f", 1),
        (1, "\ufffd", b"", 0),
    ]
    assert reading._take() is None
    assert reading.position == "7-1"


def test_meta_is_parsed_and_bytes_that_are_no_json_are_given_as_they_are():
    for meta, expected in (
        (b'{"model":"m"}', {"model": "m"}),
        (b"", None),
        (b"\xff{", b"\xff{"),
        (b"[" * 3000, b"[" * 3000),
    ):
        reading, inbox = begin()
        put(inbox, 0, wire.opened(meta), wire.token(b"x"))
        drain(reading, lambda: True)
        assert reading.meta == expected


def test_what_comes_while_a_batch_is_taken_says_nothing_about_that_batch():
    reading, inbox = begin(credit=4)  # each page that is used up is told of
    pieces = [b"x\xf0", b"\x9f\x99", b"\x82b"]
    seqs = iter(range(1, 3))
    told = reading._owner._grant

    def grant(inbox: Inbox) -> None:
        told(inbox)
        for seq in seqs:
            put(inbox, seq, wire.token(pieces[seq]))
            return

    reading._owner._grant = grant
    put(inbox, 0, wire.token(pieces[0]))
    assert drain(reading, lambda: True) == (b"".join(pieces), "x🙂b", [0, 1, 2])
    assert reading.position == "7-2"


def test_what_comes_again_is_dropped_and_what_is_new_beside_it_is_kept():
    reading, inbox = begin()
    put(inbox, 0, wire.opened(b"1"), wire.token(b"a"), wire.token(b"b"))
    assert put(inbox, 0, wire.opened(b"1"), wire.token(b"a"), wire.token(b"b"), wire.token(b"c")) is None
    assert put(inbox, 1, wire.token(b"b")) is None
    assert put(inbox, 2, wire.token(b"c"), wire.gap(2), wire.token(b"f"), wire.closed("stop")) is None
    assert drain(reading, lambda: False) == (b"abcf", "abcf", [0, 1, 2, 5])
    assert inbox.done


def test_a_gap_that_overlaps_what_was_read_tells_the_missing_part_only():
    reading, inbox = begin()
    put(inbox, 0, wire.token(b"a"), wire.gap(2))
    assert put(inbox, 1, wire.gap(4), wire.token(b"z")) is None
    assert drain(reading, lambda: False) == (b"az", "az", [0, 5])
    assert reading.gaps == [Gap(1, 2, "evicted"), Gap(3, 4, "evicted")]


@pytest.mark.parametrize(
    ("why", "first_seq", "record", "incarnation"),
    [
        ("a hole", 3, wire.token(b"x"), 7),
        ("a gap after a hole", 3, wire.gap(2), 7),
        ("an end after a hole", 3, wire.closed("stop"), 7),
        ("an end before what came", 1, wire.closed("stop"), 7),
        ("another incarnation", 2, wire.token(b"x"), 8),
    ],
)
def test_what_cannot_be_right_is_refused(why, first_seq, record, incarnation):
    _, inbox = begin()
    put(inbox, 0, wire.token(b"a"), wire.token(b"b"))
    assert put(inbox, first_seq, record, incarnation=incarnation) is not None, why
    assert inbox.expected == 2
    assert len(inbox.pending) == 1


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(st.data())
def test_unread_bytes_never_exceed_the_credit_whatever_is_lost_or_sent_again(data):
    """A model of clawd that keeps to the credit, with reconnects at any time that lose a part of what is under way."""
    credit = data.draw(st.integers(1, 400))
    reading, inbox = begin(credit=credit)
    token, cost = wire.token(b"12345678"), 32
    limit, sent, next_seq, epoch = inbox.limit, 0, 0, 0
    under_way: list[tuple[int, int]] = []
    late = 0
    steps = st.sampled_from(["send", "send", "arrive", "arrive", "read", "read", "reconnect"])
    for step in data.draw(st.lists(steps, max_size=80)):
        if step == "send" and sent < limit:
            under_way.append((epoch, next_seq))
            sent += cost
            next_seq += 1
        elif step == "arrive" and under_way:
            of, seq = under_way.pop(0)
            before = inbox.expected
            assert put(inbox, seq, token, current=of == epoch) is None
            late += of != epoch and inbox.expected > before
            if inbox.owes_credit():
                reading._owner._grant(inbox)
        elif step == "read":
            reading._take()
            reading._turn_page()
        elif step == "reconnect":
            reading._owner.grants.clear()
            epoch += 1
            limit, sent, next_seq = inbox.begin(), 0, inbox.expected
            del under_way[data.draw(st.integers(0, len(under_way))) :]
        limit = max([limit, *reading._owner.grants])
        # a credit may be overdrawn by one token, each attach asks for one at least, what is under way comes on top
        assert inbox.received - inbox.consumed <= credit + (1 + epoch + late) * cost
    while under_way:  # all that was sent has come and is read: the whole credit is there again
        of, seq = under_way.pop(0)
        put(inbox, seq, token, current=of == epoch)
    drain(reading, lambda: False)
    assert inbox.offset + inbox.consumed - sent == credit


@pytest.mark.parametrize("position", ["", "7", "7-", "-1", "7--1", "7-1 ", "x-1", "\u0667-1", "7-1-1", "1" * 11 + "-1"])
def test_only_a_position_is_taken_for_one(position):
    with pytest.raises(ClawdError, match="is not a position"):
        parse_position(position)
