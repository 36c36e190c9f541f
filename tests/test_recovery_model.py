# SPDX-License-Identifier: Apache-2.0
"""Copy, commit, ack, send, crash, resume: every interleaving with two crashes of producer, clawd or client. Each token
that was published reaches the client once, in its place, or is covered by a GAP. Steps are named after the C that they
stand for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from counts import count

pytestmark = pytest.mark.plain

SCRIPT = ("open a", "token a", "token a", "close a", "open b", "token b")
WINDOW = 1
"""Tokens on the wire at once."""
"""What the producer publishes, all on one handle: it is used again."""
STREAMS = ("a", "b")
NONE, DISCARD, UNSURE, BROKEN = -1, -2, -3, -4


@dataclass(frozen=True)
class Rules:
    """The protocol; each mutant breaks one rule."""

    crashes: int = 2
    evicts: bool = False  # clawd lets go of a stream's oldest committed token at any moment, once
    commit_first: bool = True  # claw_intake: spool commit, then ack
    send_first: bool = False  # a token goes out as soon as it is copied
    compares: bool = True  # claw_intake: a record that its stream has already is passed over
    unsure: bool = True  # claw_ring_adopt: a handle that no live stream has may belong to one that ended
    knows_opens: bool = True  # claw_intake: an OPEN that is in the spool is that stream, not another one
    resumes: bool = True  # the client says what it has
    tells_gaps: bool = True  # claw_outbox_build: what the spool lacks is a GAP
    moves_cursor: bool = True  # a cursor on what is evicted looks for its place again


class State(NamedTuple):
    # shared memory: outlives everybody
    head: int = 0
    ack: int = 0
    spool: tuple[tuple[int, ...], ...] = ((), ())  # each stream's committed records, by their place in SCRIPT
    evicted: tuple[int, int] = (0, 0)  # tokens each has let go of, from its first on
    # clawd
    pos: int = 0
    copied: bool = False
    handle: int = -1  # the stream that is open on it, or NONE, DISCARD, UNSURE
    sent: tuple[int, int] = (0, 0)  # next sequence for the client
    attached: bool = True
    # between them: (stream, sequence, record), record -1 = a GAP of one
    wire: tuple[tuple[int, int, int], ...] = ()
    # the client
    has: tuple[int, int] = (0, 0)  # next sequence it expects
    # who still writes
    writes: bool = True
    crashes: int = 0
    evictions: int = 0
    fault: str = ""


def replace(state: State, **changes: object) -> State:
    return state._replace(**changes)  # type: ignore[arg-type]


def put(values: tuple[int, int], stream: int, value: int) -> tuple[int, int]:
    return (value, values[1]) if stream == 0 else (values[0], value)


def kind(record: int) -> str:
    return SCRIPT[record].split()[0]


def tokens(state: State, stream: int) -> list[int]:
    return [record for record in state.spool[stream] if kind(record) == "token"]


def right(stream: int) -> list[int]:
    """The records that a client of the stream must get, in order."""
    return [at for at, text in enumerate(SCRIPT) if text == f"token {STREAMS[stream]}"]


def meaning(rules: Rules, state: State) -> tuple[int, bool, int]:
    """claw_intake of the record at pos: its stream, whether it is new, and the handle after it."""
    record = state.pos
    what, name = SCRIPT[record].split()
    if what == "open":
        stream = STREAMS.index(name)
        known = record in state.spool[stream]
        if known and not rules.knows_opens:
            return NONE, False, DISCARD  # refused, because it exists: what follows is thrown away
        return stream, not known, stream
    stream = state.handle
    if stream == NONE:
        return NONE, False, BROKEN  # the ring would be quarantined
    if stream in (DISCARD, UNSURE):
        return NONE, False, NONE if what == "close" else stream
    new = not rules.compares or record > state.spool[stream][-1]
    return stream, new, NONE if what == "close" else stream


def taken(rules: Rules, state: State) -> list[State]:
    """claw_turn: the record at pos, step by step; the ack may come late, after several."""
    found = []
    first, last = (state.ack, state.pos) if rules.commit_first else (state.ack, state.pos + state.copied)
    if last > first:
        found.append(replace(state, ack=last))  # claw_drain_ack
    if not state.copied:
        if state.pos < state.head and (rules.commit_first or state.ack >= state.pos):
            after = replace(state, copied=True)  # claw_drain_copy
            if rules.send_first:
                stream, new, _ = meaning(rules, state)
                if new and kind(state.pos) == "token" and state.attached:
                    seq = len(tokens(state, stream))
                    if seq == state.sent[stream]:
                        wire = (*state.wire, (stream, seq, state.pos))
                        after = replace(after, wire=wire, sent=put(state.sent, stream, seq + 1))
            found.append(after)
        return found
    if not rules.commit_first and state.ack <= state.pos:
        return found
    stream, new, handle = meaning(rules, state)
    if handle == BROKEN:
        return [replace(state, fault="quarantined")]
    spool = state.spool
    if new:  # claw_spool_commit
        grown = (*spool[stream], state.pos)
        spool = (grown, spool[1]) if stream == 0 else (spool[0], grown)
    found.append(replace(state, spool=spool, pos=state.pos + 1, copied=False, handle=handle))
    return found


def sends(rules: Rules, state: State) -> list[State]:
    """claw_outbox_build: the next token of each stream, or a GAP for what is not there any more."""
    found = []
    for stream in range(len(STREAMS)):
        there = tokens(state, stream)
        seq = state.sent[stream]
        if not state.attached or seq >= len(there) or len(state.wire) == WINDOW:
            continue
        record = there[seq]
        if seq < state.evicted[stream]:
            if not rules.moves_cursor:
                record = there[state.evicted[stream]] if state.evicted[stream] < len(there) else -1
            else:
                record = -1
            if record == -1 and not rules.tells_gaps:
                found.append(replace(state, sent=put(state.sent, stream, seq + 1)))
                continue
        found.append(replace(state, wire=(*state.wire, (stream, seq, record)), sent=put(state.sent, stream, seq + 1)))
    return found


def receives(state: State) -> list[State]:
    if not state.wire:
        return []
    (stream, seq, record), *rest = state.wire
    fault = state.fault
    if seq > state.has[stream]:
        fault = "a hole"
    elif seq < state.has[stream]:
        fault = "twice"
    elif record >= 0 and [record] != right(stream)[seq : seq + 1]:
        fault = "another token in its place"
    return [replace(state, wire=tuple(rest), has=put(state.has, stream, seq + 1), fault=fault)]


def attaches(rules: Rules, state: State) -> list[State]:
    """The client on a new connection, after it has read what the old one left."""
    if state.attached or state.wire:
        return []
    position = state.has if rules.resumes else (0, 0)
    lost = any(position[stream] > len(tokens(state, stream)) for stream in range(len(STREAMS)))
    if lost:
        return [replace(state, fault="the client has what clawd does not know")]
    return [replace(state, attached=True, sent=position)]


def crashes(rules: Rules, state: State) -> list[State]:
    """kill -9 of one of them. What was on the wire arrives as far as it pleases."""
    if state.crashes == rules.crashes:
        return []
    cut = [state.wire[:left] for left in range(len(state.wire) + 1)]
    found = []
    for wire in cut:
        # clawd, and its successor: recover from the spool, adopt the ring
        after = replace(state, wire=wire, attached=False, crashes=state.crashes + 1)
        live = [
            stream for stream in range(len(STREAMS)) if state.spool[stream] and kind(state.spool[stream][-1]) != "close"
        ]
        handle = max(live, key=lambda stream: state.spool[stream][0], default=UNSURE if rules.unsure else NONE)
        found.append(replace(after, pos=state.ack, copied=False, handle=handle))
    # the client: what it had in hand is gone, its position is kept by who reads
    found.append(replace(state, wire=(), attached=False, crashes=state.crashes + 1))
    if state.writes:
        found.append(replace(state, writes=False, crashes=state.crashes + 1))
    return found


def evictions(rules: Rules, state: State) -> list[State]:
    if not rules.evicts or state.evictions:
        return []
    return [
        replace(state, evictions=1, evicted=put(state.evicted, stream, state.evicted[stream] + 1))
        for stream in range(len(STREAMS))
        if state.evicted[stream] < len(tokens(state, stream))
    ]


def steps(rules: Rules, state: State) -> list[State]:
    """All but what goes wrong."""
    found = taken(rules, state) + sends(rules, state) + receives(state) + attaches(rules, state)
    if state.writes and state.head < len(SCRIPT):
        found.append(replace(state, head=state.head + 1))  # claw_commit
    return found


def faults(rules: Rules) -> tuple[set[str], int]:
    """What can go wrong, and how many states there are."""
    start = State()
    seen = {start}
    queue = deque([start])
    found = set()
    while queue:
        state = queue.popleft()
        if state.fault:
            found.add(state.fault)
            continue
        following = steps(rules, state)
        if not following:
            published = [at for at in range(state.head) if kind(at) == "token"]
            due = sum(state.has)
            if due != len(published):
                found.add("lost" if due < len(published) else "more than there were")
        for after in (*following, *crashes(rules, state), *evictions(rules, state)):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return found, len(seen)


@pytest.mark.parametrize("evicts", [False, True])
def test_nothing_is_lost_or_doubled(evicts: bool) -> None:
    found, states = faults(Rules(evicts=evicts))
    count(states, "states of the recovery")
    assert not found
    assert states > 10_000


BROKEN_RULES = {
    "ack before commit": (Rules(commit_first=False), "lost"),
    "send before commit": (Rules(send_first=True), "the client has what clawd does not know"),
    "records are not compared": (Rules(compares=False), "another token in its place"),
    "an OPEN is not recognised": (Rules(knows_opens=False), "lost"),
    "handles without a live stream are not open": (Rules(unsure=False), "quarantined"),
    "the client does not say what it has": (Rules(resumes=False), "twice"),
    "no GAP for what was evicted": (Rules(evicts=True, tells_gaps=False), "a hole"),
    "a cursor stays on what was evicted": (Rules(evicts=True, moves_cursor=False), "another token in its place"),
}


@pytest.mark.parametrize(("rules", "fault"), BROKEN_RULES.values(), ids=BROKEN_RULES.keys())
def test_a_broken_rule_is_found(rules: Rules, fault: str) -> None:
    found, _ = faults(rules)
    assert fault in found
    count(1, "mutants caught")
