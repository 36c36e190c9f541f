# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: defaults, `clawd.conf`, its drop-ins, flags; later ones win. Gives all of it or none, with
all that is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from clawd import __version__, ini
from clawd.config import ROWS, SETTINGS, Config, Setting, conflicts
from clawd.errors import ConfigError, ConfigErrors

DEFAULT_FILE = Path("/etc/clawd/clawd.conf")
FILE_MAX = 1 << 18
ERRORS_MAX = 50
"""Errors told at once."""
SECTIONS = tuple(dict.fromkeys(row.section for row in SETTINGS))


@dataclass(frozen=True)
class Origin:
    """Where a value was set. As text: `default`, `--keep`, `$CLAWD_RUNTIME_DIR` or `/etc/clawd/clawd.conf:4`."""

    name: str
    line: int | None = None

    @property
    def is_default(self) -> bool:
        """Neither in a file nor a flag."""
        return self.line is None and not self.name.startswith("--")

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(frozen=True)
class Configuration:
    """A Config, and where each key of it was set."""

    config: Config
    origins: Mapping[str, Origin]
    files: tuple[Path, ...] = ()
    """Those that were read, in order."""


@dataclass
class _Draft:
    """What has been gathered so far; later values take the place of earlier ones."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    errors: list[ConfigError] = field(default_factory=list)

    def take(self, row: Setting, text: str, origin: Origin) -> None:
        file = None if origin.line is None else origin.name
        # A value too long to be shown is too long for anything but a path
        text = text if row.kind.is_long else ini.shown(text)
        try:
            self.values[row.key] = row.parse(text, f"{origin}: {row.key}" if file else origin.name)
        except ConfigError as error:
            where: dict[str, Any] = {"file": file, "line": origin.line, "key": row.key, "value": text}
            self.errors.append(ConfigError(error.message, error.hint, **where))
        self.origins[row.key] = origin

    def complain(self, origin: Origin, message: str, hint: str, entry: ini.Entry | None = None) -> None:
        key, value = (ini.shown(entry.key), ini.shown(entry.value)) if entry else (None, None)
        where: dict[str, Any] = {"file": origin.name, "line": origin.line, "key": key, "value": value}
        self.errors.append(ConfigError(f"{origin}: {message}", hint, **where))


def nearest(word: str, words: Sequence[str]) -> str:
    """What to say to a word that is none of `words`."""
    near = difflib.get_close_matches(word.lower().replace("-", "_"), words, 1)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(words)}"


def drop_ins(file: Path) -> list[Path]:
    """`clawd.conf.d/*.conf` beside `clawd.conf`, in the order of their names. Raises OSError."""
    directory = Path(f"{file}.d")
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [directory / name for name in sorted(names) if name.endswith(".conf") and not name.startswith(".")]


def _open(path: str, flags: int) -> int:
    # A pipe without a writer must not hang the daemon
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _read(path: Path) -> bytes:
    """The file's bytes. Raises ConfigError for what is no file of bearable size; /dev/null is an empty one."""
    name = ini.printable(str(path))
    try:
        with open(path, "rb", opener=_open) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if not stat.S_ISREG(mode) and not os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull)):
                raise ConfigError(f"{name}: not a regular file", "give the path of a clawd.conf", file=name)
            data = stream.read(FILE_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot be read: {error.strerror}", "is the path right, and may clawd read it?", file=name
        ) from error
    if len(data) > FILE_MAX:
        raise ConfigError(f"{name}: longer than {FILE_MAX >> 10}k", "a clawd.conf is a few lines", file=name)
    return data


def _take_file(draft: _Draft, path: Path) -> None:
    lines: dict[str, int] = {}
    for found in ini.read(_read(path)):
        origin = Origin(ini.printable(str(path)), found.line)
        if isinstance(found, ini.Flaw):
            draft.complain(origin, found.message, found.hint)
        elif isinstance(found, ini.Header):
            if found.section not in SECTIONS:
                draft.complain(origin, f"no section [{ini.shown(found.section)}]", nearest(found.section, SECTIONS))
        elif found.section is None or found.section in SECTIONS:  # else its header was complained about
            row = ROWS.get(found.key)
            if row is None:
                draft.complain(
                    origin, f"{ini.shown(found.key)}: no such setting", nearest(found.key, tuple(ROWS)), found
                )
            elif row.section != found.section:
                place = f"in section [{found.section}]" if found.section else "before the first section"
                draft.complain(origin, f"{row.key}: it stands {place}", f"it belongs below [{row.section}]", found)
            elif row.key in lines:
                message = f'{row.key}: "{ini.shown(found.value)}" comes after line {lines[row.key]} has set it'
                draft.complain(origin, message, "keep one of the two", found)
            else:
                lines[row.key] = found.line
                draft.take(row, found.value, origin)


