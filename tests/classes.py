# SPDX-License-Identifier: Apache-2.0
"""Classes of tokens, the plain way: decode, tell each character's kind from Unicode's data, match what they leave. What
the core's table-driven scan is compared with, and what the history checker expects.
"""

from __future__ import annotations

import codecs
import re
import unicodedata

CRITICAL, HIGH, NORMAL = 0, 1, 2

MARKS = "!?！？。｡…‥⁇⁈⁉‼‽؟۔।॥"
POINTS = ".．"
CLOSERS = "\"'”’“‘»«›‹＂＇〞〟)]}）］｝｠｣〉》」』】〕〗〙〛*"

# Kinds: w = of a word or number, W = other content, s = space, c = closer, p = point, m = mark
LEAVES = {  # what a text ends with: kinds of first characters that make the next token HIGH
    "over": (re.compile("[pm][pmc]*s[sc]*$"), "wWscpm"),
    "ended": (re.compile("(pc|ppp|m)[pmc]*$"), "wWsc"),
    "point": (re.compile("pp?$"), "Wsc"),
    "nothing": (re.compile("$"), ""),
}
SHORT = {"over": "ms", "ended": "m", "nothing": ""}  # kinds that leave the same


def kind(char: str) -> str:
    for name, chars in (("m", MARKS), ("p", POINTS), ("c", CLOSERS)):
        if char in chars:
            return name
    if unicodedata.category(char) in ("Zs", "Zl", "Zp") or char in "\t\n\v\f\r\x85":
        return "s"
    if char == "\ufffd" or unicodedata.name(char, "").startswith(("FULLWIDTH DIGIT", "FULLWIDTH LATIN")):
        return "w"
    return "W" if char >= "\u2000" or "\x80" <= char < "\xc0" else "w"


class Classes:
    """One text, token by token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kinds = ""  # of the characters since the last content

    @property
    def leaves(self) -> str:
        return next(name for name, (pattern, _) in LEAVES.items() if pattern.search(self._kinds))

    def take(self, data: bytes) -> int:
        """The class of the next token, but for CRITICAL."""
        begun = self._decoder.getstate()[0]
        text = self._decoder.decode(data)
        if not data:
            return NORMAL
        lead = (begun + data)[0]
        first = kind(text[0]) if text else "W" if lead == 0xC2 or lead >= 0xE2 else "w"
        klass = HIGH if first in LEAVES[self.leaves][1] else NORMAL
        for found in map(kind, text):
            self._kinds = "" if found in "wW" else self._kinds + found
        self._kinds = SHORT.get(self.leaves, self._kinds)
        return klass
