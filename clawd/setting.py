# SPDX-License-Identifier: Apache-2.0
"""What a setting is: how values of each kind are written, what a row says. config.py has the settings themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawd import units
from clawd.errors import ConfigError

PACES = ("off", "smooth", "steady")
"""How a stream's tokens are spread over time (csrc/pacer.cdef.h)."""
CONGESTION_CONTROLS = ("cubic", "reno", "bbr", "dctcp")
"""Of TCP, by the kernel's names."""
SHARED = ("runtime_dir", "tcp_fastopen", "keepalive")
"""Keys that the gateway goes by, as clawd does."""


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ConfigError(f'"{text}" is not a path', "write the path of a directory")
    return Path(text)


def _parse_listen(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if text.startswith("unix:") and len(text) > 5 and "\0" not in text:
        return text
    if colon and host and re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) and int(port) < 65536:
        return text
    raise ConfigError(f'"{text}" is not an address', "write HOST:PORT or unix:PATH")


def _parse_file(text: str) -> Path | None:
    return None if text == "off" else _parse_path(text)


def _parse_origins(text: str) -> tuple[str, ...]:
    origins = () if text == "off" else tuple(part.strip() for part in text.split(","))
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^\s/,*]+", origin):
            raise ConfigError(
                f'"{origin}" is not an origin', "write off, *, or https://chat.example, with commas between"
            )
    return origins


def _parse_texts(text: str) -> tuple[str, ...]:
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise ConfigError(f"{text[:60]} is not a list of texts", 'write JSON, as in ["###", "\\nUser:"], or []')
    return tuple(texts)


def _parse_prefix(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}_", text):
        raise ConfigError(f'"{text}" is not a prefix', "write small letters and digits that end in _, as in clawd_")
    return text


def _parse_word(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", text):
        raise ConfigError(f'"{text}" is not a name', "write small letters, digits and -")
    return text


def _parse_nodes(text: str) -> tuple[str, ...]:
    nodes = () if text == "off" else tuple(text.split())
    hint = "write tcp://HOST:PORT or the path of a runtime directory, or off"
    for node in nodes:
        if not re.fullmatch(r"tcp://[^\s/=]+:[0-9]{1,5}|/[^=]*", node):
            raise ConfigError(f'"{node}" is no clawd', hint)
    if not nodes and text != "off":
        raise ConfigError("no clawd is named", hint)
    return nodes


@dataclass(frozen=True)
class Kind:
    """How values of one sort are written; `allowed` where no bounds say it. `is_long`: they may be any length."""

    name: str
    parse: Callable[[str], Any]
    format: Callable[[Any], str]
    allowed: str = ""
    is_long: bool = False


DIRECTORY = Kind("DIR", _parse_path, str, is_long=True)
FILE = Kind("FILE", _parse_file, lambda value: "off" if value is None else str(value), "a file, or off", is_long=True)
LISTEN = Kind("ADDRESS", _parse_listen, str, "HOST:PORT or unix:PATH", is_long=True)
NODES = Kind(
    "NODES",
    _parse_nodes,
    lambda value: " ".join(value) or "off",
    "off, or tcp://HOST:PORT and directories",
    is_long=True,
)
ORIGINS = Kind("ORIGINS", _parse_origins, lambda value: ",".join(value) or "off", "off, * or origins", is_long=True)
PREFIX = Kind("PREFIX", _parse_prefix, str, "small letters, digits, _ at its end")
TEXTS = Kind("LIST", _parse_texts, lambda value: json.dumps(list(value)), "a list of texts, as JSON", is_long=True)
SIZE = Kind("SIZE", units.parse_bytes, units.format_bytes)
TIME = Kind("TIME", units.parse_duration, units.format_duration)
COUNT = Kind("N", units.parse_count, str)
RATE = Kind("N", units.parse_count, str)
PACE = Kind("off|smooth|steady", lambda text: units.parse_choice(text, PACES), str, "off, smooth or steady")
DSCP = Kind("DSCP", units.parse_dscp, units.format_dscp, "off, 0 to 63, or a name, as in ef")
CONGESTION = Kind(
    "NAME",
    lambda text: units.parse_choice(text, ("kernel", *CONGESTION_CONTROLS)),
    str,
    f"kernel, {', '.join(CONGESTION_CONTROLS[:-1])} or {CONGESTION_CONTROLS[-1]}",
)
ENDPOINTS = Kind(
    "ENDPOINTS",
    units.parse_endpoints,
    units.format_endpoints,
    "off, or HOST:PORT, several with spaces between",
    is_long=True,
)
NAMES = Kind("WHO", units.parse_names, units.format_names, "any, none, or users and @groups", is_long=True)
SWITCH = Kind("on|off", units.parse_switch, units.format_switch, "on or off")
WORD = Kind("NAME", _parse_word, str, "small letters, digits and -")


@dataclass(frozen=True)
class Setting:
    """One row. Bounds and `multiple` are written as people write values; `default` may be a function of the moment,
    which `variable` of the environment decides. `reload`: a reload applies it, else a restart is needed.
    """

    section: str
    key: str
    kind: Kind
    default: str | Callable[[], Any]
    help: str
    detail: str = ""
    low: str | None = None
    high: str | None = None
    multiple: str | None = None
    power_of_two: bool = False
    reload: bool = False
    variable: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def default_text(self) -> str:
        return self.default if isinstance(self.default, str) else self.kind.format(self.default())

    @property
    def allowed(self) -> str:
        """What it may be, in words, empty where anything goes."""
        if self.low and self.high:
            span = f"{self.low} to {self.high}"
        else:
            span = f"at least {self.low}" if self.low else f"at most {self.high}" if self.high else ""
        parts = ["a power of two" if self.power_of_two else "", span, f"a multiple of {self.multiple}"]
        return ", ".join(part for part in parts[: 3 if self.multiple else 2] if part) or self.kind.allowed

    @property
    def programs(self) -> tuple[str, ...]:
        """Whose flag it is."""
        if self.section == "gateway":
            return ("clawd-gateway",)
        return ("clawd", "clawd-gateway") if self.key in SHARED else ("clawd",)

    @property
    def applied(self) -> str:
        """What makes a changed value count."""
        return "reload" if self.reload else "restart"

    def default_value(self) -> Any:
        return self.kind.parse(self.default) if isinstance(self.default, str) else self.default()

    def raw(self, text: str) -> int | str:
        """For programs: bytes, ns, a count or true, else the text."""
        value = self.kind.parse(text)
        return value if isinstance(value, int) else text

    def parse(self, text: str, where: str) -> Any:
        """The value written as `text` at `where` (a flag, or a file's line). Raises ConfigError naming both."""
        try:
            value = self.kind.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", error.hint) from None
        self.check(value, where, text)
        return value

    def check(self, value: Any, where: str, text: str | None = None) -> None:
        """Raise ConfigError unless `value` keeps the bounds."""

        def number(bound: str) -> int:
            result: int = self.kind.parse(bound)
            return result

        good = (
            (self.low is None or value >= number(self.low))
            and (self.high is None or value <= number(self.high))
            and (self.multiple is None or value % number(self.multiple) == 0)
            and (not self.power_of_two or value.bit_count() == 1)
        )
        if not good:
            shown = text if text is not None else self.kind.format(value)
            raise ConfigError(f'{where}: "{shown}" is not allowed', f"it must be {self.allowed}")
