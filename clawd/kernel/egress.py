# SPDX-License-Identifier: Apache-2.0
"""Where the shaper's classifier is attached: devices that lead beyond this host, if a lane wants marks, and those that
have an express class of ours, which clawd's express lane is put into.
"""

from __future__ import annotations

import contextlib
import socket

from clawd import log
from clawd.errors import HostError
from clawd.kernel import clsact, tc
from clawd.kernel.bpfcall import Table


class Egress:
    def __init__(self) -> None:
        self._indexes: dict[str, int] = {}
        self._classes: dict[str, int] = {}
        self.reason = ""
        """Why a device that should be is not among `devices`."""

    @property
    def devices(self) -> list[str]:
        return list(self._indexes)

    @property
    def classes(self) -> dict[str, str]:
        """By device, the class that express packets are put into."""
        return {name: tc.handle_text(number) for name, number in self._classes.items()}

    def follow(self, program: int, classes: Table, *, is_marking: bool) -> None:
        """Be attached where that is of use by now: devices, routes and queues come and go. `is_marking`: everywhere."""
        reason = ""
        try:
            self._forget()
            outgoing = clsact.outgoing()
            if is_marking and not outgoing:
                reason = "no device has a default route"
            for name in outgoing:
                self._follow(name, program, classes, is_marking=is_marking)
        except (HostError, OSError) as error:
            reason = str(error)
        if reason and reason != self.reason:
            log.warning("egress not classified", reason=reason)
        self.reason = reason

    def _forget(self) -> None:
        """Devices that are gone, and others of their names: their filters went with them."""
        there = {name: index for index, name in socket.if_nameindex()}
        for name, index in list(self._indexes.items()):
            if there.get(name) != index:
                del self._indexes[name]
                self._classes.pop(name, None)

    def _follow(self, name: str, program: int, classes: Table, *, is_marking: bool) -> None:
        index, group = socket.if_nametoindex(name), clsact.express_class(name)
        if (is_marking or group) and name not in self._indexes:
            clsact.attach(name, program)
            self._indexes[name] = index
            log.event("egress classified", device=name)
        if group and self._classes.get(name) != group:
            classes.set(index, group.to_bytes(4, "little"))
            self._classes[name] = group
        elif not group and self._classes.pop(name, 0):
            classes.remove(index)

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
        self._indexes.clear()
        self._classes.clear()


def sweep() -> None:
    """Take away what a killed helper of ours left, on any device."""
    with contextlib.suppress(HostError, OSError):
        for _index, name in socket.if_nameindex():
            clsact.detach(name)
