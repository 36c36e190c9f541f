# SPDX-License-Identifier: Apache-2.0
"""Spool and ring as each layout that was released left them: every later clawd takes them over. `python
tests/test_golden.py` writes those of the layout that is built, when that is new; what is in tests/golden stays.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from clawd.core import lib
from rig import Rig, read, rewind, row, told, write_some

GOLDEN = Path(__file__).resolve().parent / "golden"
LIMITS = {"spool_bytes": 8 * 4096, "stream_bytes": 3 * 4096, "keep_ns": 1 << 62}  # whatever the clock there was


def leave(rig: Rig) -> None:
    """A live stream of which a block is evicted, one that ended, one that was cancelled, a refused OPEN; and records
    that were committed but not given back, then some that nobody took.
    """
    ring = rig.ring(16384)
    ring.open(0, "live", b'{"model": "m"}', requested_ns=5)
    for i in range(5):
        write_some(ring, 0, 3 * i, 3, size=1100)
        rig.turns()
    ring.open(1, "ended")
    ring.write(1, b"some ")
    ring.put(lib.CLAW_GAP, 1, b"overflow", count=4)
    ring.write(1, b"text", urgent=True)
    ring.close(1, b"length")
    ring.open(2, "cancelled")
    ring.open(3, "live")
    rig.turns()
    rig.core.cancel_stream(b"cancelled")
    given = int(ring.ctl.ack_pos)
    ring.open(1, "late")
    ring.write(1, "späť 名字".encode())
    rig.turns()
    ring.write(0, b"left")
    ring.close(2)
    ring.open(2, "last")
    rewind(ring, given)


def pack(rig: Rig) -> str:
    ring = rig.writers[0]
    parts = {"spool": rig.spool, "data": ring.data, "ctl": ring.ctl_map}
    packed = {name: base64.b85encode(zlib.compress(bytes(part), 9)).decode() for name, part in parts.items()}
    return json.dumps({"layout": lib.CLAW_LAYOUT, "head": ring.head, "next_seq": ring.seq, **packed}, indent=1) + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_what_a_released_layout_left_is_taken_over(path: Path) -> None:
    left = json.loads(path.read_text())
    with Rig(LIMITS) as rig:
        ring = rig.ring(16384)
        for name, view in (("spool", rig.spool), ("data", ring.data), ("ctl", ring.ctl_map)):
            data = zlib.decompress(base64.b85decode(left[name]))
            assert len(data) <= len(view)
            view[: len(data)] = data
        ring.head, ring.seq = left["head"], left["next_seq"]
        assert ring.ctl.layout == left["layout"]
        found = rig.restart()
        assert (found.live, found.ended, found.damaged, found.beyond) == (2, 2, 0, 0)
        rig.turns()
        assert rig.core.ring_row(ring.index).violation == 0
        assert (row(rig, "live").tokens, row(rig, "live").requested_ns) == (16, 5)
        live = told(read(rig, "live"))
        assert live[0] == (0, b'open:{"model": "m"}')
        assert [seq for seq, text in live if text.startswith(b"gap:evicted")] == [3]
        assert [seq for seq, text in live[1:] if not text.startswith(b"gap:")] == [0, 1, 2, *range(9, 16)]
        assert live[-1] == (15, b"left")
        assert told(read(rig, "ended")) == [
            (0, b"open:"), (0, b"some "), (1, b"gap:overflow"), (5, b"text"), (6, b"close:length"),
        ]  # fmt: skip
        assert told(read(rig, "cancelled")) == [(0, b"open:"), (0, b"close:cancelled")]
        assert told(read(rig, "late")) == [(0, b"open:"), (0, "späť 名字".encode())]
        assert told(read(rig, "last")) == [(0, b"open:")]
        assert ring.stopped(3)[1] == lib.CLAW_STOPPED_EXISTS


def test_the_layout_that_is_built_has_one() -> None:
    assert (GOLDEN / f"layout-{lib.CLAW_LAYOUT}.json").exists()


if __name__ == "__main__":
    with Rig(LIMITS) as made:
        leave(made)
        (GOLDEN / f"layout-{lib.CLAW_LAYOUT}.json").write_text(pack(made))
    os._exit(0)
