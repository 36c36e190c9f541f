# SPDX-License-Identifier: Apache-2.0
"""How many descriptors a daemon needs for its peers, and how many it lets libzmq take beyond them."""

from __future__ import annotations

RELAY_SLACK = 64
"""Connections of the relay beyond max_clients: a client that comes again may be here twice for a moment."""
RELAY_AHEAD = 1024
"""Connections that libzmq may have accepted before clawd has seen them."""
STRANGERS_MAX = 256
"""Connections of one tcp lane that have said nothing yet."""


def files_needed(max_producers: int, max_clients: int, endpoints: int = 0) -> int:
    """Descriptors of a daemon with so many peers.

    A producer takes its control connection, pidfd and eventfd, and one more while a ring is handed over; a client its
    control and its relay connection, or by tcp its two lanes; clawd itself some 64. On top comes what libzmq may accept
    before it is stopped.
    """
    lanes = 1 + 2 * endpoints
    peers = 4 * max_producers + 2 * max_clients
    return peers + lanes * (RELAY_SLACK + RELAY_AHEAD) + 2 * endpoints * STRANGERS_MAX + 64
