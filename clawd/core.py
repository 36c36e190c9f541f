# SPDX-License-Identifier: Apache-2.0
"""The only importer of the built core. Long calls go through cffi, which gives up the GIL; the short producer calls go
through `held`, the same library by ctypes.PyDLL, which keeps it: giving it up costs up to a 5 ms switch interval.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from clawd._core import ffi, lib  # type: ignore[import-not-found]
from clawd.errors import CoreError

OPAQUE = {"claw_core", "claw_producer"}
"""Structs that Python knows by pointer only."""

__all__ = ["check", "ffi", "held", "lib"]


def _sweep() -> None:
    # cffi compares a struct's layout with the compiler's only at first use; a mismatch must stop the import instead
    for name in ffi.list_types()[1]:
        if name not in OPAQUE:
            ffi.sizeof(f"struct {name}")


_sweep()

held: Any = ctypes.PyDLL(__import__("clawd._core", fromlist=["__file__"]).__file__)


def check(result: int, what: str) -> int:
    """Pass a count through; turn -errno into a CoreError that says what was tried."""
    if result < 0:
        raise CoreError(f"cannot {what}: {os.strerror(-result)} ({errno.errorcode.get(-result, result)})", -result)
    return result
