# SPDX-License-Identifier: Apache-2.0
"""Whether clawd-kernel is there, what it may do, and if not, why: for `clawctl status` and `doctor`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from clawd import protocol
from clawd.ctl.check import Finding
from clawd.errors import ProtocolError

TIMEOUT_S = 2.0


def look(directory: Path | None = None) -> dict[str, Any]:
    """`state` is running, hidden (it is not for us to say), absent or broken; `reason` why it is no more than that;
    `abilities` what a running one told.
    """
    path = (directory or Path(os.environ.get("CLAWD_KERNEL_DIR", protocol.KERNEL_DIR))) / protocol.KERNEL_SOCKET
    try:
        answer = _ask(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return _state("absent", "it is not running: systemctl enable --now clawd-kernel")
    except PermissionError:
        return _state("hidden", f'"{path}" is for clawd\'s group')
    except (OSError, ProtocolError) as error:
        return _state("broken", f"it does not answer: {getattr(error, 'strerror', None) or error}")
    if isinstance(answer, protocol.Failure):
        # it is there, and refused us
        return _state("running" if answer.code == "denied" else "broken", answer.text)
    return _state("running", "", dict(answer.abilities))


def _state(state: str, reason: str, abilities: dict[str, str] | None = None) -> dict[str, Any]:
    return {"state": state, "reason": reason or None, "abilities": abilities}


def _ask(path: Path) -> protocol.Abilities | protocol.Failure:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as helper:
        helper.settimeout(TIMEOUT_S)
        helper.connect(os.fspath(path))
        helper.send(protocol.encode(protocol.Capabilities(protocol.VERSION)))
        packet = helper.recv(protocol.ANSWER_MAX)
    answer: Any = protocol.decode(packet, (protocol.Abilities, protocol.Failure), protocol.ANSWER_MAX)
    assert isinstance(answer, protocol.Abilities | protocol.Failure)
    return answer


def told(found: dict[str, Any]) -> str:
    """The same in a few words."""
    if found["abilities"] is None:
        return f"clawd-kernel: {found['reason']}" if found["state"] != "running" else "clawd-kernel runs"
    lacks = [f"{name} ({reason})" for name, reason in found["abilities"].items() if reason]
    return "clawd-kernel runs" + (f", without {', '.join(lacks)}" if lacks else "")


def check_helper(directory: Path | None = None) -> Finding:
    """An extra: clawd works without it."""
    found = look(directory)
    if found["state"] == "broken":
        return Finding("kernel", "info", told(found), "systemctl restart clawd-kernel", "tune")
    if found["state"] == "absent":
        return Finding("kernel", "info", "clawd-kernel is not running; the relay does not need it",
                       "systemctl enable --now clawd-kernel", "tune")  # fmt: skip
    lacks = any((found["abilities"] or {}).values())
    return Finding("kernel", "info" if lacks or found["state"] == "hidden" else "ok", told(found), None, "tune")
