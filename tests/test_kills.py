# SPDX-License-Identifier: Apache-2.0
"""Producers, clawd and clients killed at random for a while; and that those who watch over it see what is wrong."""

from __future__ import annotations

import codecs
import os
import re
import subprocess
import sys

import pytest

from classes import CRITICAL, Classes
from counts import count_printed
from tests.history import Seen
from tests.kills_judge import Follow, Judge, Word
from tests.kills_text import length, puts
from tests.packages import ROOT

SECONDS = 5.0
"""The quick tests' part; scripts/test says how long."""
AT_LEAST = 0.7
"""Of the kills must have fallen when a committed token was unsent, or a published one uncommitted."""


def kill(seconds: float, seed: int) -> float:
    """Returns how many of the kills counted, of 1."""
    command = [sys.executable, ROOT / "tests" / "kills.py", "--seconds", str(seconds), "--seed", str(seed)]
    run = subprocess.run(command, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"(\d+) strikes, (\d+) effective", run.stdout, re.MULTILINE)
    assert found
    count_printed(run.stdout)
    return int(found[2]) / int(found[1])


@pytest.mark.timeout(240)
@pytest.mark.plain
def test_nothing_in_a_ring_is_lost_whoever_is_killed(seed: int) -> None:
    kill(SECONDS, seed)


@pytest.mark.slow
@pytest.mark.plain
@pytest.mark.timeout(1800)
def test_nothing_is_lost_for_a_long_time(seed: int) -> None:
    seconds = float(os.environ.get("CLAWD_TEST_KILL_SECONDS", "60"))
    assert kill(seconds, seed) >= AT_LEAST


# --- the judge

NAME = "0p.0-0"
WHOLE = length(NAME)
FINE = Word(published=WHOLE, closed=True, alive=True)


def follow_of(count: int, client: str = "client", skip: int = -1) -> Follow:
    """A reading that got so many tokens, but one."""
    follow = Follow(NAME, client)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, written = Classes(), puts(NAME, count)
    for seq, put in enumerate(written):
        klass = text.take(put.data)
        klass = CRITICAL if put.urgent or seq == 0 else klass
        shown = decoder.decode(put.data, final=seq == count - 1)
        if seq != skip:
            follow.take(["token", seq, klass, put.count, put.data.hex(), shown])
            follow.take(["position", f"7-{seq}"])
    return follow


def judged(word: Word, *ends: tuple[Follow, str]) -> list[str]:
    judge = Judge(lambda name: word)
    for follow, reason in ends:
        judge.end(follow, reason)
    return judge.complaints


def test_the_judge_is_content_with_what_is_right() -> None:
    assert judged(FINE, (follow_of(WHOLE), "stop"), (follow_of(WHOLE, "other"), "stop")) == []
    dead = Word(published=15, closed=False, alive=False)
    assert judged(dead, (follow_of(15), "producer_lost")) == []
    assert judged(dead, (follow_of(17), "producer_lost")) == []  # it was killed before it could say so
    assert judged(dead, (follow_of(WHOLE), "stop")) == []


@pytest.mark.parametrize(
    ("word", "follow", "reason", "complaint"),
    [
        (FINE, follow_of(WHOLE - 1), "stop", "before the end"),
        (FINE, follow_of(WHOLE, skip=3), "stop", "lost seq 3 to 3 without a gap"),
        (FINE, follow_of(15), "producer_lost", 'its producer had ended it with "stop"'),
        (FINE, follow_of(WHOLE), "error:quarantined", "error:quarantined"),
        (Word(15, False, False), follow_of(14), "producer_lost", "lost seq 14 to 14 before the end"),
        (Word(15, False, True), follow_of(15), "producer_lost", "which lives"),
    ],
)
def test_the_judge_sees(word: Word, follow: Follow, reason: str, complaint: str) -> None:
    said = judged(word, (follow, reason))
    assert [each for each in said if complaint in each], said


def test_the_judge_sees_clients_that_were_told_different_things() -> None:
    dead = Word(published=10, closed=False, alive=False)
    (said,) = judged(dead, (follow_of(15), "producer_lost"), (follow_of(14, "other"), "producer_lost"))
    assert "other: ended with ('producer_lost', 14), for another client with ('producer_lost', 15)" in said


def test_the_judge_sees_gaps_and_what_came_again_or_was_changed() -> None:
    gap, again, changed = follow_of(WHOLE), follow_of(WHOLE), follow_of(WHOLE)
    gap.take(["gap", 3, 4, "evicted"])
    again.events.insert(5, again.events[4])
    seen, text = changed.events[6]
    assert isinstance(seen, Seen)
    changed.events[6] = seen._replace(data=b"x"), text
    for follow in (gap, again, changed):
        assert judged(FINE, (follow, "stop"))


def test_a_client_that_is_killed_goes_on_behind_its_last_position() -> None:
    follow, whole = follow_of(10), follow_of(WHOLE)
    follow.position = "7-6"  # the last one whose text was shown as a whole
    assert follow.go_on() == "7-6"
    assert follow.seen == 7
    follow.events += whole.events[7:]
    assert judged(FINE, (follow, "stop")) == []
    fresh = follow_of(3)
    fresh.position = None
    assert (fresh.go_on(), fresh.seen) == ("-", 0)


def test_the_judge_believes_a_refusal_only_of_what_never_opened() -> None:
    for word, code, right in ((Word(0, False, False), "unknown", True), (Word(1, False, False), "unknown", False),
                              (Word(0, False, False), "lost", False)):  # fmt: skip
        judge = Judge(lambda name, word=word: word)  # type: ignore[misc]
        judge.fail(Follow(NAME, "client"), code, "no such stream")
        assert (judge.complaints == []) is right
