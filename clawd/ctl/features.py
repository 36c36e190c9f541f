# SPDX-License-Identifier: Apache-2.0
"""What `clawctl doctor` looks at beyond what clawd cannot do without: groups, limits, logind, and what of a kernel each
feature uses. What only a feature needs is told as info.
"""

from __future__ import annotations

import ctypes
import errno
import grp
import importlib.util
import os
import platform
import pwd
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from clawd.config import Config
from clawd.ctl import render
from clawd.ctl.check import Finding
from clawd.kernel.bpf import whose_headers

ROOT = Path("/")
SPOOL_OBJECT_BYTES = 256 << 20
"""clawd's largest file in shared memory."""
SO_PEERPIDFD = 77
_BPF_CALL = {"x86_64": 321, "aarch64": 280}
_LOGIND = ("usr/lib/systemd/logind.conf.d", "run/systemd/logind.conf.d", "etc/systemd/logind.conf.d")


def find_features(runtime_dir: Path) -> Iterator[Finding]:
    yield from check_group(runtime_dir)
    yield check_file_size()
    yield check_remove_ipc(owner_of(runtime_dir))
    yield check_peer_pidfd()
    yield check_headers(platform.release())
    yield check_bpf()
    yield check_bcc()
    yield check_tracing()
    yield check_pressure()
    yield check_cgroup()
    yield check_fast_open()


def owner_of(runtime_dir: Path) -> int:
    """The user who runs clawd there, or would."""
    try:
        return runtime_dir.stat().st_uid
    except OSError:
        return os.geteuid()


def check_group(runtime_dir: Path) -> Iterator[Finding]:
    """Whether we could be an engine or a client. Nothing where there is no clawd."""
    try:
        status = (runtime_dir / "control.sock").stat()
    except OSError:
        return
    group = _name(status.st_gid)
    if os.geteuid() in (0, status.st_uid) or status.st_gid in (os.getegid(), *os.getgroups()):
        yield Finding("group", "ok", f"this user may talk to clawd; engines and clients need the group {group}")
        return
    user = pwd.getpwuid(os.geteuid()).pw_name
    if status.st_gid == 0:  # nobody should be put into this one
        fix = "groupadd --system clawd, and start clawd with Group=clawd or: sg clawd clawd"
    else:
        fix = f"usermod -aG {group} {user}, then log in again"
    yield Finding("group", "warn", f"{user} is not of the group {group}, which clawd's sockets are for", fix)


def _name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def check_file_size() -> Finding:
    need = min(Config().spool_bytes, SPOOL_OBJECT_BYTES)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if hard == resource.RLIM_INFINITY or hard >= need:
        return Finding("file_size", "ok", "a process may write files as large as the spool")
    what = f"a process may write files of {render.size(hard)}, the spool is one of {render.size(need)}"
    return Finding("file_size", "warn", what, "raise the hard limit: LimitFSIZE=infinity, or ulimit -Hf unlimited")


def check_remove_ipc(uid: int, root: Path = ROOT) -> Finding:
    """logind(8) takes the shared memory of a user who logs out, but of no system user's."""
    if not (root / "run/systemd/users").is_dir():
        return Finding("remove_ipc", "ok", "no logind here that takes shared memory away at a logout")
    if uid <= _system_uid_max(root):
        return Finding("remove_ipc", "ok", "logind leaves the shared memory of clawd's user alone: a system user")
    removes = True
    drop_ins = {path.name: path for place in _LOGIND for path in sorted((root / place).glob("*.conf"))}
    for path in (root / "etc/systemd/logind.conf", *(drop_ins[name] for name in sorted(drop_ins))):
        for value in re.findall(r"^\s*RemoveIPC\s*=\s*(\S+)", _read(path), re.MULTILINE):
            removes = value.lower() not in ("no", "false", "off", "0", "n", "f")
    if not removes:
        return Finding("remove_ipc", "ok", "logind leaves shared memory alone at a logout: RemoveIPC=no")
    return Finding("remove_ipc", "warn", f"logind takes clawd's shared memory away when user {uid} logs out",
                   "run clawd as a system user, or put RemoveIPC=no below [Login] into"
                   " /etc/systemd/logind.conf.d/clawd.conf and: systemctl restart systemd-logind")  # fmt: skip


