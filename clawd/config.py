# SPDX-License-Identifier: Apache-2.0
"""Every setting of clawd: one row each, from which flags, help, checks and the README's table follow."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from clawd import __version__, units
from clawd.errors import ConfigError


def default_runtime_dir() -> Path:
    """$CLAWD_RUNTIME_DIR, else /run/clawd: where daemon, producers and clients meet."""
    return Path(os.environ.get("CLAWD_RUNTIME_DIR") or "/run/clawd")


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise ConfigError(f'"{text}" is not a path', "write the path of a directory")
    return Path(text)


@dataclass(frozen=True)
class Kind:
    """How values of one sort are written."""

    name: str
    parse: Callable[[str], Any]
    format: Callable[[Any], str]


DIRECTORY = Kind("DIR", _parse_path, str)
SIZE = Kind("SIZE", units.parse_bytes, units.format_bytes)
TIME = Kind("TIME", units.parse_duration, units.format_duration)
COUNT = Kind("N", units.parse_count, str)


@dataclass(frozen=True)
class Setting:
    """One row. Bounds and `multiple` are written as people write values; `default` may be a function of the moment."""

    section: str
    key: str
    kind: Kind
    default: str | Callable[[], Any]
    help: str
    low: str | None = None
    high: str | None = None
    multiple: str | None = None
    power_of_two: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def default_text(self) -> str:
        return self.default if isinstance(self.default, str) else self.kind.format(self.default())

    @property
    def allowed(self) -> str:
        """The bounds in words, empty where there are none."""
        if self.low and self.high:
            span = f"{self.low} to {self.high}"
        else:
            span = f"at least {self.low}" if self.low else f"at most {self.high}" if self.high else ""
        parts = ["a power of two" if self.power_of_two else "", span, f"a multiple of {self.multiple}"]
        return ", ".join(part for part in parts[: 3 if self.multiple else 2] if part)

    def default_value(self) -> Any:
        return self.kind.parse(self.default) if isinstance(self.default, str) else self.default()

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


def _row(section: str, kind: Kind, default: str | Callable[[], Any], help: str, **bounds: Any) -> Any:
    row = Setting(section, "", kind, default, help, **bounds)
    return field(default_factory=row.default_value, metadata={"row": row})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a clawd runs with: sizes in bytes, times in ns. Checked when made; raises ConfigError."""

    runtime_dir: Path = _row("daemon", DIRECTORY, default_runtime_dir, "directory of the lock and the sockets")  # noqa: RUF009 - a field, made anew each time
    buffer_size: int = _row(
        "stream", SIZE, "128k", "ring of a producer that asks for no size", low="4k", high="64M", power_of_two=True
    )
    spool_bytes: int = _row(
        "stream", SIZE, "64M", "memory for the tokens of all streams", low="1M", high="1T", multiple="4k"
    )
    stream_bytes: int = _row(
        "stream", SIZE, "4M", "memory one stream may hold for late or slow readers", low="16k", high="1T"
    )
    keep: int = _row("stream", TIME, "60s", "how long an ended stream can still be read", high="24h")
    max_streams: int = _row("stream", COUNT, "16384", "streams at once, ended ones included", low="1", high="1048576")
    max_producers: int = _row("stream", COUNT, "64", "producers at once", low="1", high="4096")
    max_clients: int = _row("stream", COUNT, "1024", "connections of clients at once", low="1", high="65536")
    max_attachments: int = _row("stream", COUNT, "65536", "readings at once, over all clients", low="1", high="1048576")

    def __post_init__(self) -> None:
        for row in SETTINGS:
            row.check(getattr(self, row.key), row.key)
        if self.stream_bytes > self.spool_bytes:
            raise ConfigError(
                f'stream_bytes: "{units.format_bytes(self.stream_bytes)}" is more than all streams have',
                f"it must be at most spool_bytes, {units.format_bytes(self.spool_bytes)}",
            )


def files_needed(max_producers: int, max_clients: int) -> int:
    """Descriptors of a daemon with so many peers.

    A producer takes its control connection, pidfd and eventfd, and one more while a ring is handed over; a client its
    control and its relay connection; clawd itself some 64.
    """
    return 4 * max_producers + 2 * max_clients + 64


def _settings() -> tuple[Setting, ...]:
    named = []
    for column in fields(Config):
        row: Setting = column.metadata["row"]
        named.append(Setting(**{**row.__dict__, "key": column.name}))
    return tuple(named)


SETTINGS = _settings()
"""Every row, in the order of help and README."""


def configure(texts: Mapping[str, tuple[str, str]]) -> Config:
    """A Config from `key: (text, where it was written)`; a key that is missing has its default. Raises ConfigError."""
    rows = {row.key: row for row in SETTINGS}
    return Config(**{key: rows[key].parse(text, where) for key, (text, where) in texts.items()})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_arguments(arguments: Sequence[str]) -> Config:
    """The Config that command-line `arguments` ask for. Raises ConfigError; --help and --version print and exit."""
    parser = _Parser(
        prog="clawd",
        usage="clawd [--SETTING VALUE]...",
        description="Relay LLM tokens from inference processes to clients. Runs in the foreground; SIGTERM stops it.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=79),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", help="show the version and exit", version=f"clawd {__version__}")
    groups = {row.section: parser.add_argument_group(row.section) for row in SETTINGS}
    for row in SETTINGS:
        text = f"{row.help} (default {row.default_text}{f'; {row.allowed}' if row.allowed else ''})"
        groups[row.section].add_argument(row.flag, dest=row.key, metavar=row.kind.name, help=text)
    given = vars(parser.parse_args(arguments))
    return configure({row.key: (given[row.key], row.flag) for row in SETTINGS if given[row.key] is not None})
