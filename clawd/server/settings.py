# SPDX-License-Identifier: Apache-2.0
"""The settings in effect, and what became of reloads: all of a new configuration counts, or none of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clawd import log, protocol
from clawd.config import AT_MOST, DAEMON_SETTINGS, ROWS, Config
from clawd.errors import ClawdError, ConfigErrors
from clawd.sources import Configuration, Origin, Sources


def merge(old: Configuration, new: Configuration) -> tuple[Config, tuple[str, ...]]:
    """What of `new` can count at once, and the keys that wait for a restart."""
    changed = {row.key for row in DAEMON_SETTINGS if getattr(new.config, row.key) != getattr(old.config, row.key)}
    at_once = {key for key in changed if ROWS[key].reload}
    for low, high in AT_MOST:
        # Good together when both have come, which needs a restart: neither goes ahead
        values = [getattr((new if key in at_once else old).config, key) for key in (low, high)]
        if values[0] > values[1]:
            at_once -= {low, high}
    config = replace(old.config, **{key: getattr(new.config, key) for key in at_once})
    return config, tuple(row.key for row in DAEMON_SETTINGS if row.key in changed - at_once)


class Settings:
    """`config` is what counts now; `error` is why the last reload did not."""

    def __init__(self, configuration: Configuration, sources: Sources) -> None:
        self._sources = sources
        self._current = configuration
        self._generation = 1
        self._loaded_ns = time.monotonic_ns()
        self._pending: tuple[str, ...] = ()
        self.error: str | None = None
        self._for_now: dict[str, tuple[str, str]] = {}

    @property
    def config(self) -> Config:
        return self._current.config

    def set_for_now(self, key: str, value: str, origin: str) -> None:
        """Something else than the configuration made this value count, until that is read again."""
        self._for_now[key] = value, origin

    def reload(self, apply: Callable[[Config], None]) -> protocol.Reloaded:
        """Read the sources again. `apply` makes a Config count, or raises ClawdError: then the old one stays."""
        try:
            new = self._sources.load()
            config, pending = merge(self._current, new)
            apply(config)
        except ClawdError as error:
            return self._refuse(
                [str(each) for each in error.errors] if isinstance(error, ConfigErrors) else [str(error)]
            )
        old = self._current
        changed = [row.key for row in DAEMON_SETTINGS if getattr(config, row.key) != getattr(old.config, row.key)]
        origins: dict[str, Origin] = {key: (old if key in pending else new).origins[key] for key in ROWS}
        self._current = Configuration(config, origins, new.files)
        self._for_now.clear()
        self._generation += 1
        self._loaded_ns = time.monotonic_ns()
        self._pending = pending
        self.error = None
        log.event(
            "configuration reloaded",
            generation=self._generation,
            changed=",".join(changed) or None,
            pending_restart=",".join(pending) or None,
        )
        return protocol.Reloaded(self._generation, changed, list(pending), [])

    def _refuse(self, errors: list[str]) -> protocol.Reloaded:
        self.error = errors[0] if len(errors) == 1 else f"{errors[0]} (and {len(errors) - 1} more)"
        log.warning("configuration not reloaded, the old one stays", errors=len(errors), first=errors[0])
        return protocol.Reloaded(self._generation, [], list(self._pending), errors)

    def state(self) -> dict[str, Any]:
        """For `status`. `loaded_ns` is CLOCK_MONOTONIC."""
        return {
            "generation": self._generation,
            "loaded_ns": self._loaded_ns,
            "error": self.error,
            "pending_restart": list(self._pending),
        }

    def in_effect(self) -> protocol.InEffect:
        """For `clawctl config show`."""
        sources, config = self._sources, self.config
        return protocol.InEffect(
            **self.state(),
            file=str(sources.file) if sources.file else None,
            flags=dict(sources.flags),
            values={row.key: row.kind.format(getattr(config, row.key)) for row in DAEMON_SETTINGS}
            | {key: value for key, (value, _) in self._for_now.items()},
            origins={row.key: str(self._current.origins[row.key]) for row in DAEMON_SETTINGS}
            | {key: origin for key, (_, origin) in self._for_now.items()},
        )
