# SPDX-License-Identifier: Apache-2.0
"""The slice of threads (EEVDF, kernels from 6.12 on): how long one runs before another's turn, hence how soon after it
wakes up. As text it is nanoseconds. A thread may set its own without privilege; it ends with the thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from clawd.kernel.change import ABSENT, FOREIGN, GONE, INVALID, Place, Trouble, trouble

KIND = "slice"
SCHED_OTHER = 0
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


class _Attributes(ctypes.Structure):
    """struct sched_attr, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise Trouble(ABSENT, f"not known here how to set a slice on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        number = ctypes.get_errno()
        raise trouble(OSError(number, os.strerror(number)), "slice of a thread")


def _get(thread: int) -> _Attributes:
    found = _Attributes()
    size = ctypes.c_uint(ctypes.sizeof(found))
    _call(1, ctypes.c_int(thread), ctypes.byref(found), size, ctypes.c_uint(0))
    return found


def set_slice(thread: int, value_ns: int) -> None:
    """0 is the kernel's own. Thread 0 is this one. Raises Trouble, also where the kernel heeds no slice."""
    wanted = _get(thread)  # nice and policy stay
    if wanted.policy != SCHED_OTHER:
        raise Trouble(FOREIGN, f"thread {thread} has scheduling policy {wanted.policy}, which has no such slice")
    wanted.runtime = value_ns
    wanted.size = ctypes.sizeof(wanted)
    _call(0, ctypes.c_int(thread), ctypes.byref(wanted), ctypes.c_uint(0))
    if value_ns and _get(thread).runtime != value_ns:
        raise Trouble(ABSENT, "the kernel heeds no slice of a thread", "use a kernel from 6.12 on")


def threads(pid: int) -> list[Place]:
    """Raises Trouble when there is no such process."""
    try:
        names = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError as error:
        raise Trouble(GONE, f"there is no process {pid}") from error
    found = []
    for name in names:
        try:
            found.append(Place(KIND, name, None, _started(int(name))))
        except Trouble:
            continue  # ended meanwhile
    return found


def _started(thread: int) -> str:
    """When, in ticks since the boot: a later thread of the same number has another."""
    try:
        text = Path(f"/proc/{thread}/stat").read_text(errors="replace")
    except OSError as error:
        raise Trouble(GONE, f"thread {thread} has ended") from error
    return text.rpartition(")")[2].split()[19]


def scheduler(root: Path = Path("/")) -> str:
    """The BPF scheduler that decides instead of EEVDF, empty when none does."""
    try:
        if (root / "sys/kernel/sched_ext/state").read_text().strip() != "enabled":
            return ""
        return (root / "sys/kernel/sched_ext/root/ops").read_text().strip() or "sched_ext"
    except OSError:
        return ""


class Slices:
    """The lever. A place's name is the thread's number."""

    def read(self, place: Place) -> str:
        self._check(place)
        found = _get(int(place.name))
        if found.policy != SCHED_OTHER:
            raise Trouble(FOREIGN, f"thread {place.name} has scheduling policy {found.policy}")
        if not found.runtime:
            raise Trouble(ABSENT, "the kernel tells no slice of a thread", "use a kernel from 6.12 on")
        return str(found.runtime)

    def _check(self, place: Place) -> None:
        if _started(int(place.name)) != place.identity:
            raise Trouble(GONE, f"thread {place.name} has ended")

    def write(self, place: Place, value: str) -> None:
        self._check(place)
        thread = int(place.name)
        # The kernel's own is restored as such, so that it goes on following the kernel
        set_slice(thread, 0)
        if self.read(place) != value:
            set_slice(thread, int(value))
        if self.read(place) != value:
            raise Trouble(INVALID, f"thread {place.name} keeps a slice of {self.read(place)} ns")

    def is_partial(self, live: str) -> bool:
        return False

    def operations(self, place: Place, live: str, value: str) -> Sequence[str]:
        return (f"sched_setattr({place.name}, SCHED_OTHER, runtime={value})",)
