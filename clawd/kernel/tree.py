# SPDX-License-Identifier: Apache-2.0
"""The slices whose weights clawd-kernel flips, and what each weighs when: read from weights.conf."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clawd import ini
from clawd.errors import HostError

FILE = Path(__file__).parent / "weights.conf"
WEIGHTS = (1, 10_000)
"""What the kernel takes."""
LEVELS = ("rest", "pressure", "first")
"""By level: each is more urgent than the one before."""


@dataclass(frozen=True)
class Branch:
    """A slice and its weight at each of LEVELS."""

    name: str
    weights: tuple[int, int, int]

    def aim(self, level: int, found: int) -> int:
        """What it shall weigh where `found` is what it weighs at rest: raised or lowered, never the other way."""
        wanted = self.weights[level]
        if level == 0 or wanted == self.weights[0]:
            return found
        return max(found, wanted) if wanted > self.weights[0] else min(found, wanted)


def load(path: Path = FILE) -> tuple[Branch, ...]:
    """Raises HostError when the file is not as it was installed."""
    found: dict[str, dict[str, int]] = {}
    try:
        for line in ini.read(path.read_bytes()):
            if isinstance(line, ini.Entry) and line.key in LEVELS and line.section:
                found.setdefault(line.section, {})[line.key] = int(line.value)
        made = [Branch(name, (rows["rest"], rows["pressure"], rows["first"])) for name, rows in found.items()]
    except (OSError, ValueError, KeyError) as error:
        raise HostError(f'"{path}" is not as it was installed: {error}', "install clawd again") from error
    if not made or not all(WEIGHTS[0] <= weight <= WEIGHTS[1] for branch in made for weight in branch.weights):
        raise HostError(f'"{path}" has no weights, or one beyond 1 to 10000', "install clawd again")
    return tuple(made)
