# SPDX-License-Identifier: Apache-2.0
"""Builds the core as a cffi extension in API mode, from the *.cdef.h that the C compiler reads too: one declaration for
both. `python clawd/csrc/build.py [--sanitize] [--define NAME[=VALUE]]… DIRECTORY` compiles into DIRECTORY/clawd/.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import cffi

SOURCE = Path(__file__).resolve().parent
# In the order of their dependence: a later noun's struct may hold an earlier one's.
NOUNS = (
    "ring",
    "frame",
    "compact",
    "producer",
    "guard",
    "failpoint",
    "hash",
    "drain",
    "hist",
    "pacer",
    "timers",
    "page",
    "text",
    "spool",
    "stream",
    "keep",
    "grace",
    "first",
    "ways",
    "outbox",
    "lanes",
    "readers",
    "pacing",
    "hints",
    "pack",
    "share",
    "intake",
    "check",
    "recover",
    "adopt",
    "show",
    "wait",
    "turn",
    "sent",
)
FLAGS = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fvisibility=hidden",
         # cffi's generated wrappers, not ours: unused parameters and strict prototypes of the CPython headers
         "-Wno-unused-parameter", "-Wno-missing-field-initializers"]  # fmt: skip
SANITIZE = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
            # Python's own flags give signed overflow a meaning, which would hide it
            "-fno-wrapv"]  # fmt: skip


def declarations(layout: str | None = None) -> str:
    """The text cffi reads: every *.cdef.h that exists, in order. `layout` as CLAW_TEST_LAYOUT in ring.h."""
    files = [SOURCE / f"{noun}.cdef.h" for noun in NOUNS]
    text = "\n".join(path.read_text() for path in files if path.exists())
    return text if layout is None else re.sub(r"\bCLAW_LAYOUT = \d+", f"CLAW_LAYOUT = {layout}", text)


def header() -> str:
    """clawd_ring.h as one file without includes of ours: what an engine in C, C++, Rust or Go vendors."""

    def inline(match: re.Match[str]) -> str:
        return (SOURCE / match[1]).read_text()

    text = (SOURCE / "clawd_ring.h").read_text()
    return re.sub(r'^#include "([a-z_.]+)"\n', inline, text, flags=re.MULTILINE)


def sources() -> list[str]:
    return [str(SOURCE / f"{noun}.c") for noun in NOUNS if (SOURCE / f"{noun}.c").exists()]


def builder(*, sanitize: bool = False, defines: tuple[str, ...] = ()) -> cffi.FFI:
    """The extension `clawd._core`, not compiled yet."""
    macros = [(name, value if given else None) for name, given, value in (row.partition("=") for row in defines)]
    ffi = cffi.FFI()
    ffi.cdef(declarations(dict(macros).get("CLAW_TEST_LAYOUT")))
    includes = "\n".join(f'#include "{noun}.h"' for noun in NOUNS if (SOURCE / f"{noun}.h").exists())
    ffi.set_source(
        "clawd._core",
        includes,
        sources=sources(),
        include_dirs=[str(SOURCE)],
        define_macros=[("_GNU_SOURCE", None), *macros],
        py_limited_api=True,
        extra_compile_args=FLAGS + (SANITIZE if sanitize else []),
        extra_link_args=SANITIZE[1:2] if sanitize else [],
    )
    return ffi


def main() -> None:
    parser = argparse.ArgumentParser(description="build clawd's core into DIRECTORY/clawd/")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    parser.add_argument("--define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro to define")
    options = parser.parse_args()
    package, scratch = options.directory / "clawd", options.directory / ".build"
    package.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(exist_ok=True)
    ffi = builder(sanitize=options.sanitize, defines=tuple(options.define))
    # built elsewhere: objects land below their source's full path; then moved: a running clawd may map the old one
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        try:
            built = Path(ffi.compile(tmpdir=directory))
        except cffi.VerificationError:
            raise SystemExit("the core does not compile: what the compiler says is above") from None
        built.replace(package / built.name)


if __name__ == "__main__":
    main()
