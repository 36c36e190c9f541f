# SPDX-License-Identifier: Apache-2.0
"""The start after a crash, or a stop: what an earlier clawd of this instance left is found, checked and taken over."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from clawd import log
from clawd.core import Core, Label, ffi, lib
from clawd.errors import CoreError
from clawd.page import stats_name
from clawd.server import memory
from clawd.server.instance import Instance
from clawd.server.memory import Object, Unfit
from clawd.server.ring import Owner, Ring, refuse

LOOK_NS = 1_000_000_000
"""How often it is looked whether the owner of a ring that was not attached again still lives."""


@dataclass
class Pair:
    """A ring's two objects, and the first page of CTL as it was found."""

    data: Object
    ctl: Object
    words: Any

    def remove(self, reason: str) -> None:
        for each in (self.data, self.ctl):
            each.close()
            memory.remove_left(each.name, reason)


@dataclass
class Left:
    """What is to be taken over. Nothing of it is mapped yet."""

    spool: list[Object] = field(default_factory=list)
    """In the order of their numbers."""
    rings: list[Pair] = field(default_factory=list)
    next_number: int = 0
    """Of the next object of the spool."""

    @property
    def spool_bytes(self) -> int:
        return sum(part.size for part in self.spool)


def find(instance: Instance) -> Left:
    """Open what was left and is fit for use, and remove the rest. Another instance's objects are not looked at."""
    left = Left()
    halves: dict[str, dict[str, Object]] = {}
    for name in memory.left_behind(instance.id):
        kind = name.removeprefix(f"/{memory.prefix(instance.id)}")
        part = re.fullmatch(r"spool-(\d{1,9})|([0-9a-f]{16})-(data|ctl)", kind)
        if part and part[1]:
            left.next_number = max(left.next_number, int(part[1]) + 1)
        try:
            if name == f"/{stats_name(instance.id)}":
                memory.Object(name, -1, 0).unlink()  # a new one is made at each start
            elif not part or instance.is_new:
                raise Unfit("of another boot" if instance.is_new else "not a name of this version")
            elif part[1]:
                left.spool.append(_spool_part(name))
            else:
                halves.setdefault(part[2], {})[part[3]] = memory.open_left(name)
        except Unfit as error:
            memory.remove_left(name, str(error))
    left.spool.sort(key=lambda part: int(part.name.rpartition("-")[2]))
    for half in halves.values():
        pair = _pair(half, instance.boot_id)
        if pair:
            left.rings.append(pair)
    return left


def _spool_part(name: str) -> Object:
    part = memory.open_left(name)
    if part.size == 0 or part.size % lib.CLAW_BLOCK_BYTES:
        part.close()
        raise Unfit(f"{part.size} bytes")
    return part


def _pair(half: dict[str, Object], boot_id: bytes) -> Pair | None:
    """The ring whose objects these are; None when it is of no use, and then they are gone."""
    try:
        if len(half) != 2:
            raise Unfit("its other half is missing")
        words = ffi.new("struct claw_ctl *")
        page = os.pread(half["ctl"].fd, lib.CLAW_PAGE, 0)
        ffi.memmove(words, page, len(page))
        if words.magic != lib.CLAW_MAGIC or words.size != half["ctl"].size or len(page) < lib.CLAW_PAGE:
            raise Unfit("not a ring")
        if bytes(ffi.buffer(words.boot_id)) != boot_id.ljust(16, b"\0"):
            raise Unfit("of another boot")
        if half["data"].size != lib.CLAW_PAGE + words.ring_bytes:
            raise Unfit(f"{half['data'].size} bytes for a ring of {words.ring_bytes}")
    except Unfit as error:
        for each in half.values():
            each.close()
            memory.remove_left(each.name, str(error))
        return None
    return Pair(half["data"], half["ctl"], words)


def recover(core: Core, left: Left, epoch: int) -> Adopted:
    """Streams again from the mapped spool, and rings into the core. Streams whose ring is no more end."""
    began_ns = time.monotonic_ns()
    found = core.recover()
    for part in left.spool:
        part.close()
    rings = [ring for pair in left.rings if (ring := _adopt(core, pair, epoch))]
    lost = core.end_orphans(0, "producer_lost")
    if left.spool or left.rings:
        took_ms = (time.monotonic_ns() - began_ns) // 1_000_000
        streams = {"streams": found.live, "ended": found.ended, "lost": lost}
        log.event("recovered", **streams, blocks=found.blocks, rings=len(rings), ms=took_ms)
    if found.damaged or found.beyond:
        log.warning("spool not whole", damaged_blocks=found.damaged, streams_beyond_max=found.beyond)
    return Adopted(core, rings)


