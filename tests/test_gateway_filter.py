# SPDX-License-Identifier: Apache-2.0
"""Stop phrases and redaction: the same however the text is cut; nothing is held back that cannot be part of a match."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawd.errors import ClawdError, ConfigError
from clawd.gateway.filter import HELD_MAX, REDACTED, Pipeline, Redaction, StopPhrases

pytestmark = pytest.mark.plain
PHRASES = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)
PATTERNS = st.lists(
    st.sampled_from([r"\d{3}", r"\d+", r"a+b", r"(?<!\d)12(?!\d)", r"\bab\b", r"a(.*b)?2", r"1.3", r"[ab]{2,4}"]),
    min_size=1, max_size=3, unique=True)  # fmt: skip


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[at:end] for at, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def stopped_at(text: str, phrases: list[str]) -> int:
    return min((at for at in (text.find(phrase) for phrase in phrases) if at >= 0), default=len(text))


@given(PHRASES, st.text("ab\nc", max_size=30), st.lists(st.integers(0, 100), max_size=8))
def test_a_stop_phrase_ends_the_text_however_it_is_cut(phrases: list[str], text: str, places: list[int]) -> None:
    stage = StopPhrases(phrases)
    shown = seen = ""
    for piece in cut(text, places):
        if stage.stopped:
            break
        shown += stage.feed(piece)
        seen += piece
        if not stage.stopped:  # what is held back is the longest end that may become a phrase, and not a character more
            held = next((seen[at:] for at in range(len(seen)) if any(p.startswith(seen[at:]) for p in phrases)), "")
            assert len(stage.held) <= max(map(len, phrases)) - 1 or stopped_at(stage.held, phrases) < len(stage.held)
            assert shown + stage.held == seen
            assert stopped_at(seen, phrases) < len(seen) or stage.held == held
    shown += stage.flush()
    end = stopped_at(text, phrases)
    assert shown == text[:end]
    assert stage.stopped == (end < len(text))


@given(PATTERNS, st.text("ab12 3x", max_size=40), st.lists(st.integers(0, 100), max_size=10))
def test_what_matches_is_redacted_however_it_is_cut(patterns: list[str], text: str, places: list[int]) -> None:
    stage = Redaction(patterns)
    shown = "".join(stage.feed(piece) for piece in cut(text, places)) + stage.flush()
    assert shown == re.sub("|".join(f"(?:{pattern})" for pattern in patterns), REDACTED, text)


def test_text_that_cannot_be_part_of_a_match_is_not_delayed() -> None:
    pipeline = Pipeline(["<|end|>", "\nUser:"], [r"\b\d{4}-\d{4}\b", r"[\w.]+@[\w.]+"])
    text = "No, not at all! (Really.) 你好, < this is no tag | it only looks like one >\nUse it.\n"
    shown, held, worst = "", 0, 0
    for at, char in enumerate(text):
        shown += pipeline.feed(char)
        held += len(shown) <= at
        worst = max(worst, at + 1 - len(shown))
    shown += pipeline.flush()
    assert shown == text
    # A word may always be the beginning of an address, so it waits for its end; nothing waits for longer
    assert worst <= len("Really.") + 1
    plain = Pipeline(["<|end|>", "\nUser:"], [r"\d{4}"])
    for char in "No match begins here, 你好!":
        assert plain.feed(char) == char
        assert not plain.held


def test_a_stage_costs_little() -> None:
    pipeline = Pipeline(["<|end|>", "\nUser:"], [r"\d{4}"])
    pieces = ["token ", "by ", "token, "] * 2000
    before = time.perf_counter()
    for piece in pieces:
        pipeline.feed(piece)
    each_us = (time.perf_counter() - before) * 1e6 / len(pieces)
    print(f"{each_us:.1f} us a token")
    assert each_us < 500  # 10 or so; here only that it does not grow with the text


def test_what_is_held_back_is_bounded() -> None:
    stage = Redaction([r"<.*>"])
    shown = "".join(stage.feed("<" + "x" * 100) for _ in range(100))
    assert len(stage.held) <= HELD_MAX
    assert shown.startswith("<xxx")


def test_a_pattern_that_never_ends_is_an_error_and_not_a_hang() -> None:
    stage = Redaction([r"(x|xx)+[yz]"])
    with pytest.raises(ClawdError, match="takes too long"):
        stage.feed("x" * 60)


@pytest.mark.parametrize(("pattern", "complaint"), [("(", "no pattern"), ("a*", "matches the empty text")])
def test_a_pattern_that_is_none_is_said(pattern: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Redaction([pattern])


def test_stop_comes_before_redaction_and_flushes_it() -> None:
    pipeline = Pipeline(["###"], [r"\d+"])
    assert pipeline.feed("call 12") == "call "
    assert pipeline.held
    assert pipeline.feed("34 #") == f"{REDACTED} "
    assert pipeline.feed("## never") == ""
    assert pipeline.stopped
    assert (pipeline.feed("more"), pipeline.flush()) == ("", "")
