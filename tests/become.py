# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.become UID GID MODULE ARGUMENT...`: `main` of a module as another user, without groups.

The interpreter and all of clawd are loaded first: the user need not be able to read this tree, which may lie in root's
own directory.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLOSED = f"{ROOT} is closed to other users"


def is_closed() -> bool:
    """Whether other users cannot come to this tree, and so not start its interpreter."""
    return any(not path.stat().st_mode & 0o001 for path in (ROOT, *ROOT.parents))


def command(uid: int, gid: int, module: str, *arguments: object) -> list[str]:
    """The words that run it, from any directory."""
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; from tests import become; sys.exit(become.main(sys.argv[1:]))"
    return [sys.executable, "-c", start, str(uid), str(gid), module, *map(str, arguments)]


def main(arguments: Sequence[str]) -> int:
    uid, gid, name, *rest = arguments
    module = importlib.import_module(name)
    import clawd

    for found in pkgutil.walk_packages(clawd.__path__, "clawd."):
        if found.name.rpartition(".")[2] not in ("bpf", "__main__"):  # bcc costs a second, and only root uses it
            importlib.import_module(found.name)
    os.environ["HOME"] = "/nonexistent"
    os.setgroups([])
    os.setresgid(*[int(gid)] * 3)
    os.setresuid(*[int(uid)] * 3)
    sys.argv[1:] = rest
    status: int = module.main(rest)
    return status