def _adopt(core: Core, pair: Pair, epoch: int) -> Ring | None:
    words = pair.words
    label = bytes(ffi.buffer(words.producer_name)).split(b"\0", 1)[0].decode(errors="replace")
    owner = Owner(label, int(words.producer_pid), int(words.producer_uid))
    ring_id = int(words.ring_id)
    reason = ""
    if words.layout != lib.CLAW_LAYOUT or words.incompatible:
        reason = "error:layout"
    elif words.state == lib.CLAW_STATE_QUARANTINED:
        reason = "error:quarantined"
    elif words.state != lib.CLAW_STATE_OPEN:
        reason = "producer_lost"
    else:
        try:
            index = core.adopt_ring(pair.data.fd, pair.ctl.fd, int(words.ring_bytes), ring_id, epoch)
        except CoreError as error:
            log.warning("ring not taken over", producer=label, pid=owner.pid, error=error)
            reason = "producer_lost"
    if reason:
        core.end_orphans(ring_id, reason)
        if words.state != lib.CLAW_STATE_QUARANTINED:
            close_ring(pair.ctl.fd)
        pair.remove(reason)
        return None
    core.label_ring(index, Label(label, owner.pid, owner.uid, lib.CLAW_ROLE_PRODUCER))
    return Ring(index, int(words.ring_bytes), ring_id, epoch, pair.data, pair.ctl, owner)


class Adopted:
    """Rings that were taken over, until their producers attach them again or are found dead."""

    def __init__(self, core: Core, rings: Iterable[Ring]) -> None:
        self._core = core
        self.rings = list(rings)
        self._waiting = {ring.ring_id: ring for ring in self.rings}
        self._next_ns = 0

    def look(self) -> None:
        """Once a second: whose owner is dead is drained, and its streams end."""
        if not self._waiting or time.monotonic_ns() < self._next_ns:
            return
        self._next_ns = time.monotonic_ns() + LOOK_NS
        for ring in list(self._waiting.values()):
            try:
                # Its mapping holds the lock as long as it lives, whatever became of its connection
                fcntl.flock(ring.data.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            self.forget(ring)
            self._core.leave_ring(ring.index)

    def take(self, ring_id: int, ring_bytes: int, uid: int) -> Ring:
        """The ring that a producer attaches again. Raises AttachRefused."""
        ring = self._waiting.get(ring_id)
        if not ring or ring.ring_bytes != ring_bytes:
            raise refuse("lost", "this ring is not known here; attach a new one")
        if ring.owner.uid != uid:
            raise refuse("denied", "this ring is of another user; attach a new one")
        ring.hear(self._core)
        self.forget(ring)
        return ring

    def forget(self, ring: Ring) -> None:
        """It is not waited for (any more)."""
        if self._waiting.pop(ring.ring_id, None):
            ring.data.close()
            ring.ctl.close()


def close_ring(ctl_fd: int) -> None:
    """Tell the producer that its ring is read no more: its next write raises RingLost."""
    os.pwrite(ctl_fd, int(lib.CLAW_STATE_CLOSED).to_bytes(4, "little"), ffi.offsetof("struct claw_ctl", "state"))


def discard(instance: str, owner: int | None = None) -> int:
    """Give up all that clawd, run by us or by `owner`, left: rings are closed, objects removed. Returns how many.

    Only with the lock of the instance's directory.
    """
    for name in memory.left_behind(instance):
        if name.endswith("-ctl"):
            try:
                ctl = memory.open_left(name, owner)
            except Unfit:
                continue
            close_ring(ctl.fd)
            ctl.close()
    return memory.sweep(instance, owner)


def make_spool(core: Core, instance: Instance, left: Left, size: int, part_bytes: int) -> None:
    """Map what was left, and allocate the rest of `size` bytes in parts of at most `part_bytes`. Raises HostError."""
    for part in left.spool:
        core.map_spool(part.fd, part.size)
    rest = size - left.spool_bytes
    number = left.next_number
    while rest > 0:
        try:
            part = memory.create(f"/{memory.prefix(instance.id)}spool-{number}", min(rest, part_bytes))
        except memory.NameTaken:
            number += 1  # by another user, who cannot make us start without a spool
            continue
        core.map_spool(part.fd, part.size)
        part.close()
        rest -= part.size
        number += 1
