# SPDX-License-Identifier: Apache-2.0
"""The history checker finds what it is for, and says which stream, which token, what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clawd.consumer import Gap
from tests.history import End, Got, History, Put, Seen

pytestmark = pytest.mark.plain

TEXTS = [b"a0", b"a1", "é".encode()[:1], "é".encode()[1:], b"a4"]


def seen(seq: int, data: bytes, klass: int | None = None, count: int = 1) -> Seen:
    return Seen(seq, data, (0 if seq == 0 else 2) if klass is None else klass, count)


@pytest.fixture
def history() -> History:
    history = History()
    history.put("a", *TEXTS)
    history.end("a", "stop")
    history.put("b", b"b0", Put(b"b1", urgent=True), Put(b"b2", count=3))
    history.end("b", "length")
    for name, events in {
        "a": [seen(seq, data) for seq, data in enumerate(TEXTS)],
        "b": [seen(0, b"b0"), seen(1, b"b1", klass=0), seen(2, b"b2", count=3)],
    }.items():
        got = history.reading(name, "reader")
        got.events = [*events, End("stop" if name == "a" else "length")]
        got.text = [b"".join(event.data for event in events).decode()]
    return history


def swap(events: list, one: int, other: int) -> None:
    events[one], events[other] = events[other], events[one]


FAULTS: dict[str, tuple[Callable[[Got], object], str]] = {
    "lost": (lambda got: got.events.pop(1), "lost seq 1 to 1 without a gap"),
    "lost at the end": (lambda got: got.events.pop(4), "lost seq 4 to 4 before the end"),
    "doubled": (lambda got: got.events.insert(2, got.events[1]), "seq 1 came again or late, 2 was due"),
    "reordered": (lambda got: swap(got.events, 3, 4), "seq 3 came again or late, 5 was due"),
    "reordered under right numbers": (
        lambda got: got.events.__setitem__(1, seen(1, b"a4")),
        "seq 1 is b'a4' (seq 4 of this stream), not b'a1'",
    ),
    "torn": (lambda got: got.events.__setitem__(1, seen(1, b"a")), "seq 1 is b'a' (torn or changed), not b'a1'"),
    "of another stream": (lambda got: got.events.__setitem__(1, seen(1, b"b1")), "(seq 1 of 'b'), not b'a1'"),
    "of another class": (lambda got: got.events.__setitem__(1, seen(1, b"a1", klass=0)), "seq 1 has class 0, not 2"),
    "of another count": (lambda got: got.events.__setitem__(1, seen(1, b"a1", count=2)), "stands for 2 tokens, not 1"),
    "never written": (lambda got: got.events.insert(5, seen(5, b"a5")), "seq 5 was never written"),
    "with another end": (lambda got: got.events.__setitem__(5, End("length")), 'ended with "length", not "stop"'),
    "without an end": (lambda got: got.events.pop(), "has no end"),
    "going on after its end": (lambda got: got.events.append(End("stop")), "came after the end"),
    "with half a character shown": (lambda got: got.text.__setitem__(0, "a0a1\ufffda4"), "shows another text"),
    "with a gap": (lambda got: got.events.__setitem__(1, Gap(1, 1, "evicted")), "where nothing may be missing"),
}

GAPS: dict[str, tuple[list[Seen | Gap], str]] = {
    "over a delivered token": ([seen(0, b"a0"), seen(1, b"a1"), Gap(1, 4, "x")], "covers seq 1, which was delivered"),
    "told twice": ([seen(0, b"a0"), Gap(1, 4, "x"), Gap(1, 4, "x")], "covers seq 1, which was delivered or told"),
    "that starts late": ([seen(0, b"a0"), Gap(2, 4, "x")], "lost seq 1 to 1 before gap 2 to 4 (x)"),
    "past the last token": ([seen(0, b"a0"), Gap(1, 5, "x")], "covers what was never written"),
    "of less than nothing": ([seen(0, b"a0"), Gap(1, 0, "x")], "covers what was never written"),
    "with its tokens after all": ([seen(0, b"a0"), Gap(1, 4, "x"), seen(4, b"a4")], "seq 4 came again or late"),
}


def test_a_true_history_is_accepted(history: History) -> None:
    history.check()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_finds_a_stream(history: History, fault: str) -> None:
    damage, expected = FAULTS[fault]
    damage(history.readings[0])
    with pytest.raises(AssertionError) as caught:
        history.check()
    assert 'stream "a", reader: ' in str(caught.value)
    assert expected in str(caught.value)
    assert '"b", reader' not in str(caught.value)


@pytest.mark.parametrize("fault", GAPS)
def test_the_checker_finds_a_gap(history: History, fault: str) -> None:
    events, expected = GAPS[fault]
    history.readings[0].events = [*events, End("stop")]
    with pytest.raises(AssertionError) as caught:
        history.check(gaps=True)
    assert expected in str(caught.value)


def test_a_gap_that_tells_what_is_missing_is_accepted_where_gaps_may_be(history: History) -> None:
    history.readings[0].events[1:4] = [Gap(1, 2, "evicted"), Gap(3, 3, "evicted")]
    history.check(gaps=True)


def test_the_checker_knows_which_tokens_follow_a_sentence(history: History) -> None:
    texts = [b"Hi", b".", b" Next", b" word", b"!", b" Third"]
    history.put("c", *texts)
    history.end("c", "stop")
    got = history.reading("c")
    got.events = [*map(seen, range(6), texts, [0, 2, 1, 2, 2, 1]), End("stop")]
    got.text = [text.decode() for text in texts]
    history.check()
    got.events[2] = seen(2, texts[2], klass=2)
    with pytest.raises(AssertionError, match="seq 2 has class 2, not 1"):
        history.check()


def test_after_a_gap_a_class_may_be_that_of_a_text_that_starts_there(history: History) -> None:
    history.put("c", b"Hi", b".", b" Next", b" word.")
    history.end("c", "stop")
    got = history.reading("c")
    for klass in (1, 2):  # evicted after clawd saw it, or never seen by it
        got.events = [seen(0, b"Hi"), Gap(1, 1, "x"), seen(2, b" Next", klass), seen(3, b" word."), End("stop")]
        history.check(gaps=True)
    got.events[3] = seen(3, b" word.", klass=1)
    with pytest.raises(AssertionError, match="seq 3 has class 1, not 2"):
        history.check(gaps=True)


def test_a_reading_that_resumed_starts_after_its_position(history: History) -> None:
    got = history.readings[0]
    got.after, got.events, got.text = 2, got.events[3:], []
    history.check()
    got.after = 1
    with pytest.raises(AssertionError, match="lost seq 2 to 2"):
        history.check()


def test_a_cancelled_stream_may_lack_its_last_tokens_but_no_others(history: History) -> None:
    history.end("a", "cancelled", cut=True)
    events = history.readings[0].events
    events[3:] = [End("cancelled")]
    history.readings[0].text = ["a0a1\ufffd"]
    history.check()
    del events[1]
    with pytest.raises(AssertionError, match="lost seq 1 to 1"):
        history.check()


def test_a_stream_nobody_wrote_is_named(history: History) -> None:
    history.reading("c").events.append(seen(0, b"x"))
    with pytest.raises(AssertionError, match='stream "c", client: was read but never written'):
        history.check()
