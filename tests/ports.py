# SPDX-License-Identifier: Apache-2.0
"""Ports that are free on 127.0.0.1, two in a row: a bulk and an express lane's."""

from __future__ import annotations

import random
import socket


def pair() -> int:
    """The first of them. Nobody holds them until they are used: below the ports that the kernel gives out by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
