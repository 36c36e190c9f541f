# SPDX-License-Identifier: Apache-2.0
"""What the spool's memory says by itself: all that a start after a crash will have."""

from __future__ import annotations

from clawd.core import ffi, lib
from rig import Rig


def test_a_block_tells_whose_it_is_and_how_much_of_it_counts() -> None:
    with Rig() as rig:
        ring = rig.ring()
        seq = ring.open(5, "name", b"{}", requested_ns=9)
        ring.write(5, b"text")
        rig.turn()
        block = rig.block(0)
        assert (block.magic, block.layout) == (lib.CLAW_MAGIC, lib.CLAW_LAYOUT)
        assert (block.first_seq, block.open_seq, block.handle, block.requested_ns) == (0, seq, 5, 9)
        assert ffi.buffer(block.name, block.name_len)[:] == b"name"
        assert block.committed == 24 + 8 + 24 + 8 | 1 << lib.CLAW_BLOCK_SEQ_SHIFT
        assert block.incarnation == rig.core.stream_row(0).incarnation
        assert rig.block(1).committed == 0


def test_the_producers_close_keeps_its_place_in_the_ring() -> None:
    with Rig() as rig:
        ring = rig.ring()
        ring.open(0, "s")
        close = ring.close(0, b"stop")
        rig.turn()
        records = lib.CLAW_BLOCK_HEADER
        record = ffi.from_buffer("struct claw_spooled *", memoryview(rig.spool)[records + 24 :])
        assert (record.kind, record.ring_seq) == (lib.CLAW_CLOSE, close)


def test_sequences_that_no_block_holds_any_more_are_not_forgotten() -> None:
    with Rig({"spool_bytes": 2 * 4096, "stream_bytes": 8192}) as rig:
        ring = rig.ring()
        ring.open(0, "a")
        for _ in range(4):
            ring.write(0, bytes(1000))  # the fourth needs a second block
        rig.turn()
        ring.open(1, "b")  # which is evicted for this stream's first
        rig.turn()
        assert rig.block(0).next_seq == 4
        for _ in range(3):
            ring.write(0, bytes(1000))  # dropped: no block is left
        rig.turn()
        assert rig.core.refresh_totals().dropped == 3
        assert rig.block(0).next_seq == 7


def test_a_block_that_was_freed_says_so() -> None:
    with Rig({"keep_ns": 0}) as rig:
        ring = rig.ring()
        ring.open(0, "s")
        ring.write(0, b"secret")
        ring.close(0)
        rig.turn()
        assert rig.block(0).committed > 0
        rig.turn()
        assert rig.block(0).committed == 0
