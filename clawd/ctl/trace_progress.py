# SPDX-License-Identifier: Apache-2.0
"""How far clawd is with one stream, looked at over and over in its page: clawd does nothing for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from clawd.core import ffi
from clawd.errors import ControlError
from clawd.page import FRESH_NS, Page

LOOK_NS = 1_000_000
"""Between two looks: no moment is known better than that."""


class Progress:
    """From entry to exit. Of a stream that is shown as `name` and `incarnation`; ask for its tokens in their order."""

    def __init__(self, runtime_dir: Path, name: str, incarnation: int) -> None:
        self._page = Page(runtime_dir)
        self._incarnation = incarnation
        self._index = self._find(name.encode())
        self._looked_ns = self._beat_ns = 0
        # Tokens before this one were there, and when they were not yet: one entry a change
        self._committed: deque[tuple[int, int]] = deque()
        self._released: deque[tuple[int, int]] = deque()
        self._first: tuple[int, int] | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _find(self, label: bytes) -> int | None:
        for index in range(int(self._page.header().streams.used)):
            row = self._page.stream(index)
            if row and row.incarnation == self._incarnation and bytes(ffi.buffer(row.name, row.name_len)) == label:
                return index
        return None

    def __enter__(self) -> Progress:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._page.close()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            try:
                self._look()
            except ControlError:
                return  # the page is damaged: who reads its figures says so
            time.sleep(LOOK_NS / 1e9)

    def _look(self) -> None:
        row: Any = None if self._index is None else self._page.stream(self._index)
        if not row or row.incarnation != self._incarnation:
            return
        now_ns, beat_ns = time.monotonic_ns(), int(self._page.header().beat_ns)
        committed, released = int(row.next_seq), int(row.released_seq)
        with self._lock:
            if self._first is None:
                self._first = committed, released
            else:
                for seen, first, until in zip(
                    (self._committed, self._released), self._first, (committed, released), strict=True
                ):
                    if until > (seen[-1][0] if seen else first):
                        seen.append((until, self._looked_ns))
            self._looked_ns, self._beat_ns = now_ns, beat_ns

    def of(self, seq: int) -> tuple[int | None, int | None]:
        """When a token was not yet committed, and not yet released, LOOK_NS before it was: CLOCK_MONOTONIC. None: not
        known, for it was before the first look, or clawd is another by now. Drops what is known of those before it.
        """
        with self._lock:
            if self._first is None or time.monotonic_ns() - self._beat_ns > FRESH_NS:
                return None, None
            found = []
            for seen, first in zip((self._committed, self._released), self._first, strict=True):
                while len(seen) > 1 and seen[0][0] <= seq:
                    seen.popleft()
                # One that has been read and is not seen here yet was so since the last look
                when_ns = seen[0][1] if seen and seen[0][0] > seq else self._looked_ns
                found.append(None if seq < first else when_ns)
            return found[0], found[1]
