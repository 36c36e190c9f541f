# SPDX-License-Identifier: Apache-2.0
"""The words of tuning: a place in the kernel that holds a value, a lever that reads and writes such places, a change of
one. Values are canonical text, so that a journal, a table and a comparison need to know no kind.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from clawd.errors import HostError


@dataclass(frozen=True)
class Place:
    """`kind` names the lever. `netns` is the cookie of the network namespace it is in, None where it is the host's.
    `identity` tells one device or thread from a later one of the same name.
    """

    kind: str
    name: str
    netns: int | None = None
    identity: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Change:
    """`old` is what the place holds, `new` what it shall hold; both read back equal. `operations` and `undo` are what
    is done, as an admin would type it; a disruptive one drops what is queued or holds traffic up for a moment.
    """

    place: Place
    old: str
    new: str
    operations: tuple[str, ...] = ()
    undo: tuple[str, ...] = ()
    is_disruptive: bool = False


OK, DIFFERS, NOT_HERE = "ok", "differs", "n/a"


@dataclass(frozen=True)
class Row:
    """One place as it is and as it shall be. `state` is OK, DIFFERS or NOT_HERE: what a profile asks for and this host
    cannot have, or what somebody else has taken, is no drift; `why` says which. `takes` is whom a new value reaches,
    `scope` how far it goes, `moot` what makes it do nothing, `boot` what the next boot sets, `reason` the profile's.
    """

    place: Place
    wanted: str | None
    live: str | None
    state: str
    why: str = ""
    takes: str = ""
    scope: str = "network namespace"
    moot: str = ""
    boot: str = ""
    reason: str = ""
    change: Change | None = None


class Trouble(HostError):
    """A place that cannot be read or written; `why` is one of the words below."""

    def __init__(self, why: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.why = why


ABSENT = "absent"
"""This kernel or namespace does not have it."""
READ_ONLY = "read_only"
FORBIDDEN = "forbidden"
INVALID = "invalid"
"""The kernel refuses the value."""
MODULE = "module_missing"
GONE = "gone"
"""The device, thread or namespace is another one by now."""
FOREIGN = "foreign"
"""It holds what somebody else put there."""

_BY_ERRNO = {
    errno.ENOENT: ABSENT,
    errno.ENOTDIR: ABSENT,
    errno.EOPNOTSUPP: ABSENT,
    errno.ENODEV: GONE,
    errno.ESRCH: GONE,
    errno.EROFS: READ_ONLY,
    errno.EPERM: FORBIDDEN,
    errno.EACCES: FORBIDDEN,
    errno.EINVAL: INVALID,
    errno.ERANGE: INVALID,
}
_TOLD = {
    ABSENT: "this kernel or network namespace has it not",
    READ_ONLY: "/proc/sys is read-only here",
    FORBIDDEN: "not permitted",
    INVALID: "the kernel refuses the value",
    GONE: "it is gone",
}


def trouble(error: OSError, what: str) -> Trouble:
    """An error of the kernel, classified."""
    why = _BY_ERRNO.get(error.errno or 0, FORBIDDEN)
    told = _TOLD[why] if error.errno in _BY_ERRNO else os.strerror(error.errno or 0)
    return Trouble(why, f"{what}: {told}", "run it as root, on the host" if why in (READ_ONLY, FORBIDDEN) else None)


class Lever(Protocol):
    """Reads and writes places of one kind. Both raise Trouble."""

    def read(self, place: Place) -> str:
        """The canonical value; raises Trouble(GONE) when the place is not the one it was."""

    def write(self, place: Place, value: str) -> None:
        """Bring the place to `value`, from whatever it holds."""

    def is_partial(self, live: str) -> bool:
        """Whether `live` is what a write of ours leaves when it dies half-way."""

    def operations(self, place: Place, live: str, value: str) -> Sequence[str]:
        """What `write` would do, as commands."""
