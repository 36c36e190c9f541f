# SPDX-License-Identifier: Apache-2.0
"""Profiles: named sets of wishes, read from files: clawd's own, and before them an admin's in /etc/clawd/profiles."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clawd import ini, units
from clawd.errors import ClawdError, ConfigError, ConfigErrors
from clawd.kernel.knobs import KNOBS

OURS = Path(__file__).parent / "profiles"
ADMINS = Path("/etc/clawd/profiles")
SYSCTLS = "60-clawd.conf"
DEFAULT = "low-latency"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
LEAVE = "leave"
FILE_MAX = 1 << 16
QDISCS = ("fq", "fq_codel", "pfifo", "htb")
SLICES = ("clawd.slice", "clawd_background.slice")
SLICE_NS = (100_000, 100_000_000)
RATE = (1_000_000, 30_000_000_000)
"""Bits a second. Beyond it the rate does not fit what pyroute2 0.7 sends."""


@dataclass(frozen=True)
class Wish:
    """What a profile asks for: a canonical value, or for a sysctl what its knob makes of it."""

    kind: str
    name: str
    value: str
    reason: str
    origin: str


@dataclass(frozen=True)
class Profile:
    name: str
    about: str
    wishes: tuple[Wish, ...]
    files: tuple[Path, ...]


@dataclass
class _Draft:
    about: str = ""
    wishes: dict[tuple[str, str], Wish] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)


def names(admins: Path = ADMINS, ours: Path = OURS) -> list[str]:
    """All that can be loaded, as far as their names go."""
    found = {path.stem for place in (admins, ours) for path in place.glob("*.conf")} - {Path(SYSCTLS).stem}
    return sorted(name for name in found if NAME.fullmatch(name))


def load(name: str, admins: Path = ADMINS, ours: Path = OURS) -> Profile:
    """Raises ConfigErrors with all that is wrong."""
    draft = _Draft()
    _take(draft, ours / SYSCTLS, {"": "sysctl"}, admins, ours, ())
    _take_named(draft, name, admins, ours, ())
    if draft.errors:
        raise ConfigErrors(draft.errors)
    return Profile(name, draft.about, tuple(draft.wishes.values()), tuple(draft.files))


def _take_named(draft: _Draft, name: str, admins: Path, ours: Path, above: tuple[str, ...]) -> None:
    known = names(admins, ours)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
        raise ConfigErrors([ConfigError(f'no profile "{ini.shown(name)}"', f"{hint}; your own go into {admins}")])
    if name in above:
        raise ConfigErrors([ConfigError(f"profile {name} is its own base", "take one base out")])
    path = admins / f"{name}.conf"
    sections = {section: section for section in ("profile", "sysctl", "qdisc", "sched", "weight")}
    _take(draft, path if path.exists() else ours / path.name, sections, admins, ours, (*above, name))


def _take(
    draft: _Draft, path: Path, sections: Mapping[str, str], admins: Path, ours: Path, above: tuple[str, ...]
) -> None:
    try:
        with open(path, "rb") as stream:
            data = stream.read(FILE_MAX + 1)
    except OSError as error:
        raise ConfigErrors([ConfigError(f"{path}: cannot be read: {error.strerror}", "is the path right?")]) from error
    if len(data) > FILE_MAX:
        raise ConfigErrors([ConfigError(f"{path}: longer than {FILE_MAX >> 10}k", "a profile is a few lines")])
    draft.files.append(path)
    reasons = _reasons(data)
    queue: dict[str, str] = {}
    for line in ini.read(data):
        where = f"{path}:{line.line}"
        if isinstance(line, ini.Flaw):
            draft.errors.append(ConfigError(f"{where}: {line.message}", line.hint))
        elif isinstance(line, ini.Header):
            if line.section not in sections:
                what = f"{where}: no section [{ini.shown(line.section)}]"
                draft.errors.append(ConfigError(what, f"there is {', '.join(sections)}"))
        elif (section := sections.get(line.section or "")) is not None:
            try:
                if (section, line.key) == ("profile", "base"):
                    _take_named(draft, line.value, admins, ours, above)
                elif section == "qdisc":
                    queue[line.key] = line.value
                    _set_queue(draft, queue, reasons.get(line.line, ""), where)
                else:
                    _set(draft, section, line, reasons.get(line.line, ""), where)
            except ConfigErrors:
                raise
            except ClawdError as error:
                told = f"{where}: {ini.shown(line.key)}: {error.message}"
                draft.errors.append(ConfigError(told, error.hint, file=str(path), line=line.line, key=line.key))
        elif line.section is None:
            draft.errors.append(
                ConfigError(f"{where}: {ini.shown(line.key)} is of no section", "write [sysctl] above it")
            )


def _reasons(data: bytes) -> dict[int, str]:
    """By line, the comment right above it, or above the lines right before it."""
    found, comment, is_open = {}, "", False
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        text = line.strip()
        if text.startswith("#"):
            comment = f"{comment} {text.lstrip('# ')}".strip() if is_open else text.lstrip("# ")
            is_open = True
        elif text:
            found[number], is_open = comment, False
        else:
            comment, is_open = "", False
    return found


def _set(draft: _Draft, section: str, line: ini.Entry, reason: str, where: str) -> None:
    key, value = line.key, line.value
    if section == "profile":
        if key != "about":
            raise ConfigError("no such setting", "there is about, base")
        draft.about = value
        return
    place = {"sysctl": ("sysctl", key), "sched": ("slice", "clawd"), "weight": ("weight", key)}[section]
    check = {"sysctl": _sysctl, "sched": _slice, "weight": _weight}[section]
    canonical = check(key, value)
    draft.wishes.pop(place, None)
    if value != LEAVE:
        draft.wishes[place] = Wish(*place, canonical, reason, where)


def _sysctl(key: str, value: str) -> str:
    knob = KNOBS.get(key)
    if knob is None:
        near = difflib.get_close_matches(key, KNOBS, 1)
        raise ConfigError(
            "no sysctl that can be tuned", f"did you mean {near[0]}?" if near else "see clawctl tune show"
        )
    if value != LEAVE and not knob.allows(value):
        raise ConfigError(f'"{ini.shown(value)}" is not allowed', f"it must be {knob.allowed}, or {LEAVE}")
    return value if knob.low is None or value == LEAVE else str(int(value, 0))


def _slice(key: str, value: str) -> str:
    if key != "slice":
        raise ConfigError("no such setting", "there is slice")
    if value == LEAVE:
        return value
    ns = units.parse_duration(value)
    if not SLICE_NS[0] <= ns <= SLICE_NS[1]:
        raise ConfigError(f'"{ini.shown(value)}" is not allowed', f"it must be 100us to 100ms, or {LEAVE}")
    return str(ns)


def _weight(key: str, value: str) -> str:
    if key not in SLICES:
        raise ConfigError("no slice of clawd's", f"there is {', '.join(SLICES)}")
    if value != LEAVE and not (value.isascii() and value.isdigit() and 1 <= int(value[:6]) <= 10000):
        raise ConfigError(f'"{ini.shown(value)}" is not allowed', f"it must be 1 to 10000, or {LEAVE}")
    return value


def _set_queue(draft: _Draft, queue: dict[str, str], reason: str, where: str) -> None:
    """`kind`, and for htb `rate` and `express`; the wish is made anew with each."""
    unknown = next((key for key in queue if key not in ("kind", "rate", "express")), "")
    if unknown:
        raise ConfigError("no such setting", "there is kind, rate, express")
    kind = queue.get("kind", "")
    place = ("qdisc", "*")
    draft.wishes.pop(place, None)
    if kind == LEAVE or not kind:
        return
    if kind not in QDISCS:
        raise ConfigError(f'"{ini.shown(kind)}" is not allowed', f"it must be {', '.join(QDISCS)}, or {LEAVE}")
    value = kind
    if kind == "htb":
        value = f"htb {parse_rate(queue.get('rate', '1gbit'))} {_percent(queue.get('express', '30%'))}"
    draft.wishes[place] = Wish(*place, value, reason, where)


def parse_rate(text: str) -> int:
    """Bits a second, as in 500mbit or 2gbit."""
    found = re.fullmatch(r"([0-9]{1,6})([mg])bit", text)
    rate = int(found[1]) * {"m": 10**6, "g": 10**9}[found[2]] if found else 0
    if not RATE[0] <= rate <= RATE[1]:
        raise ConfigError(f'"{ini.shown(text)}" is no rate', "it must be 1mbit to 30gbit")
    return rate


def _percent(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]?)%", text)
    if not found or int(found[1]) > 90:
        raise ConfigError(f'"{ini.shown(text)}" is no share', "it must be 1% to 90%")
    return int(found[1])
