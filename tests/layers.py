# SPDX-License-Identifier: Apache-2.0
"""The rules of the source tree, as functions from `path: text` to complaints: which way imports go, who may do what."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping

Tree = Mapping[str, str]

# A module may import those in rows above its own, never one of its own row. The longest name that fits counts.
ROWS = (
    ("clawd.errors",),
    ("clawd.units", "clawd.ini", "clawd.keys", "clawd.field", "clawd.descriptors"),
    ("clawd.setting",),
    ("clawd.config", "clawd.log", "clawd.sd", "clawd.signals", "clawd.protocol", "clawd.core"),
    ("clawd.inbox", "clawd.session", "clawd.page", "clawd.sources", "clawd.flusher", "clawd.watcher"),
    ("clawd.reading", "clawd.link", "clawd.stats", "clawd.manual", "clawd.ring"),
    ("clawd.selection", "clawd.stream", "clawd.farlink"),
    ("clawd.fleet",),
    ("clawd.producer", "clawd.consumer", "clawd.aconsumer"),
    ("clawd.kernel.change", "clawd.kernel.netns", "clawd.kernel.tree"),
    ("clawd.kernel.journal", "clawd.kernel.sysctl", "clawd.kernel.tc", "clawd.kernel.sched", "clawd.kernel.weight"),
    ("clawd.kernel.boost",),
    ("clawd.kernel.knobs", "clawd.kernel.origin", "clawd.kernel.effect", "clawd.kernel.tuner"),
    ("clawd.kernel.profile",),
    ("clawd.kernel.survey",),
    ("clawd.kernel.tuning",),
    ("clawd.kernel.boot",),
    ("clawd.server.memory", "clawd.server.instance", "clawd.server.boost", "clawd.server.pressure"),
    ("clawd.server.tcp", "clawd.server.network", "clawd.server.access"),
    ("clawd.server.lanes",),
    ("clawd.server.ring", "clawd.server.door", "clawd.server.shaping", "clawd.server.boost_link"),
    ("clawd.server.tcpdoor", "clawd.server.zap", "clawd.server.relay"),
    ("clawd.server.far",),
    ("clawd.server.recovery", "clawd.server.urgency"),
    ("clawd.kernel.lockdown",),
    ("clawd.kernel.tracefs",),
    ("clawd.kernel.bpf",),
    ("clawd.kernel.bpfcall",),
    ("clawd.kernel.clsact", "clawd.kernel.pins", "clawd.kernel.connections"),
    ("clawd.kernel.egress",),
    ("clawd.kernel.shaper",),
    ("clawd.kernel.hists", "clawd.kernel.btf", "clawd.kernel.taken"),
    ("clawd.kernel.stamps",),
    ("clawd.kernel.tracer",),
    ("clawd.gateway.position", "clawd.gateway.figures", "clawd.gateway.filter", "clawd.gateway.access"),
    ("clawd.gateway.event", "clawd.gateway.problem", "clawd.gateway.metrics"),
    ("clawd.gateway.fan",),
    ("clawd.gateway.reader",),
    ("clawd.gateway.connection",),
    ("clawd.gateway.routes",),
    ("clawd.server", "clawd.kernel", "clawd.gateway.serving", "clawd.engines"),
    ("clawd.gateway",),
    ("clawd.kernel.__main__", "clawd.ctl.client", "clawd.ctl.render"),
    (
        "clawd.ctl.check",
        "clawd.ctl.rates",
        "clawd.ctl.terminal",
        "clawd.ctl.relay_keys",
        "clawd.ctl.pages",
        "clawd.ctl.tune_show",
    ),
    (
        "clawd.ctl.features",
        "clawd.ctl.hardware",
        "clawd.ctl.helper",
        "clawd.ctl.symptoms",
        "clawd.ctl.priority",
        "clawd.ctl.tuned",
    ),
    ("clawd.ctl.demo.child", "clawd.ctl.demo.cutting", "clawd.ctl.demo.delay"),
    ("clawd.ctl.demo.keeper", "clawd.ctl.demo.writer", "clawd.ctl.demo.screen"),
    ("clawd.ctl.demo.reader",),
    ("clawd.ctl.demo.account",),
    ("clawd.ctl.demo.job",),
    ("clawd.ctl.demo.command",),
    ("clawd.ctl.trace_target", "clawd.ctl.trace_progress"),
    ("clawd.ctl.trace_stages", "clawd.ctl.trace_sockets", "clawd.ctl.trace_stream", "clawd.ctl.trace_file"),
    ("clawd.ctl.trace_sched",),
    ("clawd.ctl",),
    ("clawd.__main__",),
)
# These put the parts of their row together
WIRING = ("clawd.server.loop", "clawd.gateway", "clawd.gateway.main", "clawd.ctl", "clawd.ctl.main", "clawd.__main__")
# What an engine's process may load, and these load nothing else: its environment has cffi alone, for clawd._core
BARE = ("clawd.errors", "clawd.units", "clawd.field", "clawd.setting", "clawd.config", "clawd.log", "clawd.protocol",
        "clawd.core", "clawd.flusher", "clawd.watcher", "clawd.ring", "clawd.stream", "clawd.producer")  # fmt: skip
ONLY = {  # module: the one module that may import it
    "bcc": "clawd.kernel.bpf",
    "clawd._core": "clawd.core",
    "cffi": "clawd.csrc.build",
    "systemd": "clawd.sd",
}
NEVER = {  # module: where it is forbidden
    "multiprocessing.shared_memory": "clawd",
    "pickle": "clawd",
    "zmq.asyncio": "clawd.server",
    "clawd.csrc": "clawd",
}
LINES_MAX = 500
ATOMIC = re.compile(r"__atomic_|__sync_|_Atomic\b|stdatomic")
SPDX = "SPDX-License-Identifier: Apache-2.0"
SPDX_SUFFIXES = (".py", ".c", ".h", ".toml", ".conf", ".service", ".slice", ".socket")


def module_name(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def row_of(module: str) -> int | None:
    fitting = [(len(name), number) for number, row in enumerate(ROWS) for name in row if is_within(module, name)]
    return max(fitting)[1] if fitting else None


def imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that is imported, wherever it stands; `from a import b` is `a.b`."""
    package = module_name(path).split(".") if path.endswith("__init__.py") else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("__import__", "import_module") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def _sources(tree: Tree) -> Iterator[tuple[str, str]]:
    return ((path, text) for path, text in tree.items() if path.startswith("clawd/") and path.endswith(".py"))


