# SPDX-License-Identifier: Apache-2.0
"""Which of a consumer's readings have something: for one thread or task that reads many of them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from clawd.inbox import Inbox
from clawd.reading import BaseReading

__all__ = ["Selection"]

R = TypeVar("R", bound=BaseReading)


class Selection(Inbox, Generic[R]):
    """Stands where a consumer waits for any of its readings: `pending` is the inboxes that something came for."""

    __slots__ = ("_asked", "_readings")

    pending: Any  # dict[Inbox, None]: each once, however much came

    def __init__(self) -> None:
        super().__init__("any of the streams", None, 1, 0.0)
        self.pending = {}
        self._asked = False
        self._readings: dict[Inbox, R] = {}

    def add(self, inbox: Inbox, reading: R) -> None:
        self._readings[inbox] = reading

    def end(self, inbox: Inbox) -> None:
        """Its end was read. Where nobody ever asks for what is readable, nothing else would let go of it."""
        if not self._asked:
            self.drop(inbox)

    def drop(self, inbox: Inbox) -> None:
        """The application let go of it."""
        self._readings.pop(inbox, None)
        self.pending.pop(inbox, None)

    def note(self, inboxes: list[Inbox]) -> bool:
        """Something came for `inboxes`. False: they are none of these, or nobody asks."""
        if not self._asked:
            return False
        readings = self._readings
        found = {inbox: None for inbox in inboxes if inbox in readings}
        self.pending.update(found)
        return bool(found)

    @property
    def is_empty(self) -> bool:
        """Nothing is read any more."""
        return not self._readings

    def take(self) -> list[R]:
        """The readings that have something; one that ended, or failed, is among them a last time."""
        if not self._asked:
            self._asked = True
            self.pending = {inbox: None for inbox in self._readings if inbox.pending or inbox.done}
        found = []
        readings = self._readings
        for inbox in list(self.pending):
            reading = readings[inbox]
            if inbox.pending:
                found.append(reading)
                continue
            del self.pending[inbox]
            if inbox.done:
                del readings[inbox]
                found.append(reading)
        return found
