# SPDX-License-Identifier: Apache-2.0
"""Whether clawd-kernel is there, what it may do, and if not, why: for `clawctl status` and `doctor`."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clawd import protocol
from clawd.ctl import render
from clawd.ctl.check import Finding
from clawd.errors import ProtocolError

TIMEOUT_S = 2.0


def look(directory: Path | None = None) -> dict[str, Any]:
    """`state` is running, hidden (it is not for us to say), absent or broken; `reason` why it is no more than that;
    `abilities` what a running one told.
    """
    path = (directory or Path(os.environ.get("CLAWD_KERNEL_DIR", protocol.KERNEL_DIR))) / protocol.KERNEL_SOCKET
    try:
        answer, shaping, boosting = _ask(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return _state("absent", "it is not running: systemctl enable --now clawd-kernel")
    except PermissionError:
        return _state("hidden", f'"{path}" is for clawd\'s group')
    except (OSError, ProtocolError) as error:
        return _state("broken", f"it does not answer: {getattr(error, 'strerror', None) or error}")
    if isinstance(answer, protocol.Failure):
        # it is there, and refused us
        return _state("running" if answer.code == "denied" else "broken", answer.text)
    return _state("running", "", dict(answer.abilities), shaping, boosting)


def _state(
    state: str,
    reason: str,
    abilities: dict[str, str] | None = None,
    shaping: protocol.Shaping | None = None,
    boosting: protocol.Boosting | None = None,
) -> dict[str, Any]:
    told = {"shaping": asdict(shaping) if shaping else None, "boosting": asdict(boosting) if boosting else None}
    return {"state": state, "reason": reason or None, "abilities": abilities, **told}


def _ask(
    path: Path,
) -> tuple[protocol.Abilities | protocol.Failure, protocol.Shaping | None, protocol.Boosting | None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as helper:
        helper.settimeout(TIMEOUT_S)
        helper.connect(os.fspath(path))
        answer = _answer(helper, protocol.Capabilities(protocol.VERSION), protocol.Abilities)
        if isinstance(answer, protocol.Failure):
            return answer, None, None
        shaping = _answer(helper, protocol.Shape(), protocol.Shaping)
        if isinstance(shaping, protocol.Failure):
            return answer, None, None
        boosting = _answer(helper, protocol.Boosts(), protocol.Boosting)
        return answer, shaping, None if isinstance(boosting, protocol.Failure) else boosting


def _answer(helper: socket.socket, request: protocol.Message, kind: type[Any]) -> Any:
    helper.send(protocol.encode(request))
    return protocol.decode(helper.recv(protocol.ANSWER_MAX), (kind, protocol.Failure), protocol.ANSWER_MAX)


def told(found: dict[str, Any]) -> str:
    """The same in a few words."""
    if found["abilities"] is None:
        return f"clawd-kernel: {found['reason']}" if found["state"] != "running" else "clawd-kernel runs"
    lacks = [f"{name} ({reason})" for name, reason in found["abilities"].items() if reason]
    told = "clawd-kernel runs" + (f", without {', '.join(lacks)}" if lacks else "")
    return f"{told}; {told_shaping(found['shaping'])}" if found["shaping"] else told


def told_shaping(shaping: dict[str, Any]) -> str:
    """What is attached to sockets, since when, and what runs beside it."""
    if shaping["state"] != "attached":
        return f"sockets are not shaped: {render.cell(shaping['reason'])}"
    counters = shaping["counters"]
    age = render.duration(time.monotonic_ns() - shaping["since_ns"]) if shaping["since_ns"] else render.ABSENT
    parts = [f"shapes sockets of {shaping['lanes']} lanes since {age}: {counters.get('shaped', 0)} so far"]
    parts.append(f"{counters.get('runs', 0)} runs" if shaping["is_proved"] else "it was not seen to run yet")
    for name, what in (
        ("refused", "options refused"),
        ("full", "sockets without a row"),
        ("unmarkable", "packets of a device whose headers are not known, so not marked"),
    ):
        if counters.get(name):
            parts.append(f"{counters[name]} {what}")
    if shaping["others"]:
        parts.append(f"programs beside it that may set the same: {', '.join(map(str, shaping['others']))}")
    if shaping["pacers"]:
        parts.append(
            "paced by " + ", ".join(f"{who} on {render.cell(name)}" for name, who in shaping["pacers"].items())
        )
    if shaping["devices"]:
        parts.append(f"packets are marked on {', '.join(map(render.cell, shaping['devices']))}")
    if shaping["ahead"]:
        parts.append(f"before it come {', '.join(map(render.cell, shaping['ahead']))}")
    if shaping["unmarked"]:
        parts.append(f"packets are not marked: {render.cell(shaping['unmarked'])}")
    return ", ".join(parts)


def check_helper(directory: Path | None = None) -> Finding:
    """An extra: clawd works without it."""
    found = look(directory)
    if found["state"] == "broken":
        return Finding("kernel", "info", told(found), "systemctl restart clawd-kernel", "tune")
    if found["state"] == "absent":
        return Finding("kernel", "info", "clawd-kernel is not running; the relay does not need it",
                       "systemctl enable --now clawd-kernel", "tune")  # fmt: skip
    shaping = found["shaping"]
    if shaping and shaping["lanes"] and (shaping["state"] != "attached" or shaping["others"]):
        return Finding("kernel", "info", told(found), _fix(shaping), "tune")
    lacks = any((found["abilities"] or {}).values())
    return Finding("kernel", "info" if lacks or found["state"] == "hidden" else "ok", told(found), None, "tune")


def _fix(shaping: dict[str, Any]) -> str:
    if shaping["others"]:
        return "see who attached them: bpftool cgroup tree effective"
    return "see the reason, then: systemctl restart clawd-kernel; clients by tcp are served all the same"
