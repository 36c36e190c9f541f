# SPDX-License-Identifier: Apache-2.0
"""An engine told what to do on stdin, a line each: `open N`, `first` (a token for each that is open, and their end).
Says "done" after each.
"""

from __future__ import annotations

import sys
import time

from clawd import Producer


def main() -> None:
    opened = []
    with Producer(name="opens") as producer:
        print("done", flush=True)
        for line in sys.stdin:
            what, _, number = line.strip().partition(" ")
            if what == "open":
                opened += [producer.open(f"{time.monotonic_ns()}-{each}") for each in range(int(number))]
            else:
                for stream in opened:
                    stream.write("a token")
                    stream.close("stop")
                opened.clear()
            print("done", flush=True)


main()
