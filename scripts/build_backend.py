# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools, told by cffi about the C core. How that is compiled is in clawd/csrc/build.py alone;
pyproject.toml has no field for a cffi builder, and there is no setup.py to name it.
"""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import setuptools
from setuptools import build_meta
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

RECIPE = "clawd/csrc/build.py"
SOURCES = ("scripts/build_backend.py", "clawd/csrc/*.py", "clawd/csrc/*.c", "clawd/csrc/*.h")


class BuildModules(build_py):
    """The modules, and beside them the producer's header as the one file that engines in other languages include."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and Path("clawd/csrc/clawd_ring.h").exists():
            text = runpy.run_path(RECIPE)["header"]()
            Path(self.build_lib, "clawd", "clawd_ring.h").write_text(text)


class Sources(sdist):
    """What setuptools finds, and what the recipe reads. No tests: they need the whole repository."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        found = {name for name in files if not name.startswith("tests/")}
        found.update(str(path) for pattern in SOURCES for path in Path().glob(pattern))
        super().make_release_tree(base_dir, sorted(found))


setuptools.setup = functools.partial(
    setuptools.setup, cffi_modules=[f"{RECIPE}:builder"], cmdclass={"build_py": BuildModules, "sdist": Sources}
)

build_editable = build_meta.build_editable
build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
