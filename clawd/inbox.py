# SPDX-License-Identifier: Apache-2.0
"""What a client's link knows of one reading: the records not read yet, what comes next, how much clawd may send."""

from __future__ import annotations

import struct
from collections import deque

from clawd.core import ffi, lib
from clawd.errors import ClawdError

__all__ = ["CLOSES", "KIND_AT", "PART", "PLAIN", "RECORD", "Inbox", "Page"]

Page = tuple[bytes, int, int, int]
"""Records of one stream as they came, in sequence: their bytes, which are also their cost; the sequence of the first
TOKEN or GAP; if they are TOKENs only, how many; CLAW_PART_… flags.
"""

PART = struct.Struct("<IIQQIIII")
"""struct claw_part: attachment, incarnation, first_seq, end_seq, offset, len, tokens, flags"""
RECORD = struct.Struct("<HBBIQQ")
"""struct claw_spooled: len, kind, klass, count, ring_seq, written_ns; the payload and padding follow"""
PLAIN, CLOSES = int(lib.CLAW_PART_PLAIN), int(lib.CLAW_PART_CLOSES)
_PAD = int(lib.CLAW_SPOOLED_ALIGN) - 1
KIND_AT = 2
"""Of a record's kind in its bytes."""
_COUNT_AT = 4
_TOKEN, _GAP, _OPEN, _CLOSE = int(lib.CLAW_TOKEN), int(lib.CLAW_GAP), int(lib.CLAW_OPEN), int(lib.CLAW_CLOSE)

for _format, _name in ((PART, "claw_part"), (RECORD, "claw_spooled")):
    if _format.size != ffi.sizeof(f"struct {_name}"):
        raise ImportError(f"struct {_name} is not what inbox.py reads; build the core again")


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

    def take_over(self, other: Inbox) -> None:
        """Be as `other` is, but for who reads it."""
        for name in Inbox.__slots__:
            setattr(self, name, getattr(other, name))

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

    def accept(self, page: Page, incarnation: int, end_seq: int, current: bool) -> str | None:
        """Take a page that ends before `end_seq`. `current` says it came on the connection of the latest attach.

        Returns what is wrong with it, if something is. Sets `done` when it ends the stream.
        """
        if self.incarnation is None:
            self.incarnation = incarnation
        if incarnation != self.incarnation:
            return f"incarnation {incarnation} came for {self.incarnation}"
        if page[1] != self.expected:
            return self._accept_rest(page, end_seq, current)
        self._append(page, end_seq, current)
        return None

    def _append(self, page: Page, end_seq: int, current: bool) -> None:
        cost = len(page[0])
        if end_seq > self.expected:
            self.expected = end_seq
        self.received += cost
        if not current:
            self.offset -= cost  # came outside of the credit of the latest attach
        self.pending.append(page)
        if page[3] & CLOSES:
            self.done = True

    def _accept_rest(self, page: Page, end_seq: int, current: bool) -> str | None:
        # Does not start where the last one ended: sent again after a reconnect, or wrong
        records, seq, _, flags = page
        if seq > self.expected:
            return f"token {seq} came where {self.expected} was due"
        if flags & CLOSES and end_seq < self.expected:
            return f"it ended at {end_seq} although {self.expected - 1} had come"
        kept: list[bytes] = []
        at = dropped = 0
        while at < len(records):
            length, kind, _, count, _, _ = RECORD.unpack_from(records, at)
            record = records[at : at + RECORD.size + (length + _PAD & ~_PAD)]
            at += len(record)
            end = seq + 1 if kind == _TOKEN else seq + count if kind == _GAP else seq
            if kind == _GAP and seq < self.expected < end:
                count = end - self.expected
                record = record[:_COUNT_AT] + count.to_bytes(4, "little") + record[_COUNT_AT + 4 :]
            # an OPEN that comes again does no harm, and one that comes late tells what was not known
            if end > self.expected or kind in (_OPEN, _CLOSE):
                kept.append(record)
            else:
                dropped += len(record)
            seq = end
        if current:
            self.offset += dropped
        if kept:
            self._append((b"".join(kept), self.expected, 0, flags & ~PLAIN), end_seq, current)
        return None
