# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: which one this thread is in, how to enter one, which there are."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from clawd.errors import HostError

SELF = Path("/proc/thread-self/ns/net")
NAMED = Path("/run/netns")
SO_NETNS_COOKIE = 71
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Namespace:
    """`cookie` is never used again, unlike `inode`, the number that tools show; where the kernel tells no cookie it is
    the inode. `is_host` None: init's cannot be seen.
    """

    cookie: int
    inode: int
    is_host: bool | None


def current() -> Namespace:
    inode = os.stat(SELF).st_ino
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            cookie = int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8), "little")
        except OSError:  # a kernel before 5.14
            cookie = inode
    try:
        is_host = os.stat("/proc/1/ns/net").st_ino == inode
    except OSError:
        is_host = None
    return Namespace(cookie, inode, is_host)


def enter(name: str) -> None:
    """This thread goes into the namespace `name`: one of `ip netns`, a number of /proc/*/ns/net, or pid:N.
    Raises HostError.
    """
    path = _find(name)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f'network namespace "{name}": {error.strerror}', "see: ip netns list, lsns -t net") from error
    try:
        if libc.setns(file, CLONE_NEWNET) != 0:
            raise HostError(f'network namespace "{name}": {os.strerror(ctypes.get_errno())}', "run it as root")
    finally:
        os.close(file)


def _find(name: str) -> Path:
    if re.fullmatch(r"[0-9]{1,20}", name):
        found = _places().get(int(name))
        if found:
            return found
    elif process := re.fullmatch(r"pid:([0-9]{1,10})", name):
        return Path("/proc", process[1], "ns/net")
    elif re.fullmatch(r"[^/\x00]{1,255}", name) and name not in (".", "..") and (NAMED / name).exists():
        return NAMED / name
    printable = "".join(char if char.isprintable() else "?" for char in name[:60])
    raise HostError(f'there is no network namespace "{printable}"', "see: ip netns list, lsns -t net")


def inodes() -> frozenset[int] | None:
    """Of all namespaces that a name, a mount or a process holds; None when not all of them can be seen."""
    try:
        found = set(_places(strict=True))
    except PermissionError:
        return None
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    return frozenset(found | {int(number) for number in re.findall(r" net:\[([0-9]+)\] ", mounts)})


def _places(*, strict: bool = False) -> dict[int, Path]:
    found = {}
    # glob's and not pathlib's, which fails on a process that ends meanwhile
    for path in map(Path, (*glob.glob(f"{NAMED}/*"), *glob.glob("/proc/[0-9]*/task/[0-9]*/ns/net"))):
        try:
            found[path.stat().st_ino] = path
        except PermissionError:
            if strict:
                raise
        except OSError:
            continue  # ended meanwhile
    return found
