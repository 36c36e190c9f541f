# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools, told by cffi about the C core. How that is compiled is in clawd/csrc/build.py alone;
pyproject.toml has no field for a cffi builder, and there is no setup.py to name it.
"""

from __future__ import annotations

import functools

import setuptools
from setuptools import build_meta

setuptools.setup = functools.partial(setuptools.setup, cffi_modules=["clawd/csrc/build.py:builder"])

build_editable = build_meta.build_editable
build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
