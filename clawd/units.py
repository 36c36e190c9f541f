# SPDX-License-Identifier: Apache-2.0
"""Sizes, durations, counts and switches as people write them: text to int or bool, and back without loss."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clawd.errors import ConfigError

BYTES = {"": 1, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
SWITCH = {"on": True, "off": False}

# 18 digits are more than any quantity here and keep a hostile text from becoming a huge number
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)


def _quantity(text: str, units: Mapping[str, int], what: str, hint: str) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    size = next((size for name, size in units.items() if match and match[2].lower() == name.lower()), None)
    if match is None or size is None:
        raise ConfigError(f'"{text}" is not a {what}', hint)
    whole, _, part = match[1].partition(".")
    value, rest = divmod(int(whole + part) * size, int("1" + "0" * len(part)))
    if rest:
        raise ConfigError(f'"{text}" is too fine for a {what}', hint)
    return value


def parse_bytes(text: str) -> int:
    """Bytes in `128k`, `64M`, `1.5G` or `4096`; a k is 1,024. Raises ConfigError."""
    return _quantity(text, BYTES, "size", "write digits, then k, M, G, T or nothing, as in 128k")


def parse_duration(text: str) -> int:
    """Nanoseconds in `50ms`, `15s`, `1.5min`; only 0 needs no unit. Raises ConfigError."""
    if text.strip() == "0":
        return 0
    return _quantity(text, NANOSECONDS, "duration", "write digits, then ns, us, ms, s, min or h, as in 50ms")


def parse_count(text: str) -> int:
    """A whole number, not below 0. Raises ConfigError."""
    return _quantity(text, {"": 1}, "count", "write digits only, as in 1024")


def parse_switch(text: str) -> bool:
    """True for `on`, False for `off`. Raises ConfigError."""
    value = SWITCH.get(text.strip())
    if value is None:
        raise ConfigError(f'"{text}" is not a switch', "write on or off")
    return value


def parse_choice(text: str, choices: tuple[str, ...]) -> str:
    """One of some words. Raises ConfigError."""
    value = text.strip()
    if value not in choices:
        raise ConfigError(f'"{text}" is none of them', f"write {' or '.join(choices)}")
    return value


DSCP = {"off": 0, "le": 1, "va": 44, "ef": 46}
"""Names that RFCs give to values of the field, besides those of classes."""
DSCP |= {f"cs{number}": 8 * number for number in range(1, 8)}
DSCP |= {f"af{group}{drop}": 8 * group + 2 * drop for group in range(1, 5) for drop in range(1, 4)}


def parse_dscp(text: str) -> int:
    """0 to 63 in `ef`, `af41`, `46`; 0 for `off`. Raises ConfigError."""
    word = text.strip().lower()
    value = int(word) if word.isascii() and word.isdigit() and len(word) <= 2 else DSCP.get(word)
    if value is None or value > 63:
        raise ConfigError(f'"{text}" is no DSCP', "write 0 to 63, or a name, as in ef, or off")
    return value


def format_dscp(value: int) -> str:
    return next((name for name, number in DSCP.items() if number == value), str(value))


def _format(value: int, units: Mapping[str, int]) -> str:
    fitting = [(size, name) for name, size in units.items() if value % size == 0 and value >= size]
    size, name = max(fitting)
    return f"{value // size}{name}"


def format_bytes(value: int) -> str:
    """The shortest text from which `parse_bytes` reads `value` again: 131072 is `128k`."""
    return _format(value, BYTES) if value else "0"


def format_duration(value_ns: int) -> str:
    """The shortest text from which `parse_duration` reads `value_ns` again: 50000000 is `50ms`."""
    return _format(value_ns, NANOSECONDS) if value_ns else "0"


_NAME = re.compile(r"@?[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?", re.ASCII)


def parse_names(text: str) -> tuple[str, ...]:
    """Users and `@groups`, by name or number, with spaces between; or `any`, or `none`. Raises ConfigError."""
    names = text.split()
    hint = "write users and @groups with spaces between, or any, or none"
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f'"{name}" is no user and no @group', hint)
    if not names or (len(names) > 1 and {"any", "none"} & set(names)):
        raise ConfigError(f'"{text}" is no list of users', hint)
    return () if names == ["none"] else tuple(names)


def format_names(value: tuple[str, ...]) -> str:
    return " ".join(value) or "none"


def parse_endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """(host, port) pairs in `10.0.0.1:7400 [::1]:7400`, none for `off`. Raises ConfigError."""
    if text.strip() == "off":
        return ()
    found = []
    for part in text.split():
        host, colon, port = part.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
        if not (colon and host and 1 <= number <= 65_534) or (":" in host) != part.startswith("["):
            raise ConfigError(f'"{part}" is not an endpoint', "write HOST:PORT, as in 127.0.0.1:7400, or off")
        found.append((host, number))
    if not found:
        raise ConfigError(f'"{text}" is not an endpoint', "write HOST:PORT, as in 127.0.0.1:7400, or off")
    return tuple(found)


def format_endpoints(value: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in value) or "off"


def format_switch(value: bool) -> str:
    return "on" if value else "off"
