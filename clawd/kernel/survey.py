# SPDX-License-Identifier: Apache-2.0
"""What a profile asks for beside what is: one row a place, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clawd.errors import HostError
from clawd.kernel import boost, origin, sched, tc, weight
from clawd.kernel.change import (
    DIFFERS,
    NOT_HERE,
    OK,
    Change,
    Lever,
    Place,
    Row,
    Trouble,
)
from clawd.kernel.knobs import KNOBS
from clawd.kernel.netns import Namespace
from clawd.kernel.profile import Profile, Wish
from clawd.kernel.sysctl import KIND as SYSCTL
from clawd.kernel.sysctl import Sysctls

Levers = Mapping[str, Lever]


def levers(directory: Path) -> dict[str, Lever]:
    """`directory` of the journals: a weight that is flipped now counts as what it goes back to."""
    weights = weight.Weights(resting=boost.resting(directory))
    return {SYSCTL: Sysctls(), tc.KIND: tc.Queues(), sched.KIND: sched.Slices(), weight.KIND: weights}


def survey(
    profile: Profile,
    pulls: Levers,
    namespace: Namespace,
    *,
    devices: Sequence[str] = (),
    pids: Sequence[int] = (),
    host: bool = True,
    root: Path = Path("/"),
) -> list[Row]:
    """`devices` instead of those with a default route; `pids` are clawd's processes; `host`: what is of no network
    namespace, too. Raises HostError for a device that there is not.
    """
    lines = origin.boot_lines(root)
    rows: list[Row] = []
    for wish in profile.wishes:
        if wish.kind == SYSCTL:
            rows.append(_sysctl(wish, pulls[SYSCTL], namespace, lines))
        elif wish.kind == tc.KIND:
            rows += _queues(wish, pulls[tc.KIND], namespace, devices, root)
        elif host:
            rows += (
                _slices(wish, pulls[sched.KIND], pids)
                if wish.kind == sched.KIND
                else [_weight(wish, pulls[weight.KIND])]
            )
    return rows


def _compared(bare: Row, lever: Lever, live: str, wanted: str, *, is_disruptive: bool = False) -> Row:
    if live == wanted:
        return replace(bare, wanted=wanted, live=live, state=OK)
    change = Change(
        bare.place,
        live,
        wanted,
        tuple(lever.operations(bare.place, live, wanted)),
        tuple(lever.operations(bare.place, wanted, live)),
        is_disruptive,
    )
    return replace(bare, wanted=wanted, live=live, state=DIFFERS, change=change)


def _sysctl(wish: Wish, lever: Lever, namespace: Namespace, lines: list[origin.Line]) -> Row:
    knob = KNOBS[wish.name]

    def look(key: str) -> str:
        try:
            return lever.read(Place(SYSCTL, key))
        except Trouble:
            return ""

    won = origin.winner(lines, wish.name)
    place = Place(SYSCTL, wish.name, namespace.cookie)
    bare = Row(
        place,
        wish.value,
        None,
        NOT_HERE,
        takes=knob.takes,
        moot=knob.moot(look),
        boot=f"{won.value} by {won}" if won else "",
        reason=wish.reason,
    )
    try:
        live = lever.read(place)
        return _compared(bare, lever, live, knob.aim(live, wish.value))
    except Trouble as error:
        return replace(bare, why=str(error))
    except ValueError:
        return replace(bare, live=live, why="it holds what is no number")


def _queues(wish: Wish, lever: Lever, namespace: Namespace, devices: Sequence[str], root: Path) -> Iterator[Row]:
    kind = wish.value.split()[0]
    place = Place(tc.KIND, "*", namespace.cookie)
    bare = Row(place, wish.value, None, NOT_HERE, takes="all packets", scope="device", reason=wish.reason)
    names = devices or tc.route_devices()
    if not names:
        yield replace(bare, why="no device carries a default route; name one with --device")
    for name in names:
        bare = replace(bare, place=replace(place, name=name))
        try:
            device = tc.find_device(name)
            if device is None:
                raise HostError(f'there is no device "{name}" in this network namespace', "see: ip link")
            bare = replace(bare, place=replace(bare.place, identity=device.identity))
            yield _queue(bare, lever, lever.read(bare.place), kind, root)
        except Trouble as error:
            yield replace(bare, why=str(error))


def _queue(bare: Row, lever: Lever, live: str, kind: str, root: Path) -> Row:
    if _serves(live, kind):
        return replace(bare, wanted=live, live=live, state=OK)
    why = _unfit(live, kind, root)
    if why:
        return replace(bare, live=live, why=why)
    is_multi = live.startswith(("default mq", "mq "))
    return _compared(bare, lever, live, f"mq {bare.wanted}" if is_multi else bare.wanted or "", is_disruptive=True)


def _serves(live: str, kind: str) -> bool:
    """Whether each queue is of that kind already, whoever made it."""
    words = live.split()
    if words[0] == "foreign":
        words = words[1:-1]
    elif words[0] == "default":
        words = words[1:]
    return kind != "htb" and words in ([kind], ["mq", kind])


def _unfit(live: str, kind: str, root: Path) -> str:
    if live.startswith("foreign "):
        return f"its root queue, {live.removeprefix('foreign ')}, is somebody else's and stays"
    if live == "default noqueue" and kind != "htb":
        return "it has no queue of its own: the device below it has"
    if kind == "htb" and live.startswith(("default mq", "mq ")):
        return "it has several queues, which one htb would hold up: use fq"
    # pfifo is of the kernel itself
    if kind != "pfifo" and not tc.has_scheduler(kind, root):
        return f"the kernel has no sch_{kind}" + ("; TCP paces by itself without" if kind == "fq" else "")
    return ""


def _slices(wish: Wish, lever: Lever, pids: Sequence[int]) -> Iterator[Row]:
    rival = sched.scheduler()
    bare = Row(
        Place(sched.KIND, "clawd"),
        wish.value,
        None,
        NOT_HERE,
        takes="its next turn",
        scope="thread",
        moot=f"the scheduler {rival} decides, not EEVDF" if rival else "",
        reason=wish.reason,
    )
    if not pids:
        yield replace(bare, why="no clawd runs; with [kernel] tune = on it takes its slice by itself")
    for pid in pids:
        try:
            for place in sched.threads(pid):
                yield _one(replace(bare, place=place), lever)
        except Trouble as error:
            yield replace(bare, place=Place(sched.KIND, str(pid)), why=str(error))


def _weight(wish: Wish, lever: Lever) -> Row:
    rival = sched.scheduler()
    bare = Row(
        Place(weight.KIND, wish.name),
        wish.value,
        None,
        NOT_HERE,
        takes="at once",
        scope="host",
        moot=f"the scheduler {rival} may not heed weights" if rival else "",
        reason=wish.reason,
    )
    return _one(bare, lever)


def _one(bare: Row, lever: Lever) -> Row:
    try:
        return _compared(bare, lever, lever.read(bare.place), bare.wanted or "")
    except Trouble as error:
        return replace(bare, why=str(error))
