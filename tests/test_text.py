# SPDX-License-Identifier: Apache-2.0
"""Which tokens are HIGH: tables of sentences cut into tokens, and the core against the plain reference on any bytes.

The rule that all of it rests on: a token's class follows from the bytes before it, however those were cut, and from its
own first character.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classes import HIGH, NORMAL, Classes
from clawd.core import ffi, lib
from rig import Rig

# A bar is a cut; under each token its class
SENTENCES = {
    "English": ("Hello| there|.| How| are| you|?| Fine|!| Good", "NNNHNNNHNH"),
    "a mark inside its token": ("Hello.| How| are you?| Fine| so", "NHNHN"),
    "a sentence that ends within a token": ("One. Two| three", "NN"),
    "Chinese": ("你好|。|今天|天气|好吗|？|很好|！|走", "NNHNNNHNH"),
    "Japanese": ("はい|。|次|｡|ﾂｷﾞ", "NNHNH"),
    "full-width point": ("です|．|次", "NNH"),
    "mixed": ("用 C|。|Next| one|.|下|个 OK|!|好", "NNHNNHNNH"),
    "Arabic, Urdu, Hindi": ("هل|؟| نعم|۔| ہاں| है|।| हाँ", "NNHNHNNH"),
    "no end": ("a|,| b|;| c|:| d| -| e|、|f|，|g", "NNNNNNNNNNNNN"),
    "a token that starts with a mark": ("Really|?!| Yes", "NNH"),
    "marks one by one": ("No|!|!|?| Yes", "NNNNH"),
    "number": ("It is 1,234|.|56| now", "NNNN"),
    "number cut after its point": ("3.|14| is", "NNN"),
    "full-width number": ("３|．|１４", "NNN"),
    "a sentence that ends with a number": ("There are 10.| Next", "NH"),
    "a number with its sentence's point and no space": ("10.|Next", "NN"),
    "a number that starts with a point": (" .|5| more", "NNN"),
    "version": ("v1.|2.|3| is", "NNNN"),
    "abbreviation": ("e.|g|.|, this", "NNNN"),
    "an abbreviation and a space is not told from an end": ("e.g.| this", "NH"),
    "a list's number is not told from an end": ("1.| One", "NH"),
    "address": ("see example.|com| or www|.|a|.|org/|x", "NNNNNNNN"),
    "path": ("../|a|./|b| ..|/c", "NNNNNN"),
    "method": ("self.|x| = f(a).|b", "NNNN"),
    "markup after a point": ("end.|</p>", "NN"),
    "ellipsis": ("Well|...| I", "NNH"),
    "ellipsis in progress": ("Well|.|.|.| I", "NNNNH"),
    "ellipsis in two": ("Well|..|.| I", "NNNH"),
    "ellipsis and no space": ("wait...|what", "NH"),
    "two points and no space": ("a..|b", "NN"),
    "five points": ("Well.....|.| I", "NNH"),
    "ellipsis in one character": ("Well|…| I", "NNH"),
    "Chinese ellipsis": ("嗯|……|好", "NNH"),
    "Chinese ellipsis in progress": ("嗯|…|…|好", "NNNH"),
    "two-point leader": ("あ|‥|‥|次", "NNNH"),
    "quote": ('"No|."| Then', "NNH"),
    "quote by itself": ('"No|.|"| Then', "NNHH"),
    "curly quotes": ("“No|.|”| Then| ‘so|!|’| Yes", "NNHHNNHH"),
    "Chinese quotes": ("他说：“好|。|”|然后", "NNHH"),
    "corner brackets": ("「好|。|」|次|『ね|！|』|次", "NNHHNNHH"),
    "an opening bracket starts the next sentence": ("好|。|「|次", "NNHN"),
    "brackets": ("(Yes|.)| Then| [so|!|]|)| Yes", "NNHNNHHH"),
    "full-width brackets": ("（好|。|）|然后|【好|！|】|然后|《好|？|》|然后", "NNHHNNHHNNHH"),
    "guillemets": ("«Oui|.|»| Puis", "NNHH"),
    "emphasis": ("**Note|.|**| Then", "NNHH"),
    "a mark after a closer": ('"Who?|"|!| Then', "NHNH"),
    "white space": ("End|.|\n\n|\t|Next| word", "NNHHHN"),
    "ideographic and no-break space": ("完|。|\u3000|\u00a0|次|の", "NNHHHN"),
    "a mark after white space starts anew": ("No|!| |?| So", "NNHHH"),
    "a point after white space starts anew": ("See|.| |.|bashrc", "NNHHN"),
    "spaced ellipsis": ("Well|.| .| .| I", "NNHHH"),
    "no sentence before": (' |"|)|Word', "NNNN"),
    "emoji": ("Great|!|🎉| and", "NNHN"),
    "emoji after a point": ("Great|.|🎉|.|👍🏽", "NNHNH"),
    "letters after a point": ("т.|е.|é", "NNN"),
    "an empty token": ("End.|| Next", "NNH"),
}
RAW = {
    "a character in two tokens": ([b"Hi\xe3\x80", b"\x82", b"Next"], "NNH"),
    "a character in three tokens": ([b"Hi\xe3", b"\x80", b"\x82", b"Next"], "NNNH"),
    "a closer in three tokens": ([b"Hi!", b"\xe2", b"\x80", b"\x9d", b" Next"], "NHHHH"),
    "all parts of the next sentence's first character": ([b"Hi!", b"\xf0", b"\x9f\x8e", b"\x89", b" and"], "NHHHN"),
    "an ellipsis whose first byte does not tell": ([b"Hi\xe2\x80\xa6", b"\xe2", b"\x80\xa6", b"x"], "NHNH"),
    "a letter in two after a point": ([b"\xd0\xb0.", b"\xd0", b"\xb1"], "NNN"),
    "a mark that is never finished": ([b"Hi\xe3\x80", b"Next", b" word"], "NNN"),
    "a broken character and then a mark": ([b"Hi\xe3\x80.", b" Next"], "NH"),
    "a broken character after a mark": ([b"Hi!", b"\xe3\x80", b"Next", b" word"], "NHHN"),
    "stray bytes": ([b"Hi!", b"\x82", b"\x82"], "NHN"),
    "overlong mark": ([b"Hi\xe0\x98\x9f", b"Next", b"\xf0\x83\x80\x82", b"Next"], "NNNN"),
    "a part that cannot go on": ([b"Hi!", b"\xe0", b"\x80", b"\x80", b"!", b"\xf0", b"\x80", b"\x80"], "NHHNNHHN"),
    "surrogate after a point": ([b"Hi.", b"\xed\xa0\x80"], "NN"),
    "surrogate": ([b"Hi!", b"\xed\xa0\x80", b"Next"], "NHN"),
    "not a byte of UTF-8": ([b"Hi!", b"\xff", b"\xc0\xaf", b"\xf8"], "NHNN"),
}
NEVER = ["1,234.56", "3.14", "0.5e-3", "v10.2.33", "192.168.0.1", "e.g", "https://docs.example.com/a.b/c.html"]
HIGH_AFTER = [
    "a. ",
    "a.\n\n",
    "a.”",
    "a…",
    "a……",
    "a...",
    'a?!" ',
    "好。",
    "好！」\u3000",
    "好？）】》",
    "a。\u00a0»",
    "a…’\u2003*",
]
NORMAL_AFTER = ["", "a", "a.", "a..", "3.", "。b", "a. b", "a, ", "好「", "...a", " ”", "！é", "！🎉"]

PIECES = [*".!?。！？…｡．؟।\"')]}*”’」』）】》 \n\u3000\u00a0\u2003aZ0é你１🎉,-/", "\ufffd"]
bits = st.one_of(st.sampled_from([piece.encode() for piece in PIECES]), st.binary(min_size=1, max_size=3))
texts = st.lists(bits, max_size=24).map(b"".join)
cuts = st.lists(st.integers(0, 60), max_size=12)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(min(place, len(data)) for place in places)
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


def core(tokens: list[bytes]) -> list[int]:
    text = ffi.new("struct claw_text *")
    return [lib.claw_text_class(text, token, len(token)) for token in tokens]


def reference(tokens: list[bytes]) -> list[int]:
    text = Classes()
    return [text.take(token) for token in tokens]


def shown(classes: list[int]) -> str:
    return "".join({HIGH: "H", NORMAL: "N"}[klass] for klass in classes)


@pytest.mark.parametrize("name", SENTENCES)
def test_a_sentence_has_its_classes(name: str) -> None:
    text, expected = SENTENCES[name]
    tokens = [token.encode() for token in text.split("|")]
    assert shown(core(tokens)) == expected
    assert shown(reference(tokens)) == expected


@pytest.mark.parametrize("name", RAW)
def test_cut_and_broken_characters_have_their_classes(name: str) -> None:
    tokens, expected = RAW[name]
    assert shown(core(tokens)) == expected
    assert shown(reference(tokens)) == expected


@pytest.mark.parametrize("text", NEVER)
def test_points_within_words_and_numbers_end_nothing_wherever_they_are_cut(text: str) -> None:
    data = text.encode()
    for places in combinations(range(1, len(data)), 2):
        tokens = cut(data, list(places))
        assert shown(core(tokens)) == "NNN", tokens
    assert shown(core([data[i : i + 1] for i in range(len(data))])) == "N" * len(data)


@pytest.mark.parametrize(("text", "klass"), [(t, HIGH) for t in HIGH_AFTER] + [(t, NORMAL) for t in NORMAL_AFTER])
def test_the_class_after_a_text_is_the_same_however_the_text_was_cut(text: str, klass: int) -> None:
    data = text.encode()
    for places in combinations(range(len(data) + 1), 3):
        tokens = cut(data, list(places))
        assert core([*tokens, b"Next"])[-1] == klass, tokens


@pytest.mark.parametrize("before", ["", "a", "a.", "a..", "a!", "a! ", "a。"])
def test_every_character_has_the_kind_that_unicode_says(before: str) -> None:
    points = [*range(0x3400), *range(0xFE00, 0x10000), 0x4E2D, 0xAC00, 0x1F389, 0x10FFFF]
    for char in map(chr, points):
        tokens = [before.encode(), char.encode(), b"x", char.encode(), b"\xe4\xbd\xa0"]
        assert core(tokens) == reference(tokens), f"U+{ord(char):04X} after {before!r}"


@pytest.mark.parametrize("before", [b"", b"a.", b"a..", b"a!", b"a! "])
def test_every_token_of_up_to_six_bytes_leaves_what_its_bytes_leave_one_by_one(before: bytes) -> None:
    """How many of its last bytes the core looks at, and where it falls back to all of them, shows nowhere."""
    for length in range(7):
        for chars in product(b"a.! ", repeat=length):
            token = bytes(chars)
            single = [token[i : i + 1] for i in range(length)]
            assert core([before, token, b"x"])[2] == core([before, *single, b"x"])[-1], token
            assert core([before, token, b"."])[2] == core([before, *single, b"."])[-1], token


@settings(max_examples=1000, deadline=None, print_blob=True)
@given(data=texts, places=cuts)
def test_the_core_and_the_reference_agree_on_any_bytes_cut_anywhere(data: bytes, places: list[int]) -> None:
    tokens = cut(data, places)
    assert core(tokens) == reference(tokens)


@settings(max_examples=500, deadline=None, print_blob=True)
@given(data=texts, one=cuts, other=cuts, token=texts)
def test_a_class_does_not_depend_on_how_the_text_before_was_cut(
    data: bytes, one: list[int], other: list[int], token: bytes
) -> None:
    assert core([*cut(data, one), token])[-1] == core([*cut(data, other), token])[-1]
    texts = [ffi.new("struct claw_text *") for _ in "12"]
    for text, places in zip(texts, (one, other), strict=True):
        for part in cut(data, places):
            lib.claw_text_class(text, part, len(part))
    assert bytes(ffi.buffer(texts[0])) == bytes(ffi.buffer(texts[1])), "what is kept is the same as well"


@settings(max_examples=300, deadline=None, print_blob=True)
@given(before=texts.map(lambda data: data.decode(errors="ignore")), token=st.text(min_size=1), rest=texts)
def test_a_class_depends_on_no_more_than_the_first_character(before: str, token: str, rest: bytes) -> None:
    first = token[:1].encode(errors="replace")
    assert core([before.encode(), first])[1] == core([before.encode(), first + rest])[1]


def test_classes_reach_the_reader_also_when_it_comes_late_and_resumes() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        ring.open(1, "other")
        for data in (b"One", b".", b" Two", b".", b" Three", b" words", "。".encode()[:2], "。".encode()[2:], b"Four"):
            ring.write(0, data, urgent=data == b" Three")
            ring.write(1, b"in between.")  # another stream's sentences are none of this one's
        rig.turn()
        expected = [0, 2, 1, 2, 0, 2, 2, 2, 1]
        for after in range(-1, 8):
            assert rig.core.attach(client, 1, b"s", after=after, credit=1 << 20) == 0
            found = [item.klass for item in rig.turns() if item.kind == lib.CLAW_TOKEN]
            assert found == expected[after + 1 :]


def test_a_sentence_that_the_spool_had_no_room_for_still_ended() -> None:
    with Rig({"spool_bytes": 2 * 4096, "stream_bytes": 8192}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "a")
        ring.open(1, "b")
        for _ in range(60):  # the two first blocks are all there is, and stay
            ring.write(0, b"x" * 100)
        ring.write(0, b".")
        ring.close(1)
        ring.open(2, "c")  # evicts b
        ring.close(2)
        rig.turn()
        assert rig.core.refresh_totals().dropped > 0
        ring.write(0, b" Next")
        rig.turn()
        rig.core.attach(client, 1, b"a", credit=1 << 20)
        last = [item for item in rig.turns() if item.kind == lib.CLAW_TOKEN][-1]
        assert (last.data, last.klass) == (b" Next", HIGH)


def test_after_a_producers_gap_the_text_starts_anew() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        ring.write(0, b"One.")
        ring.put(lib.CLAW_GAP, 0, b"ring_full", count=3)
        ring.write(0, b" more")
        rig.turn()
        rig.core.attach(client, 1, b"s", credit=1 << 20)
        assert [(item.data, item.klass) for item in rig.turns()][-1] == (b" more", NORMAL)
