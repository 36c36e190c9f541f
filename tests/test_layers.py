# SPDX-License-Identifier: Apache-2.0
"""The source tree keeps its rules; and each rule finds a tree that breaks it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import layers

pytestmark = pytest.mark.plain
ROOT = Path(__file__).resolve().parent.parent
LICENCE = f"# {layers.SPDX}\n"
RULES = (
    layers.upward_imports,
    layers.foreign_imports,
    layers.long_files,
    layers.unlicensed_files,
    layers.stray_atomics,
)
# Enough modules for a made-up tree to resolve names in
EMPTY = dict.fromkeys(
    [
        *(f"clawd/{name}.py" for name in ("__init__", "errors", "units", "config", "log", "protocol", "core", "link")),
        *(f"clawd/{name}.py" for name in ("producer", "consumer", "__main__")),
        *(f"clawd/server/{name}.py" for name in ("__init__", "registry", "relay", "loop")),
        *(f"clawd/kernel/{name}.py" for name in ("__init__", "tc", "bpf")),
        *(f"clawd/ctl/{name}.py" for name in ("__init__", "main", "client", "render", "status")),
    ],
    LICENCE,
)


def tree_of(**changed: str) -> dict[str, str]:
    return EMPTY | {path: LICENCE + text for path, text in changed.items()}


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    # safe.directory: the clone may be another user's
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name]
    return {
        str(path.relative_to(ROOT)): path.read_text(errors="replace")
        for path in paths
        if path.is_file() and path.stat().st_size < 1 << 20
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[layers.Tree], list[str]], tree: dict[str, str]) -> None:
    assert rule(tree) == []


def test_the_rules_look_at_the_whole_tree(tree: dict[str, str]) -> None:
    assert {"clawd/errors.py", "clawd/csrc/barrier.h", "scripts/setup", "tests/layers.py"} <= set(tree)


def test_the_made_up_tree_breaks_no_rule() -> None:
    assert [fault for rule in RULES for fault in rule(EMPTY)] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("clawd/units.py", "from clawd.config import Config"),
        ("clawd/errors.py", "from clawd import units"),
        ("clawd/log.py", "import clawd.config"),
        ("clawd/link.py", "from .producer import Producer"),
        ("clawd/producer.py", "from clawd import consumer"),
        ("clawd/producer.py", "from clawd.server import registry"),
        ("clawd/consumer.py", "def late():\n    import clawd.kernel.tc"),
        ("clawd/consumer.py", "import importlib\nimportlib.import_module('clawd.ctl.client')"),
        ("clawd/producer.py", "if TYPE_CHECKING:\n    from clawd.ctl import main"),
        ("clawd/server/relay.py", "from clawd.server.registry import Ring"),
        ("clawd/server/relay.py", "from . import registry"),
        ("clawd/server/relay.py", "from .loop import serve"),
        ("clawd/server/loop.py", "from clawd.ctl import client"),
        ("clawd/server/loop.py", "from clawd.__main__ import main"),
        ("clawd/ctl/status.py", "from clawd.ctl.main import run"),
        ("clawd/ctl/render.py", "from ..ctl.status import Status"),
        ("clawd/server/relay.py", "from clawd import Producer"),
        ("clawd/surprise.py", ""),
    ],
)
def test_an_import_that_does_not_go_down_is_found(path: str, text: str) -> None:
    [fault] = layers.upward_imports(tree_of(**{path: text}))
    assert fault.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("clawd/config.py", "from clawd import __version__, units\nfrom clawd.errors import ConfigError"),
        ("clawd/core.py", "from clawd._core import ffi, lib\n__import__('clawd._core', fromlist=['x'])"),
        ("clawd/consumer.py", "from clawd.link import Link\nimport zmq"),
        ("clawd/server/loop.py", "from clawd.server import registry, relay\nfrom .relay import Relay"),
        ("clawd/ctl/main.py", "from clawd.ctl import status"),
        ("clawd/ctl/status.py", "from clawd.ctl.client import ask\nfrom clawd.ctl import render"),
        ("clawd/__main__.py", "from clawd.server.loop import serve"),
        ("clawd/__init__.py", "from clawd.producer import Producer"),
        ("clawd/kernel/bpf.py", "import bcc"),
    ],
)
def test_an_import_that_goes_down_is_not_found(path: str, text: str) -> None:
    made_up = tree_of(**{path: text})
    assert layers.upward_imports(made_up) + layers.foreign_imports(made_up) == []


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("clawd/kernel/tc.py", "from bcc import BPF", "only clawd.kernel.bpf imports bcc"),
        ("clawd/producer.py", "from clawd._core import lib", "only clawd.core imports clawd._core"),
        ("clawd/producer.py", "__import__('clawd._core')", "only clawd.core imports clawd._core"),
        ("clawd/server/loop.py", "from systemd import daemon", "only clawd.sd imports systemd"),
        ("clawd/server/loop.py", "from clawd.csrc import build", "nothing in clawd imports clawd.csrc"),
        ("clawd/server/relay.py", "import zmq.asyncio as z", "nothing in clawd.server imports zmq.asyncio"),
        ("clawd/server/relay.py", "from zmq import asyncio", "nothing in clawd.server imports zmq.asyncio"),
        ("clawd/log.py", "import pickle", "nothing in clawd imports pickle"),
        ("clawd/link.py", "from multiprocessing import shared_memory",
         "nothing in clawd imports multiprocessing.shared_memory"),
        ("clawd/producer.py", "import zmq", "imports zmq, which an engine's environment lacks"),
        ("clawd/producer.py", "import clawd.link", "imports clawd.link, which an engine's environment lacks"),
    ],
)  # fmt: skip
def test_an_import_that_is_not_this_modules_is_found(path: str, text: str, complaint: str) -> None:
    assert layers.foreign_imports(tree_of(**{path: text})) == [f"{path}:2: {complaint}"]


def test_a_file_over_the_limit_is_found() -> None:
    text = "x\n" * layers.LINES_MAX
    assert layers.long_files({"a.py": text, "b.md": text + "x\n"}) == []
    for path in ("a.py", "b.c", "c.h"):
        assert layers.long_files({path: text + "x\n"}) == [f"{path}: 501 lines, 500 at most"]


def test_a_file_without_the_licence_line_is_found() -> None:
    good = {"a.py": LICENCE, "b.c": f"/* {layers.SPDX} */\n", "run": f"#!/bin/sh\n{LICENCE}", "data.txt": "x"}
    assert layers.unlicensed_files(good) == []
    bad = {
        "a.py": "",
        "b.h": "int x;\n",
        "run": "#!/bin/sh\n",
        "c.py": f"import os\n{LICENCE}",
        "u.service": "[Unit]\n",
    }
    assert len(layers.unlicensed_files(bad)) == len(bad)


def test_an_atomic_outside_of_the_barrier_header_is_found() -> None:
    text = "int f(int *x)\n{\n\treturn __atomic_load_n(x, __ATOMIC_RELAXED);\n}\n"
    assert layers.stray_atomics({"clawd/csrc/barrier.h": text, "clawd/a.py": text}) == []
    assert layers.stray_atomics({"clawd/csrc/ring.c": text}) == ["clawd/csrc/ring.c:3: an atomic outside of barrier.h"]
    assert layers.stray_atomics({"clawd/csrc/ring.h": "_Atomic int x;"}) != []
