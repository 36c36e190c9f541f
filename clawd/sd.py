# SPDX-License-Identifier: Apache-2.0
"""Tells systemd how the service is doing. Without $NOTIFY_SOCKET each call does nothing; where it is set and cannot be
served, the call returns the reason, which belongs into the status.
"""

from __future__ import annotations

import os
import time


def _notify(state: str) -> str | None:
    if not os.environ.get("NOTIFY_SOCKET"):
        return None
    try:
        from systemd import daemon
    except ImportError:
        return "notify: no systemd-python, install Debian's python3-systemd"
    try:
        daemon.notify(state)
    except OSError as error:
        return f"notify: {error.strerror}"
    return None


def _line(text: str) -> str:
    # a line's end would start another assignment
    return " ".join(text.split())


def ready(status: str = "") -> str | None:
    """The sockets are open: whoever waited for clawd may go on. Returns why it could not be told, else None."""
    return _notify(f"READY=1\nSTATUS={_line(status)}")


def reloading() -> str | None:
    """The configuration is being read again. Followed by `ready`, whatever became of it."""
    # sd_notify(3): systemd takes a READY=1 for the answer to its own signal by this time
    return _notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping() -> str | None:
    return _notify("STOPPING=1")


def status(text: str) -> str | None:
    """One line for `systemctl status`."""
    return _notify(f"STATUS={_line(text)}")


def watchdog() -> str | None:
    """The loop turned. Due at least every `watchdog_interval_ns`."""
    return _notify("WATCHDOG=1")


def watchdog_interval_ns() -> int | None:
    """How often to call `watchdog`: half of what systemd waits for. None when it does not watch this process."""
    try:
        timeout_us = int(os.environ["WATCHDOG_USEC"])
        watched = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return timeout_us * 500 if timeout_us > 0 and watched == os.getpid() else None


class Heart:
    """Feeds the watchdog from a loop: only a turn that was done counts, and it is told no oftener than needed."""

    def __init__(self) -> None:
        self._interval_ns = watchdog_interval_ns()
        self._due_ns = 0

    def turned(self) -> None:
        """A turn of the loop is done."""
        if self._interval_ns is None:
            return
        now_ns = time.monotonic_ns()
        if now_ns >= self._due_ns:
            watchdog()
            # half of what is allowed between two, so that one turn may come late
            self._due_ns = now_ns + self._interval_ns // 2
