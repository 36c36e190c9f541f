# SPDX-License-Identifier: Apache-2.0
"""What clawd-kernel does before it serves, and clawd itself: tuning as the settings say. It keeps nobody from starting:
what fails is in the log.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection
from pathlib import Path

from clawd import log
from clawd.config import Config
from clawd.errors import AlreadyRunning, ClawdError
from clawd.kernel import profile, sched
from clawd.kernel.boost import Booster
from clawd.kernel.tuning import Tuning

PATIENCE_S = 10.0
"""How long a `clawctl tune` that is at work is waited for."""
PR_CAPBSET_DROP = 24
CAPABILITY_VERSION_3 = 0x20080522


def tune(config: Config, directory: Path) -> None:
    """Once a boot: what an admin changed since stays. What an earlier run left unfinished is put right in any case."""
    tuning = Tuning("clawd-kernel", directory)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            _tune(config, tuning)
            return
        except AlreadyRunning as error:
            if time.monotonic() > deadline:
                log.failure("not tuned", error)
                return
            time.sleep(0.1)
        except ClawdError as error:
            log.failure("not tuned", error)
            return


def _tune(config: Config, tuning: Tuning) -> None:
    if not config.tune and not os.path.lexists(tuning.journal.path):
        return  # and leaves no trace
    for outcome in tuning.recover():
        log.event("tune rolled back", place=outcome.place, result=outcome.result, value=outcome.value)
    if not config.tune or tuning.journal.profiles.get(tuning.namespace.cookie) == config.profile:
        return
    chosen = profile.load(config.profile)
    outcomes = tuning.apply(chosen)
    for outcome in outcomes:
        if outcome.result == "failed":
            log.warning("not tuned", place=outcome.place, error=outcome.why)
    done = sum(outcome.result == "done" for outcome in outcomes)
    log.event("tuned", profile=chosen.name, changed=done, failed=len(outcomes) - done)


def relax(booster: Booster) -> None:
    """Put back the weights that an earlier run left flipped. What is not known of them stays, and none is flipped."""
    try:
        for name in booster.recover():
            log.event("weight put back", slice=name)
    except ClawdError as error:
        log.failure("weights not put back, and none is flipped", error)


def take_slice(name: str) -> None:
    """That of the profile `name`, before this process has threads, which inherit it. It ends with them, so there is
    nothing to take back.
    """
    try:
        wish = next((wish for wish in profile.load(name).wishes if wish.kind == sched.KIND), None)
        if wish:
            sched.set_slice(0, int(wish.value))
            log.event("slice taken", slice_ns=int(wish.value))
    except ClawdError as error:
        log.failure("no slice of its own", error)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def keep_only(bits: Collection[int]) -> None:
    """This process's capabilities but these, numbered as in linux/capability.h, go for good. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for bit in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        if bit not in bits:
            libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(bit), 0, 0, 0)  # without CAP_SETPCAP: what bounds it, stays
    header, sets = _Header(CAPABILITY_VERSION_3, 0), (_Sets * 2)()
    if libc.capget(ctypes.byref(header), sets) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for word, found in enumerate(sets):
        kept = sum(1 << bit - 32 * word for bit in bits if bit // 32 == word)
        found.permitted &= kept
        found.effective &= kept
        found.inheritable = 0
    if libc.capset(ctypes.byref(header), sets) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
