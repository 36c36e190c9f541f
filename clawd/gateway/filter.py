# SPDX-License-Identifier: Apache-2.0
"""What is done to text on its way to readers, beside the relay: stop phrases and redaction. Text that cannot be part of
a match goes on at once; what comes out does not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clawd.errors import ClawdError, ConfigError

HELD_MAX = 1024
"""Characters that may be held back for a pattern's sake; a longer match is not found."""
CONTEXT = 64
"""Characters before that a pattern may look back at."""
PATIENCE_S = 0.25
"""How long a pattern may search one piece of text: some never come to an end."""
REDACTED = "[redacted]"


class StopPhrases:
    """Ends the text where one of `phrases` begins."""

    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = tuple(phrases)
        self.held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What of the text so far can be shown now."""
        if self.stopped:
            return ""
        text = self.held + text
        found = [at for at in (text.find(phrase) for phrase in self._phrases) if at >= 0]
        # One that is still coming and began earlier would end the text earlier
        begun = self._begun_at(text)
        if found and min(found) <= begun:
            self.stopped = True
            self.held = ""
            return text[: min(found)]
        self.held = text[begun:]
        return text[:begun]

    def _begun_at(self, text: str) -> int:
        """Where the longest end of `text` starts that is the beginning of a phrase."""
        longest = max(map(len, self._phrases)) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if any(phrase.startswith(text[at:]) for phrase in self._phrases):
                return at
        return len(text)

    def flush(self) -> str:
        """Nothing comes any more: what was held back, up to a phrase in it."""
        text, self.held = self.held, ""
        found = [at for at in (text.find(phrase) for phrase in self._phrases) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        return text


class Redaction:
    """Shows [redacted] instead of what matches one of `patterns`. Raises ConfigError for what is no pattern."""

    def __init__(self, patterns: Sequence[str]) -> None:
        try:
            import regex  # beside re: it can say that more text could make a match
        except ImportError as error:
            raise ConfigError("redact needs the module regex", "run: pip install 'clawd[gateway]'") from error
        try:
            for pattern in patterns:
                if regex.fullmatch(pattern, ""):
                    raise ConfigError(f'redact: "{pattern}" matches the empty text', "write one that needs a character")
            self._pattern: Any = regex.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        except regex.error as error:
            raise ConfigError(f"redact: {patterns} has no pattern: {error}", "write regular expressions") from error
        self._context = ""
        self.held = ""

    def feed(self, text: str) -> str:
        return self._run(text, more=True)

    def flush(self) -> str:
        return self._run("", more=False)

    def _run(self, text: str, *, more: bool) -> str:
        text = self._context + self.held + text
        at, out = len(self._context), []
        try:
            while at < len(text):
                match = self._pattern.search(text, at, timeout=PATIENCE_S)
                begun = self._begun_at(text, at, match.start() if match else len(text)) if more else len(text)
                if match is not None and match.start() < begun:
                    out.append(text[at : match.start()] + REDACTED)
                    at = match.end()
                elif len(text) - begun <= HELD_MAX:
                    out.append(text[at:begun])
                    at = begun
                    break
                else:  # too long to wait for its end
                    cut = len(text) - HELD_MAX
                    out.append(self._pattern.sub(REDACTED, text[at:cut], timeout=PATIENCE_S))
                    at = cut
        except TimeoutError as error:
            raise ClawdError("a redact pattern takes too long", "write one that does not backtrack") from error
        self.held = text[at:]
        self._context = text[max(0, at - CONTEXT) : at]
        return "".join(out)

    def _begun_at(self, text: str, at: int, match_at: int) -> int:
        """The first place from `at` on where more text could make a match, or a longer one, of all that follows."""
        if match_at == len(text):  # a search for the beginning of a match prefers a whole one, and there is none
            partial = self._pattern.search(text, at, partial=True, timeout=PATIENCE_S)
            return int(partial.start()) if partial is not None else len(text)
        for place in range(at, match_at + 1):
            if self._pattern.fullmatch(text, place, partial=True, timeout=PATIENCE_S):
                return place
        return len(text)


class Pipeline:
    """The stages of one stream, in order: text in, text for readers out."""

    def __init__(self, stop_phrases: Sequence[str], redact: Sequence[str]) -> None:
        self._stop = StopPhrases(stop_phrases) if stop_phrases else None
        self._redaction = Redaction(redact) if redact else None

    @property
    def held(self) -> bool:
        """Whether text is held back: it may be part of a match."""
        return any(stage is not None and stage.held for stage in (self._stop, self._redaction))

    @property
    def stopped(self) -> bool:
        """A stop phrase came: there is no more text."""
        return self._stop is not None and self._stop.stopped

    def feed(self, text: str) -> str:
        if self._stop is not None:
            text = self._stop.feed(text)
        if self._redaction is not None:
            text = self._redaction.feed(text)
            if self.stopped:
                text += self._redaction.flush()
        return text

    def flush(self) -> str:
        """No more text comes; what was held back."""
        text = ""
        if self._stop is not None:
            text = self._stop.flush()
        if self._redaction is not None:
            text = self._redaction.feed(text) + self._redaction.flush()
        return text
