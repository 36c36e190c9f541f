# SPDX-License-Identifier: Apache-2.0
"""The sleep handshake and the re-attach, every interleaving of them, on processors that delay stores (x86's TSO): clawd
never sleeps for ever with a token published. Steps are named after the C that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from counts import count

pytestmark = pytest.mark.plain

Store = tuple[str, int]
POLLS = 2
"""How often a successor polls at most: without a bound there is no end of generations."""


@dataclass(frozen=True)
class Rules:
    """The protocol; each mutant breaks one rule."""

    tokens: int = 3
    producer_fence: bool = True  # claw_wake
    clawd_fence: bool = True  # claw_wait
    generation: bool = True  # claw_drain_awake, claw_drain_sleep
    remembers: bool = True  # claw_wake: one signal a generation
    restart: bool = False  # clawd dies at any moment, and a successor takes the ring over
    kick: bool = True  # re-attach signals once, unconditionally
    continues: bool = True  # a successor goes on with the generations of its predecessor
    polls: bool = True  # a successor polls until its producer has attached again: sooner, but not what makes it safe


class State(NamedTuple):
    # shared memory
    head: int = 0
    need_wake: int = 0
    # what a processor has stored and nobody else sees yet, oldest first
    producer_buffer: tuple[Store, ...] = ()
    clawd_buffer: tuple[Store, ...] = ()
    # the producer: claw_commit, claw_wake
    producer_at: str = "store_head"
    written: int = 0
    seen: int = 0
    signalled: int = 0
    # clawd: claw_wait, claw_turn
    clawd_at: str = "sleep"
    pos: int = 0
    wake: int = 0
    # descriptors: the producer's may still be the dead clawd's; epoll reports an edge once
    edge: bool = False
    producer_has: int = 0
    clawd_has: int = 0
    # the producer's thread that attaches again
    attach_at: str = "no"
    polled: int = 0


def replace(state: State, **changes: object) -> State:
    return state._replace(**changes)  # type: ignore[arg-type]


def flushes(state: State) -> list[State]:
    """The oldest store of a processor reaches memory."""
    found = []
    if state.producer_buffer:
        (word, value), *rest = state.producer_buffer
        found.append(replace(state, producer_buffer=tuple(rest), **{word: value}))
    if state.clawd_buffer:
        (word, value), *rest = state.clawd_buffer
        found.append(replace(state, clawd_buffer=tuple(rest), **{word: value}))
    return found


def signal(state: State) -> bool:
    """write() to the eventfd that the producer's descriptor stands for; a dead clawd's wakes nobody."""
    return state.edge or state.producer_has == state.clawd_has


def producer(rules: Rules, state: State) -> list[State]:
    if state.producer_at == "store_head":  # claw_commit: claw_store_release(&data->head)
        if state.written == rules.tokens:
            return []
        store = ("head", state.written + 1)
        return [
            replace(
                state,
                written=state.written + 1,
                producer_buffer=(*state.producer_buffer, store),
                producer_at="fence" if rules.producer_fence else "load_need_wake",
            )
        ]
    if state.producer_at == "fence":  # claw_wake: claw_fence_full
        return [] if state.producer_buffer else [replace(state, producer_at="load_need_wake")]
    if state.producer_at == "load_need_wake":  # claw_wake: claw_load_relaxed(&ctl->need_wake)
        seen = state.need_wake
        # `signalled` of a flag is forgotten when the producer happens to see clawd awake
        forgotten = 0 if not rules.generation and not seen else state.signalled
        due = seen & 1 and (not rules.remembers or seen != state.signalled)
        return [replace(state, seen=seen, signalled=forgotten, producer_at="signal" if due else "store_head")]
    # claw_wake: write(event_fd), once for each odd generation
    return [replace(state, edge=signal(state), signalled=state.seen, producer_at="store_head")]


def clawd(rules: Rules, state: State) -> list[State]:
    def store(value: int, at: str) -> State:
        return replace(state, wake=value, clawd_buffer=(*state.clawd_buffer, ("need_wake", value)), clawd_at=at)

    if state.clawd_at == "sleep":  # claw_wait: claw_drain_sleep
        return [store(state.wake | 1, "fence" if rules.clawd_fence else "look")]
    if state.clawd_at == "fence":  # claw_wait: claw_fence_full
        return [] if state.clawd_buffer else [replace(state, clawd_at="look")]
    if state.clawd_at == "look":  # claw_wait: any_data, claw_drain_has_data
        return [replace(state, clawd_at="peek" if state.head != state.pos else "epoll")]
    if state.clawd_at == "peek":  # claw_wait: epoll_pwait2 with a timeout of 0 takes an edge too
        return [replace(state, edge=False, clawd_at="awake")]
    if state.clawd_at == "epoll":  # claw_wait: epoll_pwait2
        attaching = state.clawd_has > 0 and state.attach_at in ("no", "wanted")
        if state.edge:
            return [replace(state, edge=False, clawd_at="awake")]
        if attaching and rules.polls and state.polled < POLLS:
            return [replace(state, clawd_at="awake", polled=state.polled + 1)]
        return []
    if state.clawd_at == "awake":  # claw_wait: claw_drain_awake
        if not state.wake & 1:
            return [replace(state, clawd_at="take")]
        return [store(state.wake + 1 if rules.generation else 0, "take")]
    # claw_turn: claw_intake takes all up to head
    return [replace(state, pos=state.head, clawd_at="sleep")]


def restart(rules: Rules, state: State) -> list[State]:
    """SIGKILL at any moment, once. What clawd has stored reaches memory; its eventfd is gone with it."""
    if not rules.restart or state.clawd_has or state.clawd_buffer:
        return []
    wake = state.need_wake + (state.need_wake & 1) if rules.continues else 0
    return [replace(state, clawd_has=1, edge=False, wake=wake, clawd_at="take", attach_at="wanted")]


def attach(rules: Rules, state: State) -> list[State]:
    """The producer notices the new daemon_epoch and attaches, beside its writes."""
    if state.attach_at == "wanted":  # clawd has registered the new eventfd and answered: from now on it sleeps
        return [replace(state, attach_at="answered")]
    if state.attach_at == "answered":  # dup2 over the old descriptor
        return [replace(state, attach_at="kick" if rules.kick else "done", producer_has=1)]
    if state.attach_at == "kick":
        return [replace(state, attach_at="done", edge=signal(state))]
    return []


def explore(rules: Rules) -> tuple[int, State | None]:
    """(states seen, a state in which clawd sleeps for ever beside a token)."""
    start = State()
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        steps = [*producer(rules, state), *clawd(rules, state), *restart(rules, state), *attach(rules, state)]
        steps += flushes(state)
        if not [step for step in steps if step != state and not _only_dies(state, step)] and state.pos != state.written:
            return len(seen), state
        for step in steps:
            if step not in seen:
                seen.add(step)
                todo.append(step)
    return len(seen), None


def _only_dies(before: State, after: State) -> bool:
    """A clawd that sleeps may die, but that must not be what rescues the token."""
    return before.clawd_has != after.clawd_has


def test_clawd_never_sleeps_beside_a_token() -> None:
    states, stuck = explore(Rules(tokens=5))
    assert stuck is None, stuck
    count(states, "states of the handshake")


def test_one_signal_is_enough_for_a_sleep() -> None:
    # what claw_wake saves by remembering is system calls, not wake-ups
    states, stuck = explore(Rules(tokens=4, remembers=False))
    assert stuck is None, stuck
    count(states, "states of the handshake")


@pytest.mark.parametrize("polls", [True, False])
def test_a_token_written_around_a_restart_wakes_the_new_clawd(polls: bool) -> None:
    states, stuck = explore(Rules(restart=True, polls=polls))
    assert stuck is None, stuck
    count(states, "states of the handshake")


MUTANTS = {
    "no fence in claw_wake": Rules(producer_fence=False),
    "no fence in claw_wait": Rules(clawd_fence=False),
    "no fence at all": Rules(producer_fence=False, clawd_fence=False),
    "a flag instead of a generation": Rules(generation=False),
    "re-attach without the kick": Rules(restart=True, kick=False),
    "a successor starts its generations over": Rules(restart=True, continues=False),
}


@pytest.mark.parametrize("rules", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_broken_rule_is_found(rules: Rules) -> None:
    _, stuck = explore(rules)
    assert stuck is not None
    assert stuck.clawd_at == "epoll"
    count(1, "mutants caught")
