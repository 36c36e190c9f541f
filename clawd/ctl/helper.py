# SPDX-License-Identifier: Apache-2.0
"""Whether clawd-kernel is there, what it may do, and if not, why: for `clawctl status` and `doctor`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clawd import protocol, units
from clawd.ctl import render
from clawd.ctl.check import Finding
from clawd.ctl.client import Client, figures
from clawd.errors import ControlError, ProtocolError
from clawd.kernel.shaper import PROOF_NS
from clawd.page import Life

TIMEOUT_S = 2.0
WISHES = {"express_dscp": "off", "congestion": "kernel"}
"""Settings that need clawd-kernel, with the value that does not."""
MISSING_FIX = "set another congestion and clawctl reload, or use a kernel that has its module"
COUNTED = {
    "full": "sockets without a row",
    "unmarkable": "packets of a device whose headers are not known, so not marked",
}


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


def told(found: dict[str, Any], wishes: Sequence[str] = ()) -> str:
    """The same in a few words, and which `wishes` wait for it."""
    is_shaping = found["shaping"] and found["shaping"]["state"] == "attached"
    waiting = f"; it is needed for {', '.join(map(render.cell, wishes))}" if wishes and not is_shaping else ""
    return _told(found) + waiting


def _told(found: dict[str, Any]) -> str:
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
    parts += sorted({_told_policy(row) for row in shaping["policies"]} - {""})
    parts += [render.cell(what) for what in shaping["missing"]]
    if counters.get("refused"):
        names = [name.removeprefix("refused_") for name in counters if name.startswith("refused_") and counters[name]]
        parts.append(f"{counters['refused']} options refused by the kernel: {render.cell(', '.join(names))}")
    for name, what in COUNTED.items():
        if counters.get(name):
            parts.append(f"{counters[name]} {what}")
    if shaping.get("unshaped"):
        parts.append(f"{shaping['unshaped']} sockets connected before it, and are not shaped until they connect again")
    if shaping["others"]:
        parts.append(f"programs beside it that may set the same: {', '.join(map(str, shaping['others']))}")
    if shaping["pacers"]:
        parts.append(
            "paced by " + ", ".join(f"{who} on {render.cell(name)}" for name, who in shaping["pacers"].items())
        )
    if shaping["devices"]:
        parts.append(f"packets are marked on {', '.join(map(render.cell, shaping['devices']))}")
    for name, group in (shaping.get("classes") or {}).items():
        parts.append(f"express packets go to class {render.cell(group)} of {render.cell(name)}")
    if shaping["ahead"]:
        parts.append(f"before it come {', '.join(map(render.cell, shaping['ahead']))}")
    if shaping["unmarked"]:
        parts.append(f"packets are not marked: {render.cell(shaping['unmarked'])}")
    return ", ".join(parts)


def _told_policy(row: dict[str, Any]) -> str:
    """What a lane has by a setting, empty when it has nothing."""
    wanted = []
    if row.get("dscp"):
        wanted.append(f"DSCP {units.format_dscp(row['dscp'])}")
    if row.get("congestion"):
        wanted.append(f"congestion control {render.cell(row['congestion'])}")
    return f"{render.cell(row['lane'])} lanes with {' and '.join(wanted)}" if wanted else ""


def wishes_of(values: Mapping[str, str]) -> list[str]:
    """Settings that only clawd-kernel can bring about, of those in effect, as they are written."""
    if values.get("tcp_listen", "off") == "off":
        return []
    return [f"{key} = {values[key]}" for key in WISHES if values.get(key, WISHES[key]) != WISHES[key]]


def find_wishes(runtime_dir: Path) -> list[str]:
    """Those of the clawd there; nothing where none answers."""
    try:
        with figures(runtime_dir) as (_page, life):
            if life is not Life.ANSWERING:
                return []
        with Client(runtime_dir) as client:
            return wishes_of(client.ask(protocol.Settings(), protocol.InEffect).values)
    except ControlError:
        return []


def check_helper(directory: Path | None = None, wishes: Sequence[str] = ()) -> Finding:
    """An extra: clawd works without it, but for the `wishes`."""
    found = look(directory)
    level = "warn" if wishes else "info"
    if found["state"] == "broken":
        return Finding("kernel", level, told(found, wishes), "systemctl restart clawd-kernel", "tune")
    if found["state"] == "absent":
        what = f"it is needed for {', '.join(wishes)}" if wishes else "the relay does not need it"
        return Finding("kernel", level, f"clawd-kernel is not running; {what}", "systemctl enable --now clawd-kernel",
                       "tune")  # fmt: skip
    flaw = _flaw(found["shaping"], level) if found["shaping"] and found["shaping"]["lanes"] else None
    if flaw:
        return Finding("kernel", flaw[0], told(found, wishes), flaw[1], "tune")
    lacks = any((found["abilities"] or {}).values())
    return Finding("kernel", "info" if lacks or found["state"] == "hidden" else "ok", told(found), None, "tune")


def _flaw(shaping: dict[str, Any], level: str) -> tuple[str, str] | None:
    """The worst that is wrong with the shaping, as level and fix."""
    is_marking = any(row.get("dscp") for row in shaping["policies"])
    if shaping["state"] != "attached":
        return level, "see the reason, then: systemctl restart clawd-kernel; clients by tcp are served all the same"
    if shaping["missing"]:
        return "warn", MISSING_FIX
    if is_marking and shaping["unmarked"]:
        return "warn", "see: ip route, tc filter show dev NAME egress"
    if is_marking and shaping["ahead"]:
        return (
            "warn",
            "what ends there is not marked; see who attached them: bpftool net",
        )
    if not shaping["is_proved"] and time.monotonic_ns() - (shaping["since_ns"] or 0) >= PROOF_NS:
        return "warn", f"run clawd in {shaping['cgroup']}: systemctl restart clawd, or clawd-kernel with --cgroup"
    if shaping.get("unshaped"):
        return "info", "those clients are served all the same; they are shaped when they connect again"
    if shaping["others"]:
        return "info", "see who attached them: bpftool cgroup tree effective"
    return None
