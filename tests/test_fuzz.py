# SPDX-License-Identifier: Apache-2.0
"""Hostile rings, flow messages and frames, made by a fuzzer, on the core under ASan and UBSan. CLAWD_TEST_SECONDS makes
each run longer, CLAWD_TEST_SEED another; what reaches new code is worth keeping in tests/fuzz/corpus.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from counts import count_printed
from cprogram import CORE, CSRC, TESTS, compile_c, run_c
from fuzz import seeds

pytestmark = pytest.mark.plain  # it compiles what it fuzzes

FUZZ = TESTS / "fuzz"
SECONDS = os.environ.get("CLAWD_TEST_SECONDS", "2")
SEED = os.environ.get("CLAWD_TEST_SEED", "1")
SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
PARTS = {"fuzz_core": (*CORE, "frame"), "fuzz_restore": (*CORE, "frame"), "fuzz_frame": ("frame",)}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("fuzz")

    def compiled(source: Path) -> Path:
        # the engine itself is not led by its own coverage
        cover = () if source.name == "engine.c" else ("-fsanitize-coverage=trace-pc",)
        return compile_c(directory / f"{source.stem}.o", [source], *SANITIZE, *cover, "-c")

    sources = [FUZZ / "engine.c", *(FUZZ / f"{name}.c" for name in PARTS), *(CSRC / f"{n}.c" for n in (*CORE, "frame"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {path.stem: path for path in pool.map(compiled, sources)}
    return {
        name: compile_c(directory / name, [objects[part] for part in ("engine", name, *parts)], *SANITIZE, "-pthread")
        for name, parts in PARTS.items()
    }


def fuzz(programs: dict[str, Path], target: str, directory: Path, *options: str) -> None:
    corpus = seeds.write(target, directory / "corpus")
    for path in (FUZZ / "corpus" / target).glob("*"):
        shutil.copy(path, corpus)
    current = directory / "current"
    arguments = [f"-seed={SEED}", f"-seconds={SECONDS}", f"-current={current}", *options, str(corpus)]
    run = run_c(
        programs[target],
        *arguments,
        timeout=float(SECONDS) + 50,
        ASAN_OPTIONS="abort_on_error=1:detect_leaks=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    if run.returncode:
        raw = current.read_bytes()
        data = raw[4 : 4 + int.from_bytes(raw[:4], "little")]
        pytest.fail(f"{target} {' '.join(options)} with the input {data.hex()}:\n{run.stderr}")
    count_printed(run.stdout)
    print(run.stdout)


@pytest.mark.parametrize("target", PARTS)
def test_no_input_breaks_the_core(target: str, programs: dict[str, Path], tmp_path: Path) -> None:
    fuzz(programs, target, tmp_path)


def test_no_change_under_its_eyes_breaks_the_core(programs: dict[str, Path], tmp_path: Path) -> None:
    fuzz(programs, "fuzz_core", tmp_path, "-disturb")


def test_the_engine_finds_its_way_into_the_code(programs: dict[str, Path], tmp_path: Path) -> None:
    # without seeds: what is found is led by coverage, so an engine that is blind finds next to nothing
    (tmp_path / "none").mkdir()
    run = run_c(programs["fuzz_core"], "-seconds=1", str(tmp_path / "none"), ASAN_OPTIONS="detect_leaks=0")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split(" cases, ")[1].split()[0]) > 50, run.stdout
