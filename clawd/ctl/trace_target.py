# SPDX-License-Identifier: Apache-2.0
"""The clawd that is traced, as the kernel names it, and what it says of its tcp lanes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from clawd import protocol
from clawd.ctl.client import Client
from clawd.errors import ControlError, HostError


@dataclass(frozen=True)
class Target:
    """`pid` is that of this process's PID namespace: a clawd in a container knows itself by another. `lanes`: the class
    of each port of its tcp lanes, `first` of the express one, which has what cannot wait. `unknown`: why `lanes` is
    empty though there may be some; then all is `rest`.
    """

    pid: int
    lanes: dict[int, str]
    unknown: str = ""


def target_of(runtime_dir: Path) -> Target:
    """Takes up to 5 s when clawd does not answer. Raises HostError when its process is none that can be seen."""
    try:
        with Client(runtime_dir) as client:
            pid = client.daemon_pid()
            if not pid:
                raise HostError("clawd is in a PID namespace that is not seen from here", "run it on clawd's host")
            try:
                values = client.ask(protocol.Settings(), protocol.InEffect).values
            except ControlError as error:
                return Target(pid, {}, error.message)
    except ControlError as error:
        raise HostError(f"which process is clawd's cannot be asked: {error.message}", error.hint) from error
    lanes: dict[int, str] = {}
    for found in re.finditer(r":(\d+)(?=[\s,]|$)", values.get("tcp_listen", "")):
        bulk = int(found[1])
        lanes |= {bulk: "rest", bulk + 1: "first"}
    return Target(pid, lanes)
