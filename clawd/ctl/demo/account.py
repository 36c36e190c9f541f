# SPDX-License-Identifier: Apache-2.0
"""What was sent against what was received: the table for people, the object for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clawd.ctl import render
from clawd.ctl.demo.delay import Delays
from clawd.ctl.demo.reader import Received

VERSION = 1
"""Of the object: fields are only added."""


@dataclass
class Account:
    """One stream: what its producer said it wrote, what the client got."""

    name: str
    sent: dict[str, Any]
    received: Received

    @property
    def is_intact(self) -> bool:
        """All of it, in order, byte for byte."""
        got = self.received
        return (
            (got.tokens, got.bytes, got.digest) == (self.sent["tokens"], self.sent["bytes"], self.sent["digest"])
            and got.in_order
            and not got.gaps
            and got.end_reason == "stop"
        )

    @property
    def first_token_ns(self) -> int | None:
        """From the moment the stream was asked for to its first token at the client."""
        first_ns = self.received.first_ns
        return None if first_ns is None else first_ns - int(self.sent["requested_ns"])


def _first_tokens(accounts: list[Account]) -> Delays:
    firsts = Delays()
    for account in accounts:
        if account.first_token_ns is not None:
            firsts.add([0], account.first_token_ns)
    return firsts


def _added(accounts: list[Account]) -> Delays:
    added = Delays()
    for account in accounts:
        added.merge(account.received.delays)
    return added


def _microseconds(delays: Delays) -> dict[str, int | None]:
    values = {f"p{percent}": delays.percentile(percent) for percent in (50, 99)}
    return {name: None if value is None else round(value / 1000) for name, value in values.items()}


def tokens_per_second(accounts: list[Account]) -> float | None:
    """From the first request to the last token at the client. None when no token came."""
    ends = [account.received.last_ns for account in accounts if account.received.last_ns is not None]
    if not ends:
        return None
    elapsed_ns = max(ends) - min(int(account.sent["requested_ns"]) for account in accounts)
    return round(sum(account.received.tokens for account in accounts) * 1e9 / elapsed_ns, 1)


def summary(accounts: list[Account]) -> dict[str, Any]:
    """The object of --json. `first_token_us` is asked for → client, `added_us` written → client."""
    return {
        "version": VERSION,
        "streams": len(accounts),
        "tokens_sent": sum(account.sent["tokens"] for account in accounts),
        "tokens_received": sum(account.received.tokens for account in accounts),
        "gaps": sum(account.received.gaps for account in accounts),
        "intact": all(account.is_intact for account in accounts),
        "first_token_us": _microseconds(_first_tokens(accounts)),
        "added_us": _microseconds(_added(accounts)),
        "tokens_per_second": tokens_per_second(accounts),
    }


def _row(name: str, accounts: list[Account]) -> tuple[object, ...]:
    sent = sum(account.sent["tokens"] for account in accounts)
    received = sum(account.received.tokens for account in accounts)
    firsts, added = _first_tokens(accounts), _added(accounts)
    delays = (delays.percentile(percent) for delays in (firsts, added) for percent in (50, 99))
    return (name, sent, received, sent - received, *map(render.duration, delays))


def show(accounts: list[Account]) -> str:
    """A table, and in words what it says."""
    rows = [_row(account.name, [account]) for account in accounts]
    if len(accounts) > 1:
        rows.append(_row("all", accounts))
    header = ("stream", "sent", "received", "lost", "first p50", "p99", "added p50", "p99")
    wrong = [account for account in accounts if not account.is_intact]
    rate = tokens_per_second(accounts)
    if wrong:
        verdict = "NOT INTACT: " + "; ".join(f"{account.name} ended as {_how(account)}" for account in wrong)
    else:
        verdict = "Intact: every token arrived once, in order, byte for byte."
    speed = "" if rate is None else f" {rate:,.0f} tokens/s in all."
    return f"{render.table(header, rows)}\n\n{verdict}{speed}"


def _how(account: Account) -> str:
    got = account.received
    order = "in order" if got.in_order else "out of order"
    return f'"{got.end_reason}", {got.gaps} gaps, {order}, {got.bytes} of {account.sent["bytes"]} bytes'
