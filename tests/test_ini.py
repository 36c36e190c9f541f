# SPDX-License-Identifier: Apache-2.0
"""The reader of INI text: every line is what it says, or a flaw with its number; on good files configparser agrees."""

import configparser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawd.ini import SHOWN_MAX, Entry, Flaw, Header, read, shown

pytestmark = pytest.mark.plain


def entries(data: bytes) -> list[tuple[str | None, str, str]]:
    found = list(read(data))
    assert not [each for each in found if isinstance(each, Flaw)]
    return [(each.section, each.key, each.value) for each in found if isinstance(each, Entry)]


def test_a_line_is_a_section_a_setting_a_comment_or_blank() -> None:
    data = b"# top\n\n[stream]  # the section\n  keep = 60s\t# how long\n; old style\nbuffer_size=128k\n"
    assert list(read(data)) == [
        Header(3, "stream"),
        Entry(4, "stream", "keep", "60s"),
        Entry(6, "stream", "buffer_size", "128k"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"[a]\r\nb = 1 # c\r\n",
        b"\xef\xbb\xbf[a]\nb = 1",
        b"[a]\rb=1\r",
        "[a] # 段\nb\u3000=\u30001\u3000# 注释：值、单位\n".encode(),
        b"[a]\nb =\xc2\xa01\xc2\xa0\n",
        b"[ a ]\n\tb\t=\t1\t#\t#\n",
    ],
    ids=["CRLF", "BOM", "CR", "full-width spaces", "no-break spaces", "tabs"],
)
def test_what_editors_and_input_methods_leave_does_no_harm(data: bytes) -> None:
    assert entries(data) == [("a", "b", "1")]


def test_a_comment_needs_white_space_before_it() -> None:
    assert entries(b"[a]\nb = x#y\nc = #z\nd = e = f\n") == [("a", "b", "x#y"), ("a", "c", ""), ("a", "d", "e = f")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[stream", '"[stream" is not a section'),
        (b"[a] b", '"[a] b" is not a section'),
        (b"[a][b]", '"[a][b]" is not a section'),
        (b"keep", '"keep" is not a setting'),
        (b"keep: 1s", '"keep: 1s" is not a setting'),
        (b"= 1s", '"= 1s" is not a setting'),
        (b"keep = \xff\xfe", "this line is not UTF-8"),
        (b"keep = 1\x00s", '"keep = 1?s" holds a character that cannot be seen'),
        (b"keep = \x1b[31m", '"keep = ?[31m" holds a character that cannot be seen'),
        ("keep = 1\u200bs".encode(), '"keep = 1?s" holds a character that cannot be seen'),
        ("keep = \u202e1s".encode(), '"keep = ?1s" holds a character that cannot be seen'),
    ],
)
def test_any_other_line_is_a_flaw_with_its_number_and_the_next_is_read(line: bytes, message: str) -> None:
    flaw, entry = list(read(b"\n" + line + b"\nb = 1\n"))
    assert isinstance(flaw, Flaw)
    assert (flaw.line, flaw.message) == (2, message)
    assert flaw.hint
    assert entry == Entry(3, None, "b", "1")


def test_a_broken_header_does_not_move_what_follows_to_another_section() -> None:
    found = list(read(b"[a]\n[b\nc = 1\n"))
    assert found[0] == Header(1, "a")
    assert isinstance(found[1], Flaw)
    assert found[2] == Entry(3, "a", "c", "1")


def test_what_is_shown_is_one_short_line() -> None:
    assert shown("a\nb\x1b") == "a?b?"
    assert len(shown("x" * 1000)) == SHOWN_MAX


@given(st.binary(max_size=300))
def test_any_bytes_give_lines_in_order(data: bytes) -> None:
    numbers = [found.line for found in read(data)]
    assert numbers == sorted(set(numbers))
    for found in read(data):
        assert not isinstance(found, Entry) or (found.key + found.value).isprintable()


_word = st.text(st.sampled_from("abcxyz_0129./-é环"), min_size=1, max_size=8)
_gap = st.sampled_from(["", " ", "\t", "  "])
_comment = st.sampled_from(["", " # c", "\t#", " #= [x]"])
_setting = st.tuples(_word, _gap, _gap, _word, _comment)


@given(
    st.dictionaries(_word, st.lists(_setting, max_size=4, unique_by=lambda row: row[0])), st.booleans(), st.booleans()
)
def test_a_good_file_is_what_configparser_reads(sections, crlf: bool, bom: bool) -> None:
    lines = []
    for section, settings in sections.items():
        lines += ["", f"[{section}]", "# note"]
        lines += [f"{key}{before}={after}{value}{comment}" for key, before, after, value, comment in settings]
    text = "\n".join(lines) + "\n"
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), inline_comment_prefixes=("#",), default_section="", strict=True
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    expected = [(section, key, value) for section in parser.sections() for key, value in parser[section].items()]
    data = (text.replace("\n", "\r\n") if crlf else text).encode()
    assert entries(b"\xef\xbb\xbf" + data if bom else data) == expected
