# SPDX-License-Identifier: Apache-2.0
"""The BPF programs without root and without bcc: that they are C, and what is held of them in Python."""

from __future__ import annotations

import os
import re
import subprocess
from array import array
from pathlib import Path

import pytest

from clawd.kernel import bpf, hists, shaper, stamps

pytestmark = pytest.mark.plain
STUBS = Path(__file__).parent / "stubs"
SOURCES = sorted(path.name for path in bpf.SOURCES.glob("*.bpf.c"))
KNOBS = {"shaper.bpf.c": ["-DCLAW_ROWS=64"], "tracer.bpf.c": ["-DCLAW_PID=1"],
         "stamps.bpf.c": ["-DCLAW_PID=1", *(f"-D{name}=8" for name in (*stamps.MEMBERS, "CLAW_INFO"))]}  # fmt: skip


def check(path: Path, *knobs: str) -> subprocess.CompletedProcess[str]:
    command = ["gcc", "-fsyntax-only", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter",
               "-Wno-unknown-pragmas", "-Wno-sign-compare", f"-I{STUBS}", f"-I{path.parent}", f"-I{bpf.SOURCES}",
               "-include", str(STUBS / "bcc.h"), *knobs, str(path)]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SOURCES)
def test_programs_are_c(name: str) -> None:
    run = check(bpf.SOURCES / name, *KNOBS[name])
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", SOURCES)
def test_the_check_would_see_a_mistake_and_a_knob_that_is_missing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text((bpf.SOURCES / name).read_text().replace("return 1;", "return one;", 1))
    assert check(tmp_path / name, *KNOBS[name]).returncode != 0
    if KNOBS[name]:
        assert "#error" in check(bpf.SOURCES / name).stderr


@pytest.mark.parametrize("name", SOURCES)
def test_programs_take_no_struct_of_the_kernel(name: str) -> None:
    text = (bpf.SOURCES / name).read_text()
    assert set(re.findall(r"#include <(.*)>", text)) <= {"uapi/linux/bpf.h", "uapi/linux/if_ether.h"}
    assert not re.search(r"kprobe|probe_read|struct (sock|sk_buff|task_struct)\b", text)


def test_headers_are_unpacked_where_nobody_else_can_have_put_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr(bpf, "whose_headers", lambda release: release)
    with bpf.kernel_headers():
        place = Path(os.environ["TMPDIR"])
        assert place.stat().st_mode & 0o777 == 0o700
        assert not list(place.iterdir())
    assert not place.exists()


def _names(header: str, prefix: str) -> list[str]:
    text = re.sub(r"/\*.*?\*/", "", (bpf.SOURCES / header).read_text(), flags=re.S)
    return [name.lower() for name in re.findall(rf"\b{prefix}([A-Z_]+)\b(?= ?=|,)", text)]


def test_the_shapers_counters_and_options_have_their_names() -> None:
    names = [name for name in _names("shaper.h", "CLAW_") if not name.startswith("no_") and name != "counters"]
    assert tuple(names) == shaper.COUNTERS
    assert tuple(_names("shaper.h", "CLAW_NO_")) == shaper.OPTIONS


def test_the_tracers_stages_classes_and_counters_have_their_names() -> None:
    assert tuple(_names("tracer.h", "CLAW_STAGE_")) == hists.STAGES
    assert tuple(name for name in _names("tracer.h", "CLAW_CLASS_")) == hists.CLASSES
    assert f"CLAW_FLAG_LEVEL {stamps.FLAG_LEVEL:#x}" in (bpf.SOURCES / "tracer.h").read_text()
    calls = re.findall(r"\(void \*\)(0x[0-9a-f]+); /\* (\w+) \*/", (bpf.SOURCES / "stamps.bpf.c").read_text())
    assert {int(number, 16): name for number, name in calls} == stamps.CALLS
    names = _names("tracer.h", "CLAW_")
    assert tuple(names[names.index("writes") : names.index("counters")]) == hists.COUNTERS


def test_quantiles_are_within_a_bucket_of_the_truth() -> None:
    for value in (0, 1, 15, 16, 31, 32, 33, 1000, 123_456, 20_000_000, 2**38 + 12345):
        bucket = _bucket(value)
        assert abs(hists.middle(bucket) - value) <= value / 16, value
        counts = array("Q", [0] * hists.BUCKETS)
        counts[bucket] = 7
        assert hists.Hist(counts).quantile(0.99) == hists.middle(bucket)
    counts = array("Q", [0] * hists.BUCKETS)
    counts[3], counts[10], counts[15] = 50, 49, 1
    assert [hists.Hist(counts).quantile(share) for share in (0.5, 0.51, 0.99, 0.991, 1.0)] == [3, 10, 10, 15, 15]
    assert hists.Hist().quantile(0.5) == 0


def _bucket(value: int) -> int:
    """As bucket_of in ebpf/tracer.bpf.c."""
    if value < 16:
        return value
    octave = value.bit_length() - 1 - 4
    return min(hists.BUCKETS - 1, (octave << 4) + (value >> octave))
