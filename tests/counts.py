# SPDX-License-Identifier: Apache-2.0
"""What the proofs counted: a test says how many of what it went through; the run's end shows the sums."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

LINE = re.compile(r"counted: (\d+) (.+)")
_here: Counter[str] = Counter()


def count(number: int, what: str) -> None:
    """Add to what this run went through, for example `count(715, "kill points")`."""
    assert number > 0, f"no {what} at all"
    _here[what] += number
    if path := os.environ.get("CLAWD_TEST_COUNTS"):
        with open(path, "a") as file:  # one short write in append mode: runs may share the file
            file.write(f"{number} {what}\n")


def count_printed(output: str) -> None:
    """Add what a native program printed, a line `counted: NUMBER WHAT` each."""
    for number, what in LINE.findall(output):
        count(int(number), what)


def of_this_run() -> dict[str, int]:
    return dict(_here)


def summed(path: Path) -> dict[str, int]:
    """What all runs together left in a CLAWD_TEST_COUNTS file."""
    sums: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        number, what = line.split(" ", 1)
        sums[what] += int(number)
    return dict(sums)


def text(sums: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in sorted(sums.items()))


if __name__ == "__main__":
    import sys

    print(text(summed(Path(sys.argv[1]))))