def upward_imports(tree: Tree) -> list[str]:
    """Imports that do not go down the rows."""
    modules = {module_name(path) for path, _ in _sources(tree)} | {"clawd._core"}
    packages = {name.rpartition(".")[0] for name in modules}
    found = []
    for path, text in _sources(tree):
        importer = module_name(path)
        if importer == "clawd" or is_within(importer, "clawd.csrc"):
            continue
        row = row_of(importer)
        if row is None:
            found.append(f"{path}: has no row in tests/layers.py")
            continue
        for line, name in imports(path, text):
            if not is_within(name, "clawd") or name in ("clawd.__version__", "clawd._core.ffi", "clawd._core.lib"):
                continue
            target = name if name in modules else name.rpartition(".")[0]
            if target in ("clawd", "") or (target in packages and target not in modules):
                found.append(f"{path}:{line}: imports {name}, which is no module of the tree")
                continue
            if is_within(target, "clawd._core") or is_within(target, "clawd.csrc"):
                continue  # ONLY and NEVER say who may
            below = row_of(target)
            if below is None or below > row or (below == row and importer not in WIRING):
                found.append(f"{path}:{line}: imports {target}, which is not below it")
    return found


def _is_bare(name: str) -> bool:
    if is_within(name, "clawd"):
        return name in ("clawd", "clawd.__version__") or any(is_within(name, bare) for bare in (*BARE, "clawd._core"))
    return name.partition(".")[0] in sys.stdlib_module_names


def foreign_imports(tree: Tree) -> list[str]:
    """Imports of what only one module, or none, may import."""
    found = []
    for path, text in _sources(tree):
        importer = module_name(path)
        for line, name in imports(path, text):
            for guarded, owner in ONLY.items():
                if is_within(name, guarded) and importer != owner:
                    found.append(f"{path}:{line}: only {owner} imports {guarded}")
            for forbidden, where in NEVER.items():
                if is_within(name, forbidden) and is_within(importer, where):
                    found.append(f"{path}:{line}: nothing in {where} imports {forbidden}")
            if importer in BARE and not _is_bare(name):
                found.append(f"{path}:{line}: imports {name}, which an engine's environment lacks")
    return found


def long_files(tree: Tree) -> list[str]:
    return [
        f"{path}: {lines} lines, {LINES_MAX} at most"
        for path, text in tree.items()
        if path.endswith((".py", ".c", ".h")) and (lines := text.count("\n")) > LINES_MAX
    ]


def unlicensed_files(tree: Tree) -> list[str]:
    """Sources and scripts without the SPDX line on top (below `#!`)."""
    found = []
    for path, text in tree.items():
        script = text.startswith("#!")
        top = text.split("\n")[1 if script else 0 :][:1]
        if (script or path.endswith(SPDX_SUFFIXES)) and not (top and SPDX in top[0]):
            found.append(f"{path}: lacks the SPDX line")
    return found


def stray_atomics(tree: Tree) -> list[str]:
    """Atomics in C outside of barrier.h."""
    return [
        f"{path}:{number}: an atomic outside of barrier.h"
        for path, text in tree.items()
        if path.endswith((".c", ".h")) and path != "clawd/csrc/barrier.h" and not path.startswith(("ebpf/", "tests/"))
        for number, line in enumerate(text.split("\n"), 1)
        if ATOMIC.search(line)
    ]
