# SPDX-License-Identifier: Apache-2.0
"""Compiles BPF programs by bcc and loads them. bcc brings a whole compiler into the process, so it does that in one of
its own, which hands over descriptors and ends; nobody else imports it.
"""

from __future__ import annotations

import array
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawd.errors import HostError
from clawd.kernel import lockdown, tracefs

SOURCES = Path(__file__).resolve().parents[2] / "ebpf"
INSTALLED = Path("/usr/share/clawd/ebpf")
COMPILE_S = 60.0
"""In emulation it takes ten seconds."""
DESCRIPTORS_MAX = 64
ANSWER_MAX = 1 << 16

KINDS = ("SOCK_OPS", "SCHED_CLS", "CGROUP_SKB", "CGROUP_SOCKOPT", "TRACEPOINT", "TRACING", "RAW_TRACEPOINT")
"""Of programs: bcc's names."""
UNNAMED = {"CGROUP_SOCKOPT": (25, 22)}
"""Those that bcc has no name for, by their number and the place that their programs are checked for, both of
linux/bpf.h: BPF_CGROUP_SETSOCKOPT.
"""
_SK_STORAGE = 24
_CALL, _KERNEL_FUNCTION = 0x85, 2  # BPF_JMP | BPF_CALL, BPF_PSEUDO_KFUNC_CALL


@dataclass(frozen=True)
class Field:
    name: str
    offset: int
    size: int
    count: int
    """Elements; 1 for what is no array."""


@dataclass(frozen=True)
class Map:
    """`layout` is of a value, by the compiler; empty for a plain number."""

    fd: int
    key_size: int
    value_size: int
    entries: int
    layout: tuple[Field, ...]


@dataclass(frozen=True)
class Loaded:
    """Descriptors that are the caller's to close. `headers`: of which kernel they were."""

    programs: Mapping[str, int]
    maps: Mapping[str, Map]
    headers: str
    lacking: Mapping[str, str]
    """Optional programs that this kernel does not take: why."""
    events: Mapping[str, int]
    """The kernel's number of each tracepoint."""

    def close(self) -> None:
        for fd in (*self.programs.values(), *(each.fd for each in self.maps.values())):
            os.close(fd)


def load(
    source: str,
    programs: Mapping[str, str],
    flags: Sequence[str] = (),
    optional: Sequence[str] = (),
    events: Sequence[str] = (),
    sources: Path | None = None,
    calls: Mapping[int, int] | None = None,
) -> Loaded:
    """Compile `source` and load from it each program, of the kind given. Raises HostError with what is missing here, if
    it is not one of `optional`. `events` are the tracepoints that it is about. `calls`: numbers that it calls, and
    those of the kernel's functions that are meant.
    """
    directory = sources or (SOURCES if SOURCES.is_dir() else INSTALLED)
    if not (directory / source).is_file():
        raise HostError(f'there is no "{directory / source}"', "install clawd again")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    job = {
        "source": str(directory / source),
        "programs": dict(programs),
        "flags": list(flags),
        "optional": list(optional),
        "events": list(events),
        "calls": [*(calls or {}).items()],
    }
    command = [sys.executable, "-m", "clawd.kernel.bpf", str(theirs.fileno())]
    with ours:
        with theirs:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            )
        try:
            _, told = child.communicate(json.dumps(job), COMPILE_S)
        except subprocess.TimeoutExpired as error:
            child.kill()
            child.communicate()
            raise HostError(f"compiling {source} took more than {COMPILE_S:.0f} s") from error
        if child.returncode != 0:
            raise HostError(f"the compiler of {source} ended with {child.returncode}: {_last(told)}")
        return _received(ours, source, told)


def _received(ours: socket.socket, source: str, told: str) -> Loaded:
    packet, ancillary, _flags, _address = ours.recvmsg(ANSWER_MAX, socket.CMSG_SPACE(DESCRIPTORS_MAX * 4))
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    answer = json.loads(packet)
    if "error" in answer:
        raise HostError(f"{source}: {answer['error'] or _last(told)}", answer.get("hint"))
    for fd in fds:
        os.set_inheritable(fd, False)
    names, tables = answer["programs"], answer["maps"]
    return Loaded(
        dict(zip(names, fds, strict=False)),
        {
            row["name"]: Map(fd, row["key"], row["value"], row["entries"], tuple(Field(*f) for f in row["layout"]))
            for row, fd in zip(tables, fds[len(names) :], strict=True)
        },
        answer["headers"],
        answer["lacking"],
        answer["events"],
    )


