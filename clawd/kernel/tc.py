# SPDX-License-Identifier: Apache-2.0
"""Root queues of devices as places. Only a root that is the kernel's own, or ours, is replaced; whatever somebody put
there stays, and so do clsact, ingress and their filters. A value is `default KIND`, `default mq KIND`, `KIND`,
`mq KIND`, `htb RATE EXPRESS`, `partial`, or `foreign …`.
"""

from __future__ import annotations

import gzip
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawd.kernel.change import ABSENT, FORBIDDEN, GONE, INVALID, MODULE, Place, Trouble, trouble

KIND = "qdisc"
ROOT_PARENT = 0xFFFFFFFF
OURS = 0xC1A00000
"""The handle of the roots we make: nobody's by chance, since the kernel gives those from 8000: on."""
EXPRESS, BULK, ALL = OURS | 0x10, OURS | 0x20, OURS | 0x1
EF = (("ip", 0x0800, 1, "0x00b80000/0x00fc0000+0"), ("ipv6", 0x86DD, 2, "0x0b800000/0x0fc00000+0"))
"""What is marked as expedited (DSCP 46, RFC 3246) is express, and so is what has that class as its SO_PRIORITY."""
TC_TIMEOUT_S = 20
_UNKNOWN = re.compile(r"unknown|no such file", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    name: str
    index: int
    mac: str

    @property
    def identity(self) -> str:
        return f"{self.index}/{self.mac}"


@contextmanager
def _netlink(what: str) -> Iterator[Any]:
    """One short-lived handle: they do not outlive a fork, and keep the namespace in which they were made."""
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError
    except ImportError as error:
        raise Trouble(ABSENT, "pyroute2 is not installed here", "pip install 'clawd[kernel]'") from error
    try:
        with IPRoute() as handle:
            yield handle
    except NetlinkError as error:
        raise trouble(OSError(error.code, str(error)), what) from error
    except OSError as error:
        raise trouble(error, what) from error


def find_device(name: str) -> Device | None:
    """In this network namespace."""
    with _netlink(name) as handle:
        return _device(handle, name)


def _device(handle: Any, name: str) -> Device | None:
    for link in handle.get_links():
        if link.get_attr("IFLA_IFNAME") == name:
            return Device(name, int(link["index"]), str(link.get_attr("IFLA_ADDRESS") or ""))
    return None


def route_devices(proc: Path = Path("/proc/thread-self/net")) -> list[str]:
    """Those that carry a default route of this namespace, by which tokens leave."""
    found = []
    for line in _lines(proc / "route"):
        name, destination, _gateway, flags, *_rest, mask = line[:8]
        if destination == mask == "00000000" and int(flags, 16) & 1:
            found.append(name)
    for line in _lines(proc / "ipv6_route"):
        if line[0] == "0" * 32 and line[1] == "00" and line[-1] != "lo":
            found.append(line[-1])
    return sorted(set(found))


def _lines(path: Path) -> Iterator[list[str]]:
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and words[0] != "Iface":
            yield words


def has_scheduler(kind: str, root: Path = Path("/")) -> bool:
    """Whether the kernel has, or can load, the queue `kind`. What is built in leaves no other trace."""
    release = platform.release()
    modules = root / "lib/modules" / release
    if (root / f"sys/module/sch_{kind}").exists():
        return True
    for name in ("modules.builtin", "modules.dep"):
        if re.search(rf"/sch_{kind}\.ko", _text(modules / name)):
            return True
    option = rf"^CONFIG_NET_SCH_{kind.upper()}=[ym]$"
    return any(re.search(option, text, re.MULTILINE) for text in _configs(root, release))


def _configs(root: Path, release: str) -> Iterator[str]:
    yield _text(root / f"boot/config-{release}")
    yield _text(root / "lib/modules" / release / "config")
    try:
        yield gzip.decompress((root / "proc/config.gz").read_bytes()).decode(errors="replace")
    except (OSError, EOFError):
        return


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class Queues:
    """The lever."""

    def read(self, place: Place) -> str:
        with _netlink(place.name) as handle:
            return self._read(handle, self._device(handle, place))

    def _device(self, handle: Any, place: Place) -> Device:
        device = _device(handle, place.name)
        if device is None:
            raise Trouble(GONE, f"there is no device {place.name}", "see: ip link")
        if place.identity not in ("", device.identity):
            raise Trouble(GONE, f"{place.name} is another device by now")
        return device

    def _read(self, handle: Any, device: Device) -> str:
        queues = [queue for queue in handle.get_qdiscs() if queue["index"] == device.index]
        root = next((queue for queue in queues if queue["parent"] == ROOT_PARENT), None)
        if root is None:
            return "default noqueue"
        kind, number = root.get_attr("TCA_KIND"), root["handle"]
        if kind == "mq":
            kinds = sorted({leaf.get_attr("TCA_KIND") for leaf in queues if _is_leaf(leaf, number)})
            kind = f"mq {'+'.join(kinds)}".strip()
            if number == OURS:
                defaults = [leaf for leaf in queues if _is_leaf(leaf, number) and leaf["handle"] == 0]
                return "partial" if defaults or len(kinds) != 1 else kind
        if number == 0:
            return f"default {kind}"
        if number != OURS:
            return f"foreign {kind} {number >> 16:x}:"
        return self._read_htb(handle, device, queues) if kind == "htb" else str(kind)

    def _read_htb(self, handle: Any, device: Device, queues: Sequence[Any]) -> str:
        rates = {}
        for group in handle.get_classes(device.index):
            options = group.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")
            rates[group["handle"]] = (_rate(group, "RATE", options), _rate(group, "CEIL", options), options["prio"])
        filters = set()
        for filter in handle.get_filters(device.index, 0, OURS):
            options = filter.get_attr("TCA_OPTIONS")
            target = options.get_attr("TCA_U32_CLASSID") if options is not None else None
            if target is not None:
                filters.add((filter["info"] & 0xFFFF, target))
        if ALL not in rates or EXPRESS not in rates:
            return "partial"
        rate = 8 * rates[ALL][0]
        express = round(100 * rates[EXPRESS][0] / rates[ALL][0])
        wanted_filters = {(int.from_bytes(number.to_bytes(2, "little"), "big"), EXPRESS) for _, number, _, _ in EF}
        leaves = {queue["parent"]: queue.get_attr("TCA_KIND") for queue in queues}
        fair = not has_scheduler("fq") or leaves.get(EXPRESS) == leaves.get(BULK) == "fq"
        whole = rates == _classes(rate, express) and filters == wanted_filters and fair
        return f"htb {rate} {express}" if whole else "partial"

    def write(self, place: Place, value: str) -> None:
        with _netlink(place.name) as handle:
            device = self._device(handle, place)
            live = self._read(handle, device)
            if live == value:
                return
            if live.startswith("foreign"):
                raise Trouble(FORBIDDEN, f"{place.name} has a root queue of somebody else's", "tc qdisc show")
            if not live.startswith("default"):
                handle.tc("del", None, device.index, OURS, parent=ROOT_PARENT)
            if value.startswith("htb "):
                self._make_htb(handle, device, *map(int, value.split()[1:]))
                if has_scheduler("fq"):
                    for group in (EXPRESS, BULK):
                        _tc("qdisc", "add", "dev", device.name, "parent", handle_text(group), "fq")
            elif not value.startswith("default"):
                self._make(handle, device, value)

    def _make_htb(self, handle: Any, device: Device, rate: int, express: int) -> None:
        # add and not replace: the kernel refuses it where somebody's root has come in between
        handle.tc("add", "htb", device.index, OURS, default=BULK & 0xFFFF)
        for group, (own, most, prio) in _classes(rate, express).items():
            parent = OURS if group == ALL else ALL
            handle.tc("add-class", "htb", device.index, group, parent=parent, rate=own, ceil=most, prio=prio)
        for _, protocol, order, key in EF:
            handle.tc("add-filter", "u32", device.index, handle=0, parent=OURS, prio=order, protocol=protocol,
                      target=EXPRESS, keys=[key])  # fmt: skip

    def _make(self, handle: Any, device: Device, value: str) -> None:
        words = value.split()
        _tc("qdisc", "add", "dev", device.name, "root", "handle", handle_text(OURS), words[0])
        if words[0] == "mq":
            for queue in handle.get_qdiscs():
                if queue["index"] == device.index and _is_leaf(queue, OURS):
                    _tc("qdisc", "add", "dev", device.name, "parent", handle_text(queue["parent"]), words[1])

    def is_partial(self, live: str) -> bool:
        return live == "partial"

    def operations(self, place: Place, live: str, value: str) -> Sequence[str]:
        name = place.name
        found = [] if live.startswith("default") else [f"tc qdisc del dev {name} root handle c1a0:"]
        words = value.split()
        if words[0] == "htb":
            found.append(f"tc qdisc add dev {name} root handle c1a0: htb default 20")
            for group, (own, most, prio) in _classes(int(words[1]), int(words[2])).items():
                parent = handle_text(OURS if group == ALL else ALL)
                limits = f"rate {8 * own}bit ceil {8 * most}bit prio {prio}"
                found.append(f"tc class add dev {name} parent {parent} classid {handle_text(group)} htb {limits}")
            for word, _, order, _ in EF:
                match = "ip dsfield" if word == "ip" else "ip6 priority"
                found.append(f"tc filter add dev {name} parent c1a0: protocol {word} prio {order} u32"
                             f" match {match} 0xb8 0xfc flowid c1a0:10")  # fmt: skip
            if has_scheduler("fq"):
                found += [f"tc qdisc add dev {name} parent {handle_text(group)} fq" for group in (EXPRESS, BULK)]
        elif words[0] != "default":
            found.append(f"tc qdisc add dev {name} root handle c1a0: {words[0]}")
            if words[0] == "mq":
                found.append(f"tc qdisc add dev {name} parent c1a0:N {words[1]}   # for each queue N")
        return found


def _is_leaf(queue: Any, root: int) -> bool:
    parent = int(queue["parent"])
    return parent not in (0, ROOT_PARENT) and parent & 0xFFFF0000 == root and parent & 0xFFFF != 0


def _classes(rate: int, express: int) -> dict[int, tuple[int, int, int]]:
    """Rate, ceiling (bytes a second) and order of each class; HTB serves the lower order first when it lends."""
    whole = rate // 8
    first = whole * express // 100
    return {ALL: (whole, whole, 0), EXPRESS: (first, whole, 0), BULK: (whole - first, whole, 1)}


def _rate(group: Any, name: str, options: Any) -> int:
    wide = group.get_attr("TCA_OPTIONS").get_attr(f"TCA_HTB_{name}64")
    return int(wide or options[name.lower()])


def handle_text(number: int) -> str:
    """As tc writes it."""
    return f"{number >> 16:x}:{number & 0xFFFF:x}" if number & 0xFFFF else f"{number >> 16:x}:"


def _tc(*words: str) -> None:
    program = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise Trouble(ABSENT, "the program tc is missing", "apt install iproute2")
    run = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=TC_TIMEOUT_S, env={"LC_ALL": "C"}, check=False
    )
    if run.returncode == 0:
        return
    said = " ".join(run.stderr.split())
    what = f"tc {' '.join(words)}: {said}"
    if "not permitted" in said:
        raise Trouble(FORBIDDEN, what, "run it as root")
    if "Cannot find device" in said:
        raise Trouble(GONE, what)
    raise Trouble(MODULE if _UNKNOWN.search(said) else INVALID, what)
