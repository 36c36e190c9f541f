# SPDX-License-Identifier: Apache-2.0
"""Who a local peer is, from the kernel, and whether a list of users and groups has it. Supplementary groups do not show
in SO_PEERCRED.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

# asm-generic/socket.h, Linux 4.13; Python does not name it
SO_PEERGROUPS = 59
_GROUPS_FEW, _GROUPS_MAX = 64, 65_536
"""NGROUPS_MAX of linux/limits.h."""
ANY = "any"


class Who(NamedTuple):
    pid: int
    uid: int
    groups: frozenset[int] = frozenset()


def peer_of(connection: socket.socket) -> Who:
    """Who connected. Groups that cannot be had are none."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    for room in (_GROUPS_FEW, _GROUPS_MAX):
        try:
            found = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * room)
        except OSError as error:
            if error.errno == errno.ERANGE:
                continue
            break
        return Who(pid, uid, frozenset((gid, *struct.unpack(f"={len(found) // 4}I", found))))
    return Who(pid, uid, frozenset((gid,)))


def is_own(who: Who) -> bool:
    """Root and clawd's own user may do everything."""
    return who.uid in (0, os.geteuid())


def allows(names: Sequence[str], who: Who) -> bool:
    """Whether `names` (users, `@groups`, numbers of either, or `any`) have this peer. A name nobody has fits nobody."""
    return is_own(who) or any(_is(name, who) for name in names)


def may_read(readers: str, who: Who | None, key: str) -> bool:
    """Whether a stream's text of readers has a client: of this host `who`, by tcp one with the key of this name."""
    names = readers.split()
    if who is None:
        return bool(key) and f"key:{key}" in names
    return allows([name for name in names if not name.startswith("key:") and name not in ("any", "none")], who)


def _is(name: str, who: Who) -> bool:
    if name == ANY:
        return True
    try:
        if name.startswith("@"):
            group = name[1:]
            return (int(group) if group.isdigit() else grp.getgrnam(group).gr_gid) in who.groups
        return (int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid) == who.uid
    except KeyError:
        return False
