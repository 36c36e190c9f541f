# SPDX-License-Identifier: Apache-2.0
"""A classifier of ours at the egress of devices, which marks and leaves the verdict to others. Others' filters and the
clsact that holds them stay, also where we made it; ours is known by its place and its name, and only it is taken away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawd.errors import HostError
from clawd.kernel import bpfcall, tc

NAME = "claw_egress"
PARENT = 0xFFFFFFF3  # egress of clsact, linux/pkt_sched.h
PRIO = 0xC1A0
"""High, so that it runs after others' filters, whose prio is low as a rule."""
HANDLE = 0xC1A
ETH_P_ALL = 3
_DIRECT = 1  # TCA_BPF_FLAG_ACT_DIRECT


@dataclass(frozen=True)
class Filter:
    """As the kernel lists it."""

    prio: int
    handle: int
    kind: str
    name: str

    @property
    def is_ours(self) -> bool:
        """Of a clawd-kernel."""
        return (self.prio, self.handle, self.kind) == (PRIO, HANDLE, "bpf") and self.name.startswith(NAME)

    @property
    def owner(self) -> int:
        """The process of another clawd-kernel that is alive and has it; 0: there is none."""
        match = re.fullmatch(rf"{NAME}-([0-9]{{1,9}})-([0-9]+)", self.name)
        if match is None or self.name == _label():
            return 0
        pid = int(match[1])
        try:
            os.kill(pid, 0)
            return pid if _started(pid) in ("", match[2]) else 0  # else the number is another's by now
        except ProcessLookupError:
            return 0
        except PermissionError:
            return pid


def _label() -> str:
    """What our filters are called: a killed one's are told by that from those of one that lives."""
    return f"{NAME}-{os.getpid()}-{_started(os.getpid())}"


def _started(pid: int) -> str:
    """When, in ticks since the boot; empty when it is hidden from us."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextlib.contextmanager
def _netlink() -> Iterator[Any]:
    """One short-lived handle an operation, as in tc.py."""
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError
    except ImportError as error:
        raise HostError("pyroute2 is not installed here", "pip install 'clawd[kernel]'") from error
    try:
        with IPRoute() as handle:
            yield handle
    except NetlinkError as error:
        raise HostError(f"the kernel refuses a classifier: {os.strerror(error.code)}") from error


def outgoing() -> list[str]:
    """Devices that lead beyond this host: those with a default route."""
    found = set()
    # Destination and mask of the one, destination and its length of the other; the device is the first or the last word
    for path, device, default in (
        (Path("/proc/net/route"), 0, {1: "00000000", 7: "00000000"}),
        (Path("/proc/net/ipv6_route"), 9, {0: "0" * 32, 1: "00"}),
    ):
        with contextlib.suppress(OSError):  # no such family here
            rows = [line.split() for line in path.read_text().splitlines()]
            found |= {
                words[device]
                for words in rows
                if len(words) >= 10 and all(words[at] == is_ for at, is_ in default.items())
            }
    return sorted(found - {"lo"})


def filters(index: int) -> list[Filter]:
    """At the egress of a device, in the order in which they run."""
    with _netlink() as handle:
        rows = [row for row in handle.get_filters(index, 0, PARENT) if row["handle"]]
    made = []
    for row in rows:
        options = row.get_attr("TCA_OPTIONS")
        name = options.get_attr("TCA_BPF_NAME") if row.get_attr("TCA_KIND") == "bpf" and options else None
        made.append(Filter(row["info"] >> 16, row["handle"], row.get_attr("TCA_KIND"), name or ""))
    return sorted(made, key=lambda each: (each.prio, each.handle))


def has_fq(name: str) -> bool:
    """Whether every queue of a device is fq, which sends each packet at the time that its socket's pacing gave it."""
    index = _index(name)
    with _netlink() as handle:
        rows = [row for row in handle.get_qdiscs(index) if row["parent"] != 0xFFFFFFF1]  # clsact is no queue
    kinds = [row.get_attr("TCA_KIND") for row in rows]
    return bool(kinds) and {kind for kind in kinds if kind != "mq"} == {"fq"}


def express_class(name: str) -> int:
    """The class of our own htb (tc.py) that what comes first goes to; 0 where the device has none."""
    index = _index(name)
    with _netlink() as handle:
        rows = [row for row in handle.get_qdiscs(index) if row["parent"] == tc.ROOT_PARENT]
    return tc.EXPRESS if any(row.get_attr("TCA_KIND") == "htb" and row["handle"] == tc.OURS for row in rows) else 0


def attach(name: str, program: int) -> None:
    """Raises HostError."""
    index = _index(name)
    with _netlink() as handle:
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            handle.tc("add", "clsact", index)
        except NetlinkError as error:
            if error.code != errno.EEXIST:
                raise
    present = next((each for each in filters(index) if (each.prio, each.handle) == (PRIO, HANDLE)), None)
    if present and not present.is_ours:
        raise HostError(f'a filter of somebody else is at prio {PRIO} of "{name}"')
    if present and present.owner:
        raise HostError(f'another clawd-kernel, process {present.owner}, marks at "{name}"')
    if present:
        detach(name)  # a killed helper's
    with _netlink() as handle:
        where: dict[str, Any] = {"parent": PARENT, "prio": PRIO, "protocol": ETH_P_ALL}
        handle.tc("add-filter", "bpf", index, HANDLE, fd=program, name=_label(), flags=_DIRECT, **where)


def detach(name: str) -> None:
    """Take ours away, or a killed helper's, when it is there: by its exact place, for less would take others' too."""
    with contextlib.suppress(OSError):  # the device is gone, and its filters with it
        index = socket.if_nametoindex(name)
        if any(each.is_ours and not each.owner for each in filters(index)):
            with _netlink() as handle:
                where: dict[str, Any] = {"parent": PARENT, "prio": PRIO, "protocol": ETH_P_ALL}
                handle.tc("del-filter", "bpf", index, HANDLE, **where)


def ahead(name: str) -> list[str]:
    """What runs before ours at a device, and may end a packet's way to it."""
    index = _index(name)
    told = []
    with contextlib.suppress(OSError):  # before 6.6 there is no tcx
        told = [f"tcx program {number}" for number in bpfcall.programs_at(index, bpfcall.TCX_EGRESS)]
    return told + [f"filter {each.kind} at prio {each.prio}" for each in filters(index) if each.prio < PRIO]


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError as error:
        raise HostError(f'no device "{name}"') from error
