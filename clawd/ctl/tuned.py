# SPDX-License-Identifier: Apache-2.0
"""Whether what `clawctl tune` or clawd-kernel applied still stands: for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clawd.ctl.check import Finding
from clawd.errors import ClawdError
from clawd.kernel import profile
from clawd.kernel.journal import DIRECTORY
from clawd.kernel.tuning import Tuning


def find_tuned(directory: Path = DIRECTORY) -> Iterator[Finding]:
    """Nothing where nothing was applied."""
    try:
        tuning = Tuning("clawctl doctor", directory)
        entries, _ = tuning.journal.load()
        if not entries:
            return
        name = tuning.journal.profiles.get(tuning.namespace.cookie, profile.DEFAULT)
        _, drifts = tuning.verify(profile.load(name), entries)
    except ClawdError as error:
        yield Finding("tuned", "info", f"what was tuned is not known: {error.message}", error.hint, "tune")
        return
    applied = {entry.place for entry in entries}
    gone = [f"{drift.place.name} ({drift.by or drift.what})" for drift in drifts if drift.place in applied]
    if gone:
        what = f"no longer as {name} was applied: {', '.join(gone)}"
        yield Finding("tuned", "warn", what, "clawctl tune apply, or revert", "tune")
    else:
        yield Finding(
            "tuned", "ok", f"all {len(applied)} places that were tuned are as {name} has them", feature="tune"
        )
