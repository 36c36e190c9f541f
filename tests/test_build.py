# SPDX-License-Identifier: Apache-2.0
"""What is built: the core that the tests run on, and the wheel that people install."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import clawd.core
from clawd.csrc import build

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "clawd" / "csrc"
sanitized = "CLAWD_TEST_SANITIZED" in os.environ


def imported_core(*command: str) -> Path:
    program = "import clawd._core, sys; sys.stdout.write(clawd._core.__file__)"
    run = subprocess.run([sys.executable, *command, "-c", program], capture_output=True, text=True, check=True)
    return Path(run.stdout)


def test_the_core_has_the_declared_page_size() -> None:
    assert clawd.core.lib.CLAW_PAGE == 4096
    assert clawd.core.ffi.sizeof("struct claw_record") == clawd.core.lib.CLAW_RECORD_ALIGN


def test_the_core_knows_every_struct_that_is_declared() -> None:
    # import already compared each one's layout with the compiler's
    declared = {
        name for path in SOURCE.glob("*.cdef.h") for name in re.findall(r"^struct (\w+) \{", path.read_text(), re.M)
    }
    assert "claw_record" in declared
    assert declared == set(clawd.core.ffi.list_types()[1]) - clawd.core.OPAQUE
    assert [name for name in declared if clawd.core.ffi.sizeof(f"struct {name}") == 0] == []


def test_one_file_serves_every_later_python() -> None:
    assert imported_core().name == "_core.abi3.so"


def test_a_process_started_by_a_test_imports_the_same_core() -> None:
    core = imported_core()
    assert core == Path(sys.modules["clawd._core"].__file__ or "")
    assert (b"__asan_init" in core.read_bytes()) is sanitized


@pytest.mark.plain
@pytest.mark.skipif(sanitized, reason="a wheel is built without the sanitizers' preload")
def test_the_wheel_holds_the_modules_and_the_core_and_no_source(wheel: Path) -> None:
    version, *tags = wheel.stem.split("-")[1:]
    assert (version, tags[:2]) == (clawd.__version__, ["cp311", "abi3"])
    names = zipfile.ZipFile(wheel).namelist()
    assert {"clawd/__init__.py", "clawd/_core.abi3.so", "clawd/py.typed"} <= set(names)
    assert {f"clawd/ctl/demo/{text}.txt" for text in ("english", "chinese", "figures")} <= set(names)
    assert zipfile.ZipFile(wheel).read("clawd/clawd_ring.h").decode() == build.header()
    packed = [name for name in names if ".dist-info/" not in name]
    allowed = (
        ".py",
        ".abi3.so",
        "/py.typed",
        "/clawd_ring.h",
        ".txt",
        "/page.html",
        "/clawd.rules.yml",
        "/dashboard.json",
        ".conf",
    )
    assert [name for name in packed if not (name.startswith("clawd/") and name.endswith(allowed))] == []
