# SPDX-License-Identifier: Apache-2.0
"""What a token's class costs: the scan alone, and a record's whole way from ring to spool, in ns a token, for plain,
digit-heavy, punctuation-heavy and Chinese text. `python tests/bench/text.py --help` says how.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import cffi

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "plain": "The first thing that one sees on the way down to the river is a row of old poplars and behind it a ",
    "digits": "1,234.56 7.25 of 3.14159 and 2024-06-30 at 10:45 or 99.9 % of 16384 to 192.168.0.1 in 5.0 or 0.001; ",
    "punctuation": 'No! "Why?" (Yes.) Oh... "So?" he said. "Go!" - [Well?!] Hm. Eh? "A," one. \'Two.\' Six; ten: "No" ',
    "Chinese": "他说：“今天天气很好，我们去河边走走吧。”她想了想，问道：为什么不呢？于是两个人出门了！路上……没有人。",
}
LENGTHS = (3, 6, 3, 3, 9, 6)
"""Of the tokens: the same for every text, so that all copy the same; whole characters of Chinese."""
COUNT, STREAMS, RECORD = 1024, 8, 64
RING = COUNT * RECORD
CORE = ROOT / "clawd" / "_core.abi3.so"
LOOP = """
static uint32_t classify(const uint8_t *data, const uint32_t *ends, uint32_t count)
{
	struct claw_text text = { 0 };
	uint32_t sum = 0, start = 0;
	for (uint32_t i = 0; i < count; i++) {
		sum += claw_text_class(&text, data + start, ends[i] - start);
		start = ends[i];
	}
	return sum;
}
"""


def tokens(text: str, shift: int = 0) -> list[bytes]:
    """COUNT tokens; `shift`: cut so many bytes later."""
    data = text.encode()
    endless = data * (COUNT * max(LENGTHS) // len(data) + 2)
    ends = list(itertools.accumulate(itertools.islice(itertools.cycle(LENGTHS), COUNT), initial=shift))
    return [endless[start:end] for start, end in itertools.pairwise(ends)]


class Scan:
    """The scan alone, in a loop in C."""

    def __init__(self, scanner: Any, texts: list[bytes]) -> None:
        self.ffi, self.classify = scanner.ffi, scanner.lib.classify
        self.data = self.ffi.from_buffer("uint8_t[]", b"".join(texts))
        self.ends = self.ffi.new("uint32_t[]", list(itertools.accumulate(map(len, texts))))

    def __call__(self) -> int:
        start = time.perf_counter_ns()
        self.classify(self.data, self.ends, COUNT)
        return time.perf_counter_ns() - start


class Intake:
    """A ring that is filled again and again, and what one turn takes for all that it holds."""

    def __init__(self, core: Any, texts: list[bytes]) -> None:
        ffi, self.lib = core.ffi, core.lib
        limits = {"spool_bytes": 1 << 22, "stream_bytes": 1 << 18, "keep_ns": 1, "max_streams": 64, "max_rings": 1,
                  "max_connections": 1, "max_attachments": 1}  # fmt: skip
        self.core = self.lib.claw_core_create(ffi.new("struct claw_limits *", limits), -1, ffi.new("int *"))
        spool, data, ctl, event = (os.memfd_create(name) for name in ("spool", "data", "ctl", "event"))
        os.ftruncate(spool, limits["spool_bytes"])
        os.ftruncate(data, self.lib.CLAW_PAGE + RING)
        os.ftruncate(ctl, ffi.sizeof("struct claw_ctl"))
        assert self.lib.claw_core_map_spool(self.core, spool, limits["spool_bytes"]) == 0
        assert self.lib.claw_ring_add(self.core, data, ctl, os.eventfd(0, os.EFD_NONBLOCK), RING, 1, 1) == 0
        self.map = mmap.mmap(data, 0)
        for fd in (spool, data, ctl, event):
            os.close(fd)
        self.head, self.seq = 0, 1
        opens = [struct.pack("<QHHI", 0, 1, 0, 0) + b"%c" % (65 + i) for i in range(STREAMS)]
        self.fill([(self.lib.CLAW_OPEN, i, 0, data) for i, data in enumerate(opens)])
        self.turn()
        self.records = [(self.lib.CLAW_TOKEN, i % STREAMS, 1, texts[i // STREAMS]) for i in range(COUNT)]

    def fill(self, records: list[tuple[int, int, int, bytes]]) -> None:
        now = time.monotonic_ns()
        for kind, handle, count, data in records:
            at = self.lib.CLAW_PAGE + self.head % RING
            struct.pack_into("<IBBHQQII", self.map, at, len(data), kind, 0, handle, self.seq, now, count, 0)
            self.map[at + 32 : at + 32 + len(data)] = data
            self.head += RECORD
            self.seq += 1
        self.map[128:136] = struct.pack("<Q", self.head)

    def turn(self) -> int:
        now = time.monotonic_ns()
        start = time.perf_counter_ns()
        self.lib.claw_turn(self.core, now)
        return time.perf_counter_ns() - start

    def __call__(self) -> int:
        self.fill(self.records)
        took = self.turn()
        totals = self.lib.claw_totals(self.core)
        assert (totals.tokens % COUNT, totals.quarantined, totals.dropped) == (0, 0, 0)
        return took


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def scanner() -> Any:
    sys.path.insert(0, str(ROOT / "clawd" / "csrc"))
    from build import FLAGS, SOURCE  # type: ignore[import-not-found]

    ffi = cffi.FFI()
    ffi.cdef("uint32_t classify(const uint8_t *data, const uint32_t *ends, uint32_t count);")
    options = {"sources": [str(SOURCE / "text.c")], "include_dirs": [str(SOURCE)], "extra_compile_args": FLAGS}
    ffi.set_source("scanner", f'#include "text.h"\n{LOOP}', **options)
    with tempfile.TemporaryDirectory() as directory:
        return load("scanner", Path(ffi.compile(tmpdir=directory)))


def measure(subjects: dict[str, Callable[[], int]], rounds: int) -> dict[str, dict[str, float]]:
    """Each in turn, round after round; ns a token: median and quartiles, and the median of the ratio to the first."""
    took: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + rounds // 10):
        for name, subject in subjects.items():
            ns = subject() / COUNT
            if number >= rounds // 10:  # the first ones warm up
                took[name].append(ns)
    first = next(iter(took.values()))
    rows = {}
    for name, values in took.items():
        low, middle, high = quantiles(values, n=4)
        ratio = median(value / base for value, base in zip(values, first, strict=True))
        rows[name] = {"ns": middle, "low": low, "high": high, "ratio": ratio}
    return rows


Table = dict[str, dict[str, dict[str, float]]]


def compare(rounds: int, core: Path = CORE, against: Path | None = None) -> Table:
    """What each text costs in each part, in ns a token; the intake of another build beside that of `core`."""
    cuts = {name: tokens(text) for name, text in TEXTS.items()}
    cuts["Chinese, cut anywhere"] = tokens(TEXTS["Chinese"], shift=1)
    built = scanner()
    results = {"scan alone": measure({name: Scan(built, texts) for name, texts in cuts.items()}, rounds)}
    cores = {"intake": core} | ({"intake, other core": against} if against else {})
    modules = {what: load("clawd._core", path) for what, path in cores.items()}
    subjects = {(name, what): Intake(module, cuts[name]) for name in cuts for what, module in modules.items()}
    rows = measure({f"{what}: {name}": subject for (name, what), subject in subjects.items()}, rounds)
    for what in modules:
        results[what] = {name: rows[f"{what}: {name}"] for name in cuts}
        plain = results[what]["plain"]["ratio"]
        for row in results[what].values():
            row["ratio"] /= plain
    return results


def show(results: Table) -> str:
    lines = []
    for what, table in results.items():
        lines.append(f"{what.upper():28}     NS/TOKEN   QUARTILES      TO PLAIN")
        for name, row in table.items():
            lines.append(f"  {name:28} {row['ns']:10.2f}   {row['low']:.1f} to {row['high']:.1f}   {row['ratio']:6.3f}")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="what the class of a token costs")
    parser.add_argument(
        "--against", type=Path, metavar="CORE", help="the _core.abi3.so of another build, to set beside"
    )
    parser.add_argument("--core", type=Path, default=CORE, help="the build to measure")
    parser.add_argument("--rounds", type=int, default=400, help=f"of {COUNT} tokens each")
    options = parser.parse_args()
    print(show(compare(options.rounds, options.core, options.against)))


if __name__ == "__main__":
    main()