@dataclass(frozen=True)
class Sources:
    """`file` as --config gives it; None: DEFAULT_FILE, which may be missing. `flags`: text by key."""

    file: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def main_file(self) -> Path:
        return self.file or DEFAULT_FILE

    def files(self) -> Iterator[Path]:
        """The files to read, in order. Raises OSError."""
        if self.file or os.path.lexists(DEFAULT_FILE):
            yield self.main_file
        yield from drop_ins(self.main_file)

    def load(self) -> Configuration:
        """Read everything anew. Raises ConfigErrors with all that is wrong, at most ERRORS_MAX."""
        draft = _Draft()
        for row in SETTINGS:
            draft.values[row.key] = row.default_value()
            from_variable = row.variable and os.environ.get(row.variable)
            draft.origins[row.key] = Origin(f"${row.variable}" if from_variable else "default")
        read: list[Path] = []
        try:
            for path in self.files():
                read.append(path)
                try:
                    _take_file(draft, path)
                except ConfigError as error:
                    draft.errors.append(error)
        except OSError as error:
            text = f"{error.filename}: cannot be read: {error.strerror}"
            draft.errors.append(ConfigError(text, "may clawd read this directory?", file=str(error.filename)))
        for key, text in self.flags.items():
            draft.take(ROWS[key], text, Origin(ROWS[key].flag))
        errors = draft.errors or list(conflicts(draft.values, draft.origins))
        if len(errors) > ERRORS_MAX:
            more = ConfigError(f"and {len(errors) - ERRORS_MAX} errors more", "mend these first")
            errors = [*errors[:ERRORS_MAX], more]
        if errors:
            raise ConfigErrors(errors)
        return Configuration(Config(**draft.values), draft.origins, tuple(read))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


DESCRIPTIONS = {
    "clawd": "Relay LLM tokens from inference processes to clients. Runs in the foreground; SIGTERM stops it, SIGHUP"
    " has it read its files again. Flags win over files.",
    "clawd-gateway": "Serve clawd's streams over HTTP, as Server-Sent Events and WebSocket, and its figures to"
    " Prometheus. Runs in the foreground; SIGTERM lets streams end, then stops it. Flags win over files.",
}


def make_parser(program: str = "clawd") -> argparse.ArgumentParser:
    """Of a program's command line: a flag for each of its settings."""
    parser = _Parser(
        prog=program,
        usage=f"{program} [--config FILE] [--SETTING VALUE]...",
        description=DESCRIPTIONS[program],
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=79),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", help="show the version and exit", version=f"{program} {__version__}"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"the file of settings, with its drop-ins FILE.d/*.conf (default {DEFAULT_FILE}, where there is one)",
    )
    rows = [row for row in SETTINGS if program in row.programs]
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(row.section for row in rows)}
    for row in rows:
        text = f"{row.help} (default {row.default_text}{f'; {row.allowed}' if row.allowed else ''})"
        groups[row.section].add_argument(row.flag, dest=row.key, metavar=row.kind.name, help=text)
    return parser


def parse_arguments(arguments: Sequence[str]) -> Sources:
    """The sources that command-line `arguments` name. Raises ConfigError; --help and --version print and exit."""
    return sources_of(vars(make_parser().parse_args(arguments)))


def sources_of(given: Mapping[str, Any]) -> Sources:
    """The sources that parsed flags name. Raises ConfigError."""
    file = given["config"]
    if file == "":
        raise ConfigError('--config: "" is not a path', "give the path of a clawd.conf")
    return Sources(
        Path(file).absolute() if file else None,
        {row.key: given[row.key] for row in SETTINGS if given.get(row.key) is not None},
    )
