# SPDX-License-Identifier: Apache-2.0
"""What `clawctl doctor` looks at: a clawd and its runtime directory, then the host. Probes features, never versions of
the kernel.
"""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawd import protocol
from clawd.config import Config
from clawd.core import Core, Limits, ffi
from clawd.ctl import render
from clawd.ctl.client import Client
from clawd.descriptors import files_needed
from clawd.errors import ClawdError, ControlError
from clawd.page import SHM, Life, Page, Unreachable, process_state, read_instance, stats_name

ZMQ_LEAST = (4, 3, 4)
SPOOL_SHARE = 4
"""clawd takes at most one part in so many of the free shared memory for its spool."""
SPARE_BYTES = 8 << 20
"""Free shared memory below which the next producers get no ring."""
OBJECT = re.compile(r"clawd-([0-9a-f]{16})-(?:[0-9a-f]{16}(?:-data|-ctl)?|spool-\d+|stats)")


@dataclass(frozen=True)
class Finding:
    """`level` is ok, info, warn or fail; `fix` says what to do, None when there is nothing to. `feature` is for what it
    matters.
    """

    check: str
    level: str
    what: str
    fix: str | None = None
    feature: str = "relay"


# --- a clawd ---


def find_daemon(runtime_dir: Path) -> Iterator[Finding]:
    directory = check_directory(runtime_dir)
    yield directory
    if directory.level == "fail":
        return
    try:
        with Page(runtime_dir) as page:
            life = page.life()
            yield check_life(page, life)
            if life is Life.GONE:
                return
            for name in (protocol.CONTROL_SOCKET, protocol.RELAY_SOCKET):
                yield check_socket(runtime_dir / name)
            if life is Life.ANSWERING:
                yield check_answer(runtime_dir)
            yield from check_troubles(page)
            yield check_files(page)
    except Unreachable as error:
        yield Finding("daemon", "fail", error.message, error.hint)
    except ControlError as error:
        yield Finding("daemon", "fail", error.message, error.hint)


def check_directory(path: Path) -> Finding:
    try:
        found = path.stat()
    except OSError as error:
        return Finding("runtime_dir", "fail", f'runtime directory "{path}": {error.strerror}',
                       "start clawd, or give its --runtime-dir")  # fmt: skip
    if not stat.S_ISDIR(found.st_mode):
        return Finding("runtime_dir", "fail", f'runtime directory "{path}" is no directory', "use another")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o002:
        return Finding("runtime_dir", "fail", f'runtime directory "{path}" can be written by everybody',
                       f'chmod o-w "{path}"')  # fmt: skip
    return Finding("runtime_dir", "ok", f'runtime directory "{path}", mode {mode:04o}')


def check_life(page: Page, life: Life) -> Finding:
    pid = page.header().pid
    if life is Life.GONE:
        return Finding("daemon", "fail", f"clawd is not running: the last one, pid {pid}, ended without notice",
                       "start it, and see its log for why")  # fmt: skip
    if life is Life.SILENT:
        what = "is stopped" if process_state(pid) in ("T", "t") else "does not turn"
        return Finding("daemon", "fail", f"clawd, pid {pid}, {what}", f"kill -CONT {pid}, or restart it")
    return Finding("daemon", "ok", f"clawd runs, pid {pid}")


def check_socket(path: Path) -> Finding:
    name = path.name.partition(".")[0] + "_socket"
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        return Finding(name, "fail", f'socket "{path}": {error.strerror}', "restart clawd: it was removed")
    if not stat.S_ISSOCK(mode):
        return Finding(name, "fail", f'"{path}" is no socket', "restart clawd: it was replaced")
    if stat.S_IMODE(mode) != 0o660:
        return Finding(name, "warn", f'socket "{path}" has mode {stat.S_IMODE(mode):04o} and not 0660',
                       f'chmod 660 "{path}"')  # fmt: skip
    return Finding(name, "ok", f'socket "{path}", mode 0660')


def check_answer(runtime_dir: Path) -> Finding:
    try:
        with Client(runtime_dir) as client:
            client.ask(protocol.Hello(protocol.VERSION, "observer", "clawctl doctor"), protocol.Welcome)
    except ControlError as error:
        return Finding("answer", "fail", f"clawd does not answer: {error.message}", error.hint)
    return Finding("answer", "ok", "clawd answers on its control socket")


def check_troubles(page: Page) -> Iterator[Finding]:
    totals = page.totals()
    if totals.rescued:
        yield Finding("wake_ups", "warn", f"{totals.rescued} wake-ups were lost and made good by a timeout",
                      "this is a fault of clawd or of a producer's library: report it")  # fmt: skip
    else:
        yield Finding("wake_ups", "ok", "no wake-up was lost")
    if totals.quarantined:
        yield Finding("quarantines", "warn", f"{totals.quarantined} producers broke the ring's rules and were shut out",
                      'see clawd\'s log for "producer detached" with reason quarantined')  # fmt: skip
    else:
        yield Finding("quarantines", "ok", "no producer was shut out")


def check_files(page: Page) -> Finding:
    header = page.header()
    need = files_needed(header.rings.count, header.connections.count)
    try:
        text = Path(f"/proc/{header.pid}/limits").read_text()
    except OSError as error:
        return Finding("files", "warn", f"cannot see how many files clawd may open: {error.strerror}", "be root")
    found = re.search(r"^Max open files +(\S+)", text, re.MULTILINE)
    limit = found[1] if found else "0"
    if limit == "unlimited" or int(limit) >= need:
        return Finding("files", "ok", f"clawd may open {limit} files, {need} are enough for its limits")
    return Finding("files", "warn", f"clawd may open {limit} files, its limits ask for {need}",
                   f"start it with LimitNOFILE={need} or ulimit -n {need}, or lower --max-clients")  # fmt: skip


