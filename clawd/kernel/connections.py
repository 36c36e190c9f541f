# SPDX-License-Identifier: Apache-2.0
"""How many tcp connections there are to ports of this network namespace."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

PROC = Path("/proc/thread-self/net")
# Of net/tcp_states.h, as /proc writes them. The others are not there yet, or on their way out.
_ESTABLISHED, _CLOSE_WAIT = "01", "08"


def count_open(ports: Collection[int], proc: Path = PROC) -> int:
    """Of both families."""
    found = 0
    for name in ("tcp", "tcp6"):
        try:
            rows = (proc / name).read_text().splitlines()[1:]
        except OSError:  # no such family here
            continue
        for _number, local, _peer, state, *_ in map(str.split, rows):
            found += state in (_ESTABLISHED, _CLOSE_WAIT) and int(local.rpartition(":")[2], 16) in ports
    return found
