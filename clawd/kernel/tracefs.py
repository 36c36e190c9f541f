# SPDX-License-Identifier: Apache-2.0
"""Tracepoints: where the kernel describes them, and programs attached to them for as long as a descriptor is open."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from pathlib import Path

from clawd.errors import HostError
from clawd.kernel import lockdown

PLACES = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
# Of sched.h, mount.h and perf_event.h
_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_PERF_TYPE_TRACEPOINT, _PERF_FLAG_CLOEXEC = 2, 8
_SET_BPF, _ENABLE = 0x40042408, 0x2400
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}.get(platform.machine(), 241)
_ATTR_LEN = 128

_libc = ctypes.CDLL(None, use_errno=True)


def _failed(what: str) -> HostError:
    locked = lockdown.mode()
    if locked and ctypes.get_errno() in (errno.EPERM, errno.EACCES):
        return HostError(f"{what}: lockdown={locked}", lockdown.HINT)
    return HostError(f"{what}: {os.strerror(ctypes.get_errno())}", "as root, with CAP_SYS_ADMIN")


def ready() -> None:
    """See to it that this process sees tracefs. Where nobody mounted it, in a mount namespace of its own: the host
    stays as it is.
    """
    if any((place / "events").is_dir() for place in PLACES):
        return
    if _libc.unshare(_CLONE_NEWNS) < 0:
        raise _failed("cannot have mounts of my own")
    if _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) < 0:
        raise _failed("cannot have mounts of my own")
    if _libc.mount(b"tracefs", os.fsencode(PLACES[0]), b"tracefs", 0, None) < 0:
        raise _failed("cannot mount tracefs")


def number(event: str) -> int:
    """The kernel's number of a tracepoint, as in `net/net_dev_xmit`; 0 when it has none of that name."""
    for place in PLACES:
        try:
            return int((place / "events" / event / "id").read_text())
        except OSError:
            continue
    return 0


def attach(program: int, event: str, of: int) -> int:
    """Run `program` at the tracepoint `event`, whose number is `of`, until the returned descriptor is closed."""
    if not of:
        # A locked kernel shows none, not even to root
        if locked := lockdown.mode():
            raise HostError(f"the kernel does not show tracepoint {event}: lockdown={locked}", lockdown.HINT)
        raise HostError(f"this kernel has no tracepoint {event}")
    attr = ctypes.create_string_buffer(struct.pack("=IIQ", _PERF_TYPE_TRACEPOINT, _ATTR_LEN, of), _ATTR_LEN)
    # The processor named is of no account: a program at a tracepoint runs on all
    fd = int(_libc.syscall(_PERF_EVENT_OPEN, attr, -1, 0, -1, _PERF_FLAG_CLOEXEC))
    if fd < 0:
        raise _failed(f"cannot open tracepoint {event}")
    try:
        fcntl.ioctl(fd, _SET_BPF, program)
        fcntl.ioctl(fd, _ENABLE, 0)
    except OSError:
        os.close(fd)
        raise
    return fd