# --- the host ---


def find_host(runtime_dir: Path) -> Iterator[Finding]:
    yield check_memory(runtime_dir)
    yield check_file_limit()
    yield check_wait()
    yield check_pidfd()
    yield check_zmq()
    yield from check_left_behind(runtime_dir)


def check_memory(runtime_dir: Path, place: Path = SHM) -> Finding:
    try:
        found = os.statvfs(place)
    except OSError as error:
        return Finding("memory", "fail", f'no shared memory at "{place}": {error.strerror}', f"mount tmpfs on {place}")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    what = f"{place} has {render.size(free)} free of {render.size(total)}"
    try:
        with Page(runtime_dir) as page:
            runs, spool = page.life() is not Life.GONE, int(page.header().spool_bytes)
    except ClawdError:
        runs, spool = False, Config().spool_bytes
    need = SPARE_BYTES if runs else SPOOL_SHARE * spool
    if free >= need:
        return Finding("memory", "ok", what)
    if runs:
        return Finding("memory", "warn", f"{what}: the next producers may get no ring",
                       f"mount -o remount,size={(total + 8 * SPARE_BYTES) >> 20}m {place}")  # fmt: skip
    fitting = max(1, free // SPOOL_SHARE >> 20)
    return Finding("memory", "fail", f"{what}, a spool of {render.size(spool)} needs {render.size(need)}",
                   f"start clawd with --spool-bytes {fitting}M, or make {place} larger")  # fmt: skip


def check_file_limit() -> Finding:
    config = Config()
    need = files_needed(config.max_producers, config.max_clients)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= need:
        return Finding("file_limit", "ok", f"a clawd with default limits can have the {need} files it needs")
    return Finding("file_limit", "warn", f"a process may open {hard} files, default limits ask for {need}",
                   f"raise the hard limit: LimitNOFILE={need}, or ulimit -Hn {need}")  # fmt: skip


def check_wait() -> Finding:
    try:
        core = Core(Limits(1 << 20, 1 << 14, 0, 1, 1, 1, 1))
        try:
            core.wait(0)
        finally:
            core.close()
    except ClawdError as error:
        return Finding("epoll_pwait2", "fail", f"epoll_pwait2 does not work: {error}",
                       "use a kernel from 5.11 on, or let it through the container's seccomp filter")  # fmt: skip
    return Finding("epoll_pwait2", "ok", "epoll_pwait2 works")


def check_pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding("pidfd", "fail", f"pidfd_open does not work: {error.strerror}",
                       "use a kernel from 5.3 on, or let it through the container's seccomp filter")  # fmt: skip
    return Finding("pidfd", "ok", "pidfd_open works")


def check_zmq() -> Finding:
    try:
        import zmq
    except ImportError:
        return Finding("zmq", "fail", "pyzmq is not installed here", "pip install 'clawd[daemon]'")
    found = zmq.zmq_version_info()
    what = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    if found < ZMQ_LEAST:
        return Finding("zmq", "fail", f"{what}: older than {'.'.join(map(str, ZMQ_LEAST))}", "pip install -U pyzmq")
    return Finding("zmq", "ok", what)


def check_left_behind(runtime_dir: Path, place: Path = SHM) -> Iterator[Finding]:
    """Objects of instances that nobody will ever sweep: a start sweeps those of its own directory only."""
    try:
        own = read_instance(runtime_dir)
    except ControlError:
        own = ""
    sizes: dict[str, int] = {}
    for path in place.glob("clawd-*"):
        match = OBJECT.fullmatch(path.name)
        if not match or match[1] == own:
            continue
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # gone meanwhile
        if os.geteuid() in (0, status.st_uid):  # of others' we could not tell whether they are in use
            sizes[match[1]] = sizes.get(match[1], 0) + status.st_size
    mapped = mapped_instances() if sizes else set()
    found = False
    for instance, size in sorted(sizes.items()):
        home = home_of(instance, place)
        if instance in mapped or (home is not None and is_home(home, instance)):
            continue
        found = True
        where = f'"{home}" is gone' if home else "no process has them open"
        yield Finding("left_behind", "warn", f"{render.size(size)} of shared memory of clawd {instance}: {where}",
                      f"unless it will be started again: rm {place}/clawd-{instance}-*")  # fmt: skip
    if not found:
        yield Finding("left_behind", "ok", "no clawd left shared memory behind")


def home_of(instance: str, place: Path) -> Path | None:
    """The runtime directory an instance's page tells, when a killed clawd left it."""
    header: Any = ffi.new("struct claw_page_header *")
    try:
        fd = os.open(place / stats_name(instance), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(fd, ffi.sizeof("struct claw_page_header"))
    finally:
        os.close(fd)
    ffi.memmove(header, data, len(data))
    text = bytes(ffi.buffer(header.runtime_dir)).partition(b"\0")[0]
    return Path(os.fsdecode(text)) if text else None


def is_home(directory: Path, instance: str) -> bool:
    try:
        return read_instance(directory) == instance
    except ControlError:
        return False


def mapped_instances() -> set[str]:
    """Instances whose memory a process has mapped, as far as we may look."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.update(match[1] for match in OBJECT.finditer(maps.read_text(errors="replace")))
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return found
