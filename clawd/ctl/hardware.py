# SPDX-License-Identifier: Apache-2.0
"""The hardware that clawd was meant for beside that of this host: for information, never a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from clawd.ctl.check import Finding

ROOT = Path("/")
_MEMORY_TYPES = {0x18: "DDR3", 0x1A: "DDR4", 0x1E: "LPDDR4", 0x22: "DDR5", 0x23: "LPDDR5"}
"""SMBIOS 3.6, 7.18.2."""


def find_hardware(root: Path = ROOT) -> Iterator[Finding]:
    for check, found, wanted in (
        ("cores", cores(root), "3.5 GHz"),
        ("ram", memory(root), "DDR4-3200"),
        ("network", network(root), "10 GbE"),
        ("disk", disk(root), "NVMe"),
    ):
        yield Finding(check, "info", f"{found}; recommended: {wanted}", feature="speed")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a link that is down has no speed, a machine no such file
        return ""


def cores(root: Path) -> str:
    text = _read(root / "proc/cpuinfo")
    count = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    top = [_read(path).strip() for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/cpuinfo_max_freq")]
    rates = [int(khz) // 1000 for khz in top if khz.isdigit()]
    rates = rates or [int(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*(\d+)", text, re.MULTILINE)]
    if not rates:
        return f"{count or 'no known'} cores of unknown speed"
    return f"{count} cores of {max(rates) / 1000:.3g} GHz"


def memory(root: Path) -> str:
    """What the firmware says of the modules; root alone may read it."""
    modules = set()
    for path in root.glob("sys/firmware/dmi/entries/17-*/raw"):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if len(data) < 0x17 or not int.from_bytes(data[0x0C:0x0E], "little"):
            continue  # an empty slot
        speed = int.from_bytes(data[0x15:0x17], "little")
        if len(data) >= 0x22:
            speed = int.from_bytes(data[0x20:0x22], "little") or speed  # what it runs at
        modules.add((speed, _MEMORY_TYPES.get(data[0x12], "memory")))
    if not modules:
        return "memory of unknown speed: no word of it from the firmware, or not to this user"
    speed, kind = min(modules)
    return f"{kind}-{speed}"


def network(root: Path) -> str:
    rates = [text for path in root.glob("sys/class/net/*/speed") if (text := _read(path).strip()).isdigit()]
    if not rates:
        return "no network link of known speed"
    best = max(map(int, rates))
    return f"a network link of {best / 1000:.3g} Gbit/s"


def disk(root: Path) -> str:
    names = sorted(path.name for path in root.glob("sys/block/nvme*"))
    return f"NVMe: {', '.join(names)}" if names else "no NVMe disk"