def _system_uid_max(root: Path) -> int:
    found = re.search(r"^\s*SYS_UID_MAX\s+(\d+)", _read(root / "etc/login.defs"), re.MULTILINE)
    return int(found[1]) if found else 999


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- the kernel ---


def check_peer_pidfd() -> Finding:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return Finding("peer_pidfd", "info", "the kernel lacks SO_PEERPIDFD: a peer is found by its number",
                           "use a kernel from 6.5 on")  # fmt: skip
    return Finding("peer_pidfd", "ok", "SO_PEERPIDFD works")


def check_headers(release: str, root: Path = ROOT) -> Finding:
    found = whose_headers(release, root)
    if found is None:
        return Finding("headers", "info", "there are no kernel headers, which bcc compiles BPF with",
                       f"apt install linux-headers-{release}, or: modprobe kheaders", "trace")  # fmt: skip
    other = "" if found == release else f", which serve {release} too"
    return Finding("headers", "ok", f"there are headers of kernel {found} for BPF{other}", feature="trace")


def check_bpf() -> Finding:
    number = _BPF_CALL.get(platform.machine())
    if number is None:
        return Finding("bpf", "info", f"not known here how to ask for BPF on {platform.machine()}", feature="trace")
    libc = ctypes.CDLL(None, use_errno=True)
    # no such command: a kernel that has bpf(2), and lets us, says just that
    libc.syscall(ctypes.c_long(number), ctypes.c_long(0x7FFF), None, ctypes.c_long(0))
    reason = ctypes.get_errno()
    if reason == errno.EINVAL:
        return Finding("bpf", "ok", "bpf(2) works", feature="trace")
    if reason == errno.ENOSYS:
        fix = "use a kernel with CONFIG_BPF_SYSCALL"
    else:
        fix = "be root or have CAP_BPF; in a container let bpf(2) through its seccomp filter"
    return Finding("bpf", "info", f"bpf(2) does not work: {os.strerror(reason)}", fix, "trace")


def check_bcc() -> Finding:
    if importlib.util.find_spec("bcc"):
        return Finding("bcc", "ok", "bcc's Python module is here", feature="trace")
    return Finding("bcc", "info", "bcc's Python module is missing", "apt install python3-bpfcc", "trace")


def check_tracing(root: Path = ROOT) -> Finding:
    for path in (root / "sys/kernel/tracing/events", root / "sys/kernel/debug/tracing/events"):
        try:
            if path.is_dir():
                return Finding("tracing", "ok", "the kernel's tracepoints are at hand", feature="trace")
        except OSError:  # may not look
            return Finding("tracing", "info", "the kernel's tracepoints cannot be seen", "be root", "trace")
    if "tracefs" in _read(root / "proc/filesystems").split():
        return Finding("tracing", "ok", "tracefs is not mounted: clawctl trace mounts it for itself", feature="trace")
    return Finding("tracing", "info", "the kernel tells no tracepoints", "use a kernel with CONFIG_TRACING", "trace")


def check_pressure(root: Path = ROOT) -> Finding:
    if (root / "proc/pressure/cpu").exists():
        return Finding("pressure", "ok", "the kernel tells pressure (PSI)", feature="tune")
    return Finding("pressure", "info", "the kernel does not tell pressure (PSI)", "boot it with psi=1", "tune")


def check_cgroup(root: Path = ROOT) -> Finding:
    if "cpu" in _read(root / "sys/fs/cgroup/cgroup.controllers").split():
        return Finding("cgroup", "ok", "cgroup v2 has the cpu controller", feature="priority")
    return Finding("cgroup", "info", "cgroup v2 lacks the cpu controller, so no process goes before another",
                   "boot with systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=cpu", "priority")  # fmt: skip


def check_fast_open(root: Path = ROOT) -> Finding:
    text = _read(root / "proc/sys/net/ipv4/tcp_fastopen").strip()
    if text.isdigit() and int(text) & 2:
        return Finding("tcp_fastopen", "ok", "TCP Fast Open is on for listeners", feature="tcp")
    return Finding("tcp_fastopen", "info", "TCP Fast Open is off for listeners", "clawctl tune apply", "tcp")
