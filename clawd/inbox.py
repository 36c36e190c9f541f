# SPDX-License-Identifier: Apache-2.0
"""What a client's link knows of one reading: the records not read yet, what comes next, how much clawd may send."""

from __future__ import annotations

import struct
from collections import deque

from clawd.core import ffi, lib
from clawd.errors import ClawdError

__all__ = ["ITEM", "Inbox", "Page"]

Page = tuple[bytes, int, bytes, int]
"""Records as they came: bytes, the offset of these in their frame, a `claw_item` for each record, their cost."""

ITEM = struct.Struct("<IIQQIIHBBI")
"""struct claw_item: attachment, incarnation, seq, written_ns, offset, count, len, kind, klass, bytes"""
_ITEM_END = struct.Struct("<Q12xI2xB5x")  # its seq, count and kind, from offset 8
_KIND_AT = 34
_TOKEN, _GAP, _OPEN, _CLOSE = int(lib.CLAW_TOKEN), int(lib.CLAW_GAP), int(lib.CLAW_OPEN), int(lib.CLAW_CLOSE)

if ITEM.size != ffi.sizeof("struct claw_item"):
    raise ImportError("struct claw_item is not what inbox.py reads; build the core again")


def _end(seq: int, count: int, kind: int) -> int:
    """The sequence number after a record."""
    return seq + 1 if kind == _TOKEN else seq + count if kind == _GAP else seq


class Inbox:
    """One reading as its link sees it.

    The link, under its owner's lock, appends to `pending` and counts `received`; the reader, without it, takes from
    `pending` and counts `consumed`. No other field has two writers.
    """

    __slots__ = ("cancel", "consumed", "credit", "done", "error", "expected", "give_up", "grace_ms", "id",
                 "incarnation", "limit", "offset", "on_gone", "pending", "quarter", "received", "stream")  # fmt: skip

    def __init__(self, stream: str, after: tuple[int, int] | None, credit: int, give_up: float) -> None:
        self.stream = stream
        self.id = 0
        self.incarnation: int | None = after[0] if after else None
        self.expected = after[1] + 1 if after else 0
        self.credit = credit
        self.quarter = max(1, credit // 4)
        self.give_up = give_up  # end of `wait`, by time.monotonic()
        self.cancel = False
        self.on_gone = "keep"  # what clawd does with the stream when it has no reader left, and how long after
        self.grace_ms = 0
        self.pending: deque[Page] = deque()
        self.done = False  # nothing will be appended any more
        self.error: ClawdError | None = None  # raised when `pending` is used up
        self.received = 0
        self.consumed = 0
        self.offset = 0  # the credit's limit is offset + consumed
        self.limit = 0  # as last told to clawd; 0 = never attached

    def begin(self) -> int:
        """Start the accounts of a new attach; returns the credit it gives.

        What waits unread was paid for before: without taking it off, each reconnect let clawd send a whole credit more.
        """
        self.limit = max(1, self.credit - (self.received - self.consumed))
        self.offset = self.credit - self.received
        return self.limit

    def owes_credit(self) -> bool:
        """Whether the reader has consumed so much that clawd should be told."""
        return self.offset + self.consumed - self.limit >= self.quarter and self.limit > 0 and not self.done

    def new_limit(self) -> int:
        """The credit to tell clawd now; it never falls."""
        self.limit = max(self.limit, self.offset + self.consumed)
        return self.limit

    def accept_next_token(self, page: Page, incarnation: int, first_seq: int, current: bool) -> bool:
        """Take a segment that is the next token and no more: what an engine's step mostly is. False: it is not that."""
        items = page[2]
        if (
            len(items) != ITEM.size
            or items[_KIND_AT] != _TOKEN
            or first_seq != self.expected
            or incarnation != self.incarnation
            or not current
        ):
            return False
        self.expected = first_seq + 1
        self.received += page[3]
        self.pending.append(page)
        return True

    def accept(self, page: Page, incarnation: int, first_seq: int, current: bool) -> str | None:
        """Take a segment. `current` says it came on the connection of the latest attach.

        Returns what is wrong with it, if something is. Sets `done` when it ends the stream.
        """
        if self.incarnation is None:
            self.incarnation = incarnation
        if incarnation != self.incarnation:
            return f"incarnation {incarnation} came for {self.incarnation}"
        if first_seq != self.expected:
            return self._accept_rest(page, current)
        self._append(page, current)
        return None

    def _append(self, page: Page, current: bool) -> None:
        items, cost = page[2], page[3]
        seq, count, kind = _ITEM_END.unpack_from(items, len(items) - ITEM.size + 8)
        end = seq + 1 if kind == _TOKEN else _end(seq, count, kind)
        if end > self.expected:
            self.expected = end
        self.received += cost
        if not current:
            self.offset -= cost  # came outside of the credit of the latest attach
        self.pending.append(page)
        if kind == _CLOSE:
            self.done = True

    def _accept_rest(self, page: Page, current: bool) -> str | None:
        # Does not start where the last segment ended: sent again after a reconnect, or wrong
        data, base, items, cost = page
        kept: list[bytes] = []
        dropped = 0
        for row in ITEM.iter_unpack(items):
            seq, count, kind = row[2], row[5], row[7]
            if seq > self.expected and not kept:
                return f"token {seq} came where {self.expected} was due"
            if kind == _CLOSE and seq < self.expected:
                return f"it ended at {seq} although {self.expected - 1} had come"
            if kind == _GAP and seq < self.expected < seq + count:
                row = (*row[:2], self.expected, *row[3:5], seq + count - self.expected, *row[6:])
            # an OPEN that comes again does no harm, and one that comes late tells what was not known
            if _end(seq, count, kind) > self.expected or kind in (_OPEN, _CLOSE):
                kept.append(ITEM.pack(*row))
            else:
                dropped += row[9]
        if current:
            self.offset += dropped
        if kept:
            self._append((data, base, b"".join(kept), cost - dropped), current)
        return None