def _last(told: str) -> str:
    """What the compiler, or the verifier, complained of, in one line."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    wrong = [line for line in lines if "error:" in line] or lines[-1:]
    return wrong[0] if wrong else "it said nothing"


# --- what the child does ---


def whose_headers(release: str, root: Path = Path("/")) -> str | None:
    """The kernel whose headers programs are compiled with: that of `release`, else another. None: there are none.

    Those of another kernel serve too, for our programs take the stable ABI alone from them.
    """
    modules = root / "lib/modules"
    if (modules / release / "build").exists():
        return release
    other = next((path.name for path in sorted(modules.glob("*"), reverse=True) if _is_whole(path)), None)
    # bcc unpacks the archive itself
    return other or (release if (root / "sys/kernel/kheaders.tar.xz").exists() else None)


@contextmanager
def kernel_headers() -> Iterator[str]:
    """Let bcc find headers, and say of which kernel. It looks for the running kernel's, and wants those of another in
    one tree, where Debian has two.
    """
    release = platform.release()
    found = whose_headers(release)
    if found == release or "BCC_KERNEL_SOURCE" in os.environ:
        # bcc unpacks the archive below a name that others could guess, and takes what lies there for headers
        with tempfile.TemporaryDirectory(prefix="clawd-headers-") as private:
            os.environ["TMPDIR"] = private
            yield release
        return
    if found is None:
        raise HostError("no kernel headers", f"apt-get install linux-headers-{release}, or linux-headers-amd64")
    other = Path("/lib/modules", found)
    tree = Path(tempfile.mkdtemp(prefix="clawd-headers-"))
    try:
        for part in ("source", "build"):  # what was generated is in the latter, and wins
            _link(other / part / "include", tree / "include")
            for arch in (other / part / "arch").glob("*"):
                _link(arch / "include", tree / "arch" / arch.name / "include")
        os.environ["BCC_KERNEL_SOURCE"] = str(tree)
        yield found
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    return all((path / part / "include").is_dir() for part in ("build", "source"))


def _link(origin: Path, target: Path) -> None:
    if not origin.is_dir():
        return
    target.mkdir(parents=True, exist_ok=True)
    for entry in origin.iterdir():
        place = target / entry.name
        if place.is_symlink():
            place.unlink()
        place.symlink_to(entry)


def _layout(leaf: Any) -> list[tuple[str, int, int, int]]:
    import ctypes

    rows = []
    for name, kind, *_ in getattr(leaf, "_fields_", ()):
        if not name.startswith("__pad"):
            place = getattr(leaf, name)
            length = getattr(kind, "_length_", 1)
            rows.append((name, place.offset, ctypes.sizeof(kind), length))
    return rows


def _link_calls(start: int, size: int, calls: Mapping[int, int]) -> None:
    """bcc knows no functions of the kernel: it calls their numbers as if they were helpers. Changed in place."""
    import ctypes

    code = (ctypes.c_char * size).from_address(start)
    for at in range(0, size, 8):
        kind, registers, _offset, number = struct.unpack_from("=BBhi", code, at)
        if kind == _CALL and number in calls:
            struct.pack_into("=BBhi", code, at, kind, registers & 15 | _KERNEL_FUNCTION << 4, 0, calls[number])


def _compile(job: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    import ctypes

    try:
        import bcc
    except ImportError as error:
        raise HostError("bcc is not installed", "apt-get install python3-bpfcc") from error

    class _Quiet(bcc.BPF):  # type: ignore[misc]
        def _trace_autoload(self) -> None:
            """bcc attaches by a function's name. What is attached here would end with us."""

    source = Path(job["source"])
    if job["events"]:
        tracefs.ready()
    events = {event: tracefs.number(event) for event in job["events"]}
    with kernel_headers() as headers:
        # -w: headers of another kernel than bcc's make its compiler warn of what is not ours
        made = _Quiet(src_file=str(source).encode(), cflags=["-w", f"-I{source.parent}", *job["flags"]])
    fds, tables = [], []
    lacking = {}
    for name, kind in job["programs"].items():
        assert kind in KINDS
        start = ctypes.cast(bcc.lib.bpf_function_start(made.module, name.encode()), ctypes.c_void_p).value
        if start and job["calls"]:
            _link_calls(start, bcc.lib.bpf_function_size(made.module, name.encode()), dict(job["calls"]))
        try:
            number, place = UNNAMED.get(kind) or (getattr(bcc.BPF, kind), -1)
            fds.append(made.load_func(name.encode(), number, attach_type=place).fd)
        except Exception as error:
            if name not in job["optional"]:
                raise
            lacking[name] = str(error)
    names = [name for name in job["programs"] if name not in lacking]
    bcc.lib.bpf_table_name.restype = ctypes.c_char_p  # bcc declares all but these two
    bcc.lib.bpf_table_name.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    bcc.lib.bpf_num_tables.argtypes = [ctypes.c_void_p]
    for number in range(bcc.lib.bpf_num_tables(made.module)):
        if bcc.lib.bpf_table_type_id(made.module, number) == _SK_STORAGE:
            continue  # the program's alone, and bcc cannot show it
        name = bcc.lib.bpf_table_name(made.module, number)
        table = made.get_table(name)
        fds.append(table.map_fd)
        tables.append(
            {
                "name": name.decode(),
                "key": ctypes.sizeof(table.Key),
                "value": ctypes.sizeof(table.Leaf),
                "entries": bcc.lib.bpf_table_max_entries_id(made.module, number),
                "layout": _layout(table.Leaf),
            }
        )
    return {"programs": names, "lacking": lacking, "events": events, "maps": tables,
            "headers": headers}, fds  # fmt: skip


def _why(error: Exception) -> dict[str, Any]:
    if isinstance(error, HostError):
        return {"error": error.message, "hint": error.hint}
    if "privileges" in str(error):
        locked = lockdown.mode()
        if locked:
            return {"error": f"the kernel refuses BPF: lockdown={locked}", "hint": lockdown.HINT}
        hint = "CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, and bpf(2) not filtered"
        return {"error": "loading BPF needs root", "hint": hint}
    # the reason proper was printed by the compiler or the verifier
    return {"error": "" if "ompile" in str(error) else str(error)}


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as answer:
        try:
            value, fds = _compile(json.load(sys.stdin))
        except Exception as error:  # bcc raises nothing narrower
            answer.send(json.dumps(_why(error)).encode())
            return 0
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        answer.sendmsg([json.dumps(value).encode()], [rights])
    sys.stdout.flush()
    os._exit(0)  # bcc's own end would take a second


if __name__ == "__main__":
    sys.exit(main())
