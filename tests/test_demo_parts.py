# SPDX-License-Identifier: Apache-2.0
"""The demo's parts without processes: cutting, delays, wrapping, drawing, and the verdict on what arrived."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.cells import cell_len

from clawd.ctl.demo import account
from clawd.ctl.demo.account import Account
from clawd.ctl.demo.cutting import CHUNK_BYTES, cut_file
from clawd.ctl.demo.delay import Delays
from clawd.ctl.demo.reader import Received
from clawd.ctl.demo.screen import Screen, Wrap

pytestmark = pytest.mark.plain
SENT = {"tokens": 3, "bytes": 9, "digest": "d", "requested_ns": 1_000_000}


def cut(data: bytes, seed: str) -> list[bytes]:
    return [token for tokens in cut_file(io.BytesIO(data), seed) for token in tokens]


@pytest.mark.parametrize("size", [0, 1, 7, CHUNK_BYTES, CHUNK_BYTES + 1, 100_000])
def test_tokens_are_small_and_join_to_what_was_cut(size: int) -> None:
    data = random.Random(size).randbytes(size)
    tokens = cut(data, "seed")
    assert b"".join(tokens) == data
    assert {len(token) for token in tokens} <= set(range(1, 8))


def test_cutting_splits_characters_and_follows_the_seed() -> None:
    data = ("茶" * 1000).encode()
    tokens = cut(data, "1 chinese")
    assert tokens == cut(data, "1 chinese")
    assert tokens != cut(data, "2 chinese")
    starts = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    assert sum(start % 3 != 0 for start in starts) > len(tokens) / 2


def test_percentiles_are_those_of_the_sorted_delays() -> None:
    source = random.Random(3)
    exact = sorted(int(source.expovariate(1e-6)) for _ in range(5000))
    delays = Delays()
    for value in exact:
        delays.add([10**12 - value], 10**12)
    for percent in (1, 50, 99, 100):
        found = delays.percentile(percent)
        assert found == pytest.approx(exact[50 * percent - 1], rel=1 / 128)
    merged = Delays()
    merged.add([0, 0, 5], 5)
    merged.merge(merged)
    assert [merged.percentile(percent) for percent in (33, 34, 99)] == [0, 5, 5]
    assert Delays().percentile(50) is None


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("one two\nthree", ["one two", "three"]),
        ("abcdefghijkl", ["abcdefghij", "kl"]),
        ("茶馆又亮起灯来", ["茶馆又亮起", "灯来"]),
        ("1234567890 x", ["1234567890", "x"]),
        ("a\tb\x1b[2Jc\x07", ["a b?[2Jc?"]),
        ("", [""]),
    ],
)
def test_lines_break_where_they_should(text: str, lines: list[str]) -> None:
    for step in (1, 3, 100):
        wrap = Wrap(10)
        found = [line for at in range(0, len(text), step) for line in wrap.feed(text[at : at + step])]
        assert [*found, wrap.line] == lines


def test_no_line_is_too_wide_and_nothing_but_spaces_is_lost() -> None:
    source = random.Random(8)
    text = "".join(source.choice("ab c  de\n茶，🍵é\u0301") for _ in range(5000))
    wrap = Wrap(20)
    lines = [*wrap.feed(text), wrap.line]
    assert max(map(cell_len, lines)) <= 20
    assert "".join("".join(lines).split()) == "".join(text.split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_every_stream_within_its_height_and_all_at_the_end() -> None:
    out = Terminal()
    screen = Screen(out, ["one", "two"], 40, 12)
    screen.feed("one", "alpha " * 60)
    screen.feed("two", "\x1b[31mred")
    screen.refresh()
    frame = out.getvalue()
    assert frame.count("\n") <= 11
    assert "one\x1b[K\n" in frame
    assert "  ?[31mred\x1b[K\n" in frame
    assert "\x1b[31m" not in frame
    screen.finish()
    last = out.getvalue()[len(frame) :]
    assert last.startswith(f"\x1b[?7l\x1b[{frame.count(chr(10))}F")
    assert last.count("alpha") == 60


def test_elsewhere_each_line_has_its_streams_name() -> None:
    out = io.StringIO()
    screen = Screen(out, ["one", "three"], 20, 24)
    for piece in ("alpha be", "ta gamma", " delta"):
        screen.feed("one", piece)
    screen.feed("three", "x\n")
    screen.refresh()
    screen.finish()
    assert out.getvalue() == "one    alpha beta\nthree  x\none    gamma delta\n"


def received(**changed: Any) -> Received:
    made = Received(tokens=3, bytes=9, digest="d", end_reason="stop", first_ns=1_400_000, last_ns=3_000_000)
    made.delays.add([1_300_000, 1_300_000, 2_000_000], 2_500_000)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_an_intact_stream_is_called_so() -> None:
    accounts = [Account("one", SENT, received()), Account("two", SENT, received())]
    value = account.summary(accounts)
    assert (value["streams"], value["tokens_sent"], value["intact"]) == (2, 6, True)
    assert value["first_token_us"]["p50"] == pytest.approx(400, rel=0.01)
    assert value["added_us"]["p50"] == pytest.approx(1200, rel=0.01)
    assert value["tokens_per_second"] == 3000.0
    assert "Intact: every token" in account.show(accounts)


@pytest.mark.parametrize(
    "changed",
    [{"tokens": 2}, {"bytes": 8}, {"digest": "e"}, {"gaps": 1}, {"in_order": False}, {"end_reason": "producer_lost"}],
    ids=str,
)
def test_whatever_is_wrong_is_not_intact(changed: dict[str, Any]) -> None:
    accounts = [Account("one", SENT, received()), Account("two", SENT, received(**changed))]
    assert account.summary(accounts)["intact"] is False
    assert "NOT INTACT: two ended as" in account.show(accounts)
    assert max(map(len, account.show(accounts).split("\n\n")[0].splitlines())) <= 80
