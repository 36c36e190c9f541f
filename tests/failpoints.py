# SPDX-License-Identifier: Apache-2.0
"""A core killed at one of its failpoints, at every pass of it, and the next one on what it left. Run with a core that
has failpoints, as test_failpoints.py does. The killed one and the next are forks: a core asks once what it fails at.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from clawd.consumer import Gap
from clawd.core import ffi, lib
from history import End, Got, History, Put, Seen
from rig import CREDIT, Item, Rig

LONG = 1500
"""Bytes of a token of which two fit a block."""
PLAIN = ["copied", "committed", "acked", "sent"]


def script(long: bool) -> list[tuple[str, int, bytes]]:
    """(what, handle, payload) of a few streams, whose handles are used again."""
    text = [b"Hello", b" world.", b" Next", b" one!", b" And", b" more"]
    if long:
        text = [part.ljust(LONG, b"x") for part in text] * 2
    first = [("open", 0, b"a"), *(("write", 0, part) for part in text[:3]), ("open", 1, b"b")]
    mixed = [("write", number % 2, part) for number, part in enumerate(text)]
    again = [
        ("close", 0, b"length"),
        ("open", 0, b"c"),
        *(("write", number % 2, part) for number, part in enumerate(text)),
    ]
    return [*first, *mixed, *again, ("close", 1, b"stop")]


def history_of(steps: list[tuple[str, int, bytes]]) -> History:
    history = History()
    names: dict[int, str] = {}
    for what, handle, payload in steps:
        if what == "open":
            names[handle] = payload.decode()
            history.put(names[handle])
        elif what == "write":
            history.put(names[handle], Put(payload))
        else:
            history.end(names[handle], payload.decode())
    return history


def forked(body: Callable[[], None]) -> int:
    """The wait status of a fork that does `body`."""
    pid = os.fork()
    if not pid:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def attach(rig: Rig, name: str, id: int, got: Got, incarnation: int | None = None) -> int:
    number = rig.core.connect()
    found = rig.core.attach(
        number, id, name.encode(), after=got.after, incarnation=incarnation, credit=CREDIT, deadline_ns=1 << 62
    )
    assert found >= 0, f"attach to {name} after {got.after}: {found}"
    return number


def live(rig: Rig, steps: list[tuple[str, int, bytes]], told: int) -> None:
    """What is killed: each record by itself, with a reader that waited for each stream. It says what it has."""
    for id, name in enumerate("abc", 1):
        attach(rig, name, id, Got(name, "first"))
    ring = rig.writers[0]
    for what, handle, payload in steps:
        getattr(ring, what)(handle, payload)
        for item in rig.turn():
            os.write(told, b"%d %d %d %d\n" % (item.attachment, item.kind, item.seq, item.incarnation))
        for frame in rig.frames:
            rig.core.sent(frame, time.monotonic_ns())
        for number, total in rig.charged.items():
            rig.ack(number, total)


def take(got: Got, item: Item) -> None:
    if item.kind == lib.CLAW_TOKEN:
        got.text.append(item.data.decode())
        got.events.append(Seen(item.seq, item.data, item.klass, item.count))
    elif item.kind == lib.CLAW_CLOSE:
        got.events.append(End(item.data.decode()))
    elif item.kind == lib.CLAW_GAP:
        got.events.append(Gap(item.seq, item.seq + item.count - 1, item.data.decode()))


def finish(rig: Rig, steps: list[tuple[str, int, bytes]], told: str, gaps: bool) -> None:
    """The next core, and the producer that goes on: every reader, new or resumed, has all of it."""
    found = rig.restart()
    assert not found.damaged
    ring = rig.writers[0]
    for what, handle, payload in steps[ring.seq - 1 :]:
        getattr(ring, what)(handle, payload)
    rig.turns()
    assert not rig.core.ring_row(ring.index).violation
    history = history_of(steps)
    last: dict[int, tuple[int, int]] = {}
    for line in told.splitlines():
        id, kind, seq, incarnation = map(int, line.split())
        if kind == lib.CLAW_TOKEN:
            last[id] = (seq, incarnation)
    readings: dict[int, Got] = {}
    for id, name in enumerate("abc", 1):
        readings[id] = history.reading(name, "new")
        attach(rig, name, id, readings[id])
        if id in last:
            after, incarnation = last[id]
            readings[10 + id] = history.reading(name, "resumed", after)
            attach(rig, name, 10 + id, readings[10 + id], incarnation)
    for item in rig.turns():
        take(readings[item.attachment], item)
    history.check(gaps=gaps)


def kill_everywhere(point: str, long: bool) -> int:
    """How many times it was killed."""
    steps = script(long)
    limits = {"stream_bytes": 2 * 4096} if long else {}
    for number in range(1, 1000):
        with Rig(limits) as rig:
            ring = rig.ring()
            reading, telling = os.pipe()

            def killed(rig: Rig = rig, number: int = number, telling: int = telling) -> None:
                os.environ["CLAWD_FAILPOINT"] = f"{point}:{number}"
                live(rig, steps, telling)

            status = forked(killed)
            os.close(telling)
            with open(reading) as file:
                told = file.read()
            if status == 0:
                return number - 1
            assert os.WIFSIGNALED(status), f"{point}:{number}: {status}"
            assert os.WTERMSIG(status) == signal.SIGKILL
            # Its producer knows how far it came: what the killed fork published is in the ring
            ring.head = int.from_bytes(ring.data[128:136], "little")
            ring.seq = count_records(ring.data, ring.head) + 1
            status = forked(lambda rig=rig, told=told: finish(rig, steps, told, long))  # type: ignore[misc]
            assert status == 0, f"after {point}:{number}"
    raise AssertionError("it never ended")


def count_records(data: bytes, head: int) -> int:
    """The ring is longer than all of the script, so that its records are still there."""
    count = at = 0
    while at < head:
        record = ffi.from_buffer("struct claw_record *", memoryview(data)[lib.CLAW_PAGE + at :])
        at += -(-(32 + record.len) // 32) * 32
        ffi.release(record)
        count += 1
    return count


if __name__ == "__main__":
    sys.stdout.write("".join(f"{point} {kill_everywhere(point, False)}\n" for point in PLAIN))
    sys.stdout.write("".join(f"{point} {kill_everywhere(point, True)}\n" for point in (*PLAIN, "trimmed")))
