# SPDX-License-Identifier: Apache-2.0
"""Where the shaper's classifier is attached: devices that lead beyond this host, if a lane wants marks."""

from __future__ import annotations

import contextlib
import socket

from clawd import log
from clawd.errors import HostError
from clawd.kernel import clsact


class Egress:
    def __init__(self) -> None:
        self.devices: list[str] = []
        self.reason = ""
        """Why a device is not among them."""

    def attach(self, program: int) -> None:
        """On all such devices that there are now."""
        try:
            for name in clsact.outgoing():
                if name not in self.devices:
                    clsact.attach(name, program)
                    self.devices.append(name)
                    log.event("egress classified", device=name)
            self.reason = "" if self.devices else "no device has a default route"
        except HostError as error:
            self.reason = str(error)
            log.warning("egress not classified", reason=error)

    def ahead(self) -> list[str]:
        """What runs before ours."""
        found = []
        for name in self.devices:
            with contextlib.suppress(HostError, OSError):  # the device is gone
                found += [f"{told} of {name}" for told in clsact.ahead(name)]
        return found

    def pacers(self) -> dict[str, str]:
        """Who holds paced packets back, by device: its fq, or else each socket's own timer."""
        found = {}
        with contextlib.suppress(HostError, OSError):
            for name in clsact.outgoing():
                found[name] = "fq" if clsact.has_fq(name) else "tcp"
        return found

    def close(self) -> None:
        for name in self.devices:
            with contextlib.suppress(HostError):
                clsact.detach(name)
        self.devices = []


def sweep() -> None:
    """Take away what a killed helper of ours left, on any device."""
    with contextlib.suppress(HostError, OSError):
        for _index, name in socket.if_nameindex():
            clsact.detach(name)
