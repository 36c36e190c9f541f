# SPDX-License-Identifier: Apache-2.0
"""A ring that is truncated under clawd's eyes costs its producer, not clawd. In processes of their own: a guard that
fails kills.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = f"""
import os, sys, mmap, ctypes
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rig import Rig
from clawd.core import guard, lib, ffi
"""


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + code], capture_output=True, text=True, timeout=50, check=False
    )


TRUNCATE = """
guard()
with Rig() as rig:
    ring, other = rig.ring(), rig.ring()
    client = rig.core.connect()
    ring.open(0, "victim"); other.open(0, "neighbour")
    ring.write(0, b"before")
    rig.turn()
    rig.core.attach(client, 1, b"victim", credit=1 << 20); rig.core.attach(client, 2, b"neighbour", credit=1 << 20)
    rig.turn()
    ring.write(0, b"x" * 1000); other.write(0, b"fine")
    os.ftruncate({target}, {size})
    other.close(0)
    seen = rig.turns()
    assert rig.core.ring_row(ring.index).state == lib.CLAW_RING_BROKEN
    assert rig.core.ring_row(ring.index).violation == lib.CLAW_BAD_MEMORY
    ends = {{item.attachment: item.data for item in seen if item.kind == lib.CLAW_CLOSE}}
    assert ends == {{1: b"error:quarantined", 2: b"stop"}}, ends
    tokens = [item.data for item in seen if item.attachment == 1 and item.kind == lib.CLAW_TOKEN]
    assert tokens == {tokens}, "a torn token got out, or a whole one was lost"
    assert rig.core.refresh_totals().quarantined == 1
    rig.core.drop_ring(ring.index)
print("survived")
"""


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler"), ("-X", "dev")], ids=" ".join)
@pytest.mark.parametrize("size", [0, 4096], ids=["all", "ring"])
def test_a_truncated_ring_is_quarantined_and_its_neighbour_goes_on(size: int, options: tuple[str, ...]) -> None:
    done = run(TRUNCATE.format(target="ring.data_fd", size=size, tokens=[]), *options)
    assert (done.stdout, done.stderr) == ("survived\n", "")


def test_a_truncated_control_page_is_quarantined_too() -> None:
    done = run(TRUNCATE.format(target="ring.ctl_fd", size=0, tokens=[b"x" * 1000]))
    assert (done.stdout, done.stderr) == ("survived\n", "")


def test_a_fault_anywhere_else_still_kills() -> None:
    done = run(
        "guard()\n"
        "fd = os.memfd_create('x'); os.ftruncate(fd, 4096); view = mmap.mmap(fd, 4096); os.ftruncate(fd, 0)\n"
        "view[0]\n"
        "print('went on')\n"
    )
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == ""


def test_a_handler_that_takes_our_place_is_found_by_the_trial() -> None:
    # what faulthandler.enable() after guard() would do; a second guard() puts ours back and says that it works
    done = run("import faulthandler\nguard()\nfaulthandler.enable()\nguard()\nprint('ok')\n")
    assert (done.stdout, done.stderr) == ("ok\n", "")
