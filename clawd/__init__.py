# SPDX-License-Identifier: Apache-2.0
"""clawd relays LLM tokens from inference processes to the people reading them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clawd import errors

if TYPE_CHECKING:
    from clawd.aconsumer import AsyncConsumer  # type: ignore[import-not-found, unused-ignore]
    from clawd.consumer import Consumer  # type: ignore[import-not-found, unused-ignore]
    from clawd.producer import Producer

__all__ = ["AsyncConsumer", "Consumer", "Producer", "__version__", "errors"]

__version__ = "0.1.0"

_HOMES = {"AsyncConsumer": "clawd.aconsumer", "Consumer": "clawd.consumer", "Producer": "clawd.producer"}


def __getattr__(name: str) -> Any:
    # on first use: a producer's process needs neither pyzmq nor the time to import it
    if name not in _HOMES:
        raise AttributeError(f"module 'clawd' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
