# SPDX-License-Identifier: Apache-2.0
"""Any order of opens, writes, ends, attaches, acks, credits and evictions, against plain lists: every reader gets each
token once, in order, or a GAP that covers it, and the right end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from classes import CRITICAL, Classes
from clawd.core import lib
from rig import Rig, RingWriter

NAMES = [f"stream-{number}".encode() for number in range(8)]
WORDS = [b"One", b".", b" Two", b"!", b" ", b"3", b"\xe3\x80", b"\x82", b"\xe4\xbd\xa0"]


@dataclass
class Written:
    """What a stream holds in all, by the producer's account."""

    handle: int
    tokens: list[bytes] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    text: Classes = field(default_factory=Classes)
    end: bytes | None = None

    def take(self, data: bytes, urgent: bool) -> None:
        klass = self.text.take(data)
        self.classes.append(CRITICAL if urgent or not self.tokens else klass)
        self.tokens.append(data)


@dataclass
class Got:
    """What a reading was sent, by the reader's account."""

    stream: Written
    expected: int
    cost: int = 0
    gaps: int = 0
    end: bytes | None = None
    incarnation: int | None = None


class CoreMachine(RuleBasedStateMachine):
    rig: Rig
    ring: RingWriter

    @initialize(
        spool_blocks=st.integers(4, 24), stream_blocks=st.integers(2, 6), ring_bytes=st.sampled_from([4096, 16384])
    )
    def start(self, spool_blocks: int, stream_blocks: int, ring_bytes: int) -> None:
        self.rig = Rig({"spool_bytes": spool_blocks * 4096, "stream_bytes": stream_blocks * 4096, "max_streams": 12})
        self.ring = self.rig.ring(ring_bytes)
        self.client = self.rig.core.connect()
        self.streams: dict[bytes, Written] = {}
        self.readings: dict[int, Got] = {}
        self.next_id = 1
        self.next_handle = 0

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()

    def now_ns(self) -> int | None:
        """None: as of now."""
        return None

    def has_room(self, size: int) -> bool:
        return self.ring.head - int(self.ring.ctl.ack_pos) + size + 64 <= self.ring.ring_bytes

    def writable(self, name: bytes) -> Written | None:
        """The stream of this name, else any: most names are not open, and a step should do something."""
        live = {name: stream for name, stream in self.streams.items() if stream.end is None}
        return live.get(name) or next(iter(live.values()), None)

    @rule(name=st.sampled_from(NAMES))
    def open(self, name: bytes) -> None:
        if name in self.streams or not self.has_room(64):
            return
        handle = self.next_handle = (self.next_handle + 1) % lib.CLAW_HANDLE_COUNT
        self.ring.open(handle, name, b"{}")
        self.turn()
        if self.ring.stopped(handle)[1]:  # no space, or the name is still kept
            self.ring.close(handle)
            return
        self.streams[name] = Written(handle)

    @rule(name=st.sampled_from(NAMES), size=st.sampled_from([0, 1, 7, 100, 900, 1024]), urgent=st.booleans())
    def write(self, name: bytes, size: int, urgent: bool) -> None:
        stream = self.writable(name)
        if stream is None or not self.has_room(size):
            return
        data = bytes((len(stream.tokens) + i) % 251 for i in range(size))
        self.ring.write(stream.handle, data, urgent=urgent)
        stream.take(data, urgent)

    @rule(name=st.sampled_from(NAMES), words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=6))
    def say(self, name: bytes, words: list[bytes]) -> None:
        stream = self.writable(name)
        if stream is None or not self.has_room(64 * len(words)):
            return
        for word in words:
            self.ring.write(stream.handle, word)
            stream.take(word, False)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 9))
    def fill(self, name: bytes, count: int) -> None:
        """Blocks' worth of tokens: what is evicted is mostly this."""
        for _ in range(count):
            self.write(name, 900, False)
            self.turn()

    @rule(name=st.sampled_from(NAMES), reason=st.sampled_from([b"stop", b"length"]))
    def close(self, name: bytes, reason: bytes) -> None:
        stream = self.streams.get(name)
        if stream is None or stream.end is not None or not self.has_room(32):
            return
        self.ring.close(stream.handle, reason)
        stream.end = reason

    @rule(name=st.sampled_from(NAMES), back=st.integers(0, 5), credit=st.sampled_from([1, 300, 1 << 20]))
    def attach(self, name: bytes, back: int, credit: int) -> None:
        self.turn()  # what is written is committed
        stream = self.streams.get(name)
        if stream is None:
            return
        after = max(-1, len(stream.tokens) - 1 - back) if back else -1
        id, self.next_id = self.next_id, self.next_id + 1
        result = self.rig.core.attach(self.client, id, name, after=after, credit=credit)
        if result == 0:
            self.readings[id] = Got(stream, after + 1)
        else:  # evicted as a whole: only an ended stream can be
            assert stream.end is not None
            del self.streams[name]

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        if self.readings:
            id = data.draw(st.sampled_from(sorted(self.readings)))
            self.rig.core.detach(self.client, id)
            del self.readings[id]

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name: bytes) -> None:
        self.turn()
        for id, got in self.readings.items():
            if got.stream is self.streams.get(name) and got.end is None:
                if got.stream.end is None:
                    got.stream.end = b"cancelled"
                    self.ring.close(got.stream.handle)
                self.rig.core.cancel(self.client, id)
                return

    @rule(stream_blocks=st.integers(2, 6))
    def limit(self, stream_blocks: int) -> None:
        """What may be evicted changes, and nothing else."""
        self.rig.core.limit(stream_bytes=stream_blocks * 4096, keep_ns=10**12)

    @rule(grant=st.booleans())
    def ack(self, grant: bool) -> None:
        credits = {id: got.cost + 500 for id, got in self.readings.items()} if grant else {}
        assert self.rig.ack(self.client, self.rig.charged.get(self.client, 0), credits)

    @rule()
    def turn(self) -> None:
        for item in self.rig.turn(self.now_ns()):
            got = self.readings.get(item.attachment)
            if got is None:
                continue
            got.cost += item.cost
            got.incarnation = item.incarnation
            assert got.end is None, "nothing comes after the end"
            if item.kind == lib.CLAW_TOKEN:
                assert item.seq == got.expected
                assert item.data == got.stream.tokens[item.seq]
                # CRITICAL is a stream's first that was stored
                assert item.klass in (CRITICAL, got.stream.classes[item.seq])
                got.expected += 1
            elif item.kind == lib.CLAW_GAP:
                assert item.seq == got.expected
                got.expected += item.count
                got.gaps += item.count
            elif item.kind == lib.CLAW_CLOSE:
                assert got.expected == len(got.stream.tokens)
                assert item.data == got.stream.end
                got.end = item.data

    @rule()
    def settle(self) -> None:
        """Everybody acks and grants until nothing comes: then everybody has everything."""
        silent = 0  # two in a row: what the last grant allowed came in between
        while silent < 2 or self.ring.head != self.ring.ctl.ack_pos:
            before = self.rig.charged.get(self.client, 0)
            self.turn()
            self.ack(True)
            silent = silent + 1 if self.rig.charged.get(self.client, 0) == before else 0
        for got in self.readings.values():
            assert got.expected == len(got.stream.tokens)
            assert got.end == got.stream.end

    @invariant()
    def nothing_breaks(self) -> None:
        if hasattr(self, "rig"):
            totals = self.rig.core.refresh_totals()
            assert totals.quarantined == 0
            assert totals.spool_free <= totals.spool_blocks


CoreMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("CLAWD_TEST_EXAMPLES", "120")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
test_readers_get_everything_whatever_the_order = CoreMachine.TestCase
