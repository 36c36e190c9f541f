# SPDX-License-Identifier: Apache-2.0
"""What `clawctl doctor` says of features and hardware, on hosts made of files."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import resource
from pathlib import Path

import pytest

from clawd.ctl import features, hardware

pytestmark = pytest.mark.plain


def make(root: Path, path: str, content: str | bytes = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("check", "path", "content", "fix"),
    [
        ("check_tracing", "sys/kernel/tracing/events/enable", "", "use a kernel with CONFIG_TRACING"),
        ("check_tracing", "proc/filesystems", "nodev\tsysfs\nnodev\ttracefs\n", "use a kernel with CONFIG_TRACING"),
        ("check_pressure", "proc/pressure/cpu", "", "boot it with psi=1"),
        ("check_cgroup", "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io", "systemd.unified_cgroup_hierarchy=1"),
        ("check_fast_open", "proc/sys/net/ipv4/tcp_fastopen", "3\n", "clawctl tune apply"),
    ],
)
def test_what_a_feature_lacks_is_info_with_what_to_do(
    tmp_path: Path, check: str, path: str, content: str, fix: str
) -> None:
    finding = getattr(features, check)(tmp_path)
    assert (finding.level, finding.feature != "relay") == ("info", True)
    assert fix in finding.fix
    make(tmp_path, path, content)
    finding = getattr(features, check)(tmp_path)
    assert (finding.level, finding.fix) == ("ok", None)


def test_fast_open_for_clients_alone_is_not_enough(tmp_path: Path) -> None:
    make(tmp_path, "proc/sys/net/ipv4/tcp_fastopen", "1\n")
    assert features.check_fast_open(tmp_path).level == "info"


def test_headers_of_this_kernel_or_its_own_archive_or_of_another_whole_one(tmp_path: Path) -> None:
    finding = features.check_headers("6.1.0-9", tmp_path)
    assert (finding.level, finding.feature) == ("info", "trace")
    assert (finding.fix or "").startswith("apt install linux-headers-6.1.0-9")
    make(tmp_path, "lib/modules/6.1.0-8/build/Makefile")
    assert features.check_headers("6.1.0-9", tmp_path).level == "info", "half of what bcc needs of another kernel"
    make(tmp_path, "sys/kernel/kheaders.tar.xz")
    assert features.check_headers("6.1.0-9", tmp_path).what == "there are headers of kernel 6.1.0-9 for BPF"
    for part in ("build", "source"):
        make(tmp_path, f"lib/modules/6.1.0-8/{part}/include/linux/version.h")
    finding = features.check_headers("6.1.0-9", tmp_path)
    assert finding.level == "ok"
    assert finding.what == "there are headers of kernel 6.1.0-8 for BPF, which serve 6.1.0-9 too"
    make(tmp_path, "lib/modules/6.1.0-9/build/Makefile")
    assert features.check_headers("6.1.0-9", tmp_path).what == "there are headers of kernel 6.1.0-9 for BPF"


def test_bcc_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert features.check_bcc().fix == "apt install python3-bpfcc"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert features.check_bcc().level == "ok"


@pytest.mark.parametrize(
    ("number", "level", "fix"),
    [(errno.EINVAL, "ok", None), (errno.ENOSYS, "info", "CONFIG_BPF_SYSCALL"), (errno.EPERM, "info", "CAP_BPF")],
)
def test_bpf_is_asked_for(monkeypatch: pytest.MonkeyPatch, number: int, level: str, fix: str | None) -> None:
    monkeypatch.setattr(features.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(ctypes, "get_errno", lambda: number)
    finding = features.check_bpf()
    assert finding.level == level
    assert finding.fix is None if fix is None else fix in (finding.fix or "")
    monkeypatch.setattr(features.platform, "machine", lambda: "pdp11")
    assert features.check_bpf().level == "info"


# --- logind ---


def remove_ipc(root: Path, uid: int = 1000) -> str:
    return features.check_remove_ipc(uid, root).level


def test_logind_takes_the_shared_memory_of_people_unless_told_not_to(tmp_path: Path) -> None:
    assert remove_ipc(tmp_path) == "ok", "there is no logind"
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    finding = features.check_remove_ipc(1000, tmp_path)
    assert (finding.level, "RemoveIPC=no" in (finding.fix or "")) == ("warn", True)
    assert (remove_ipc(tmp_path, 0), remove_ipc(tmp_path, 999)) == ("ok", "ok")
    make(tmp_path, "etc/login.defs", "SYS_UID_MAX\t\t 499\n")
    assert remove_ipc(tmp_path, 999) == "warn"
    make(tmp_path, "etc/systemd/logind.conf", "[Login]\n#RemoveIPC=no\n")
    assert remove_ipc(tmp_path) == "warn", "a comment says nothing"
    make(tmp_path, "etc/systemd/logind.conf", "[Login]\nRemoveIPC=no\n")
    assert remove_ipc(tmp_path) == "ok"
    make(tmp_path, "usr/lib/systemd/logind.conf.d/50-x.conf", "[Login]\nRemoveIPC = yes\n")
    assert remove_ipc(tmp_path) == "warn", "a drop-in goes over the file"
    make(tmp_path, "etc/systemd/logind.conf.d/50-x.conf", "[Login]\nRemoveIPC=false\n")
    assert remove_ipc(tmp_path) == "ok", "one in /etc takes the place of its namesake"
    make(tmp_path, "run/systemd/logind.conf.d/60-y.conf", "[Login]\nRemoveIPC=1\n")
    assert remove_ipc(tmp_path) == "warn", "the last name counts"


# --- groups and limits ---


def test_who_is_not_of_the_sockets_group_is_told_how_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(features.check_group(tmp_path)) == [], "there is no clawd"
    make(tmp_path, "control.sock")
    [finding] = features.check_group(tmp_path)
    assert finding.level == "ok"
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(os, "getegid", lambda: 65534)
    monkeypatch.setattr(os, "getgroups", lambda: [])
    [finding] = features.check_group(tmp_path)
    assert finding.level == "warn"
    assert "groupadd" in (finding.fix or "") if (tmp_path / "control.sock").stat().st_gid == 0 else finding.fix
    monkeypatch.setattr(os, "getgroups", lambda: [(tmp_path / "control.sock").stat().st_gid])
    [finding] = features.check_group(tmp_path)
    assert finding.level == "ok"


def test_a_low_limit_of_a_files_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    finding = features.check_file_size()
    assert (finding.level, "LimitFSIZE" in (finding.fix or "")) == ("warn", True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, resource.RLIM_INFINITY))
    assert features.check_file_size().level == "ok"


# --- hardware ---


def module(size: int, kind: int, speed: int, runs_at: int) -> bytes:
    data = bytearray(0x28)
    data[0x0C:0x0E], data[0x12] = size.to_bytes(2, "little"), kind
    data[0x15:0x17], data[0x20:0x22] = speed.to_bytes(2, "little"), runs_at.to_bytes(2, "little")
    return bytes(data)


def test_hardware_is_information_and_never_a_failure(tmp_path: Path) -> None:
    for _ in range(2):
        found = list(hardware.find_hardware(tmp_path))
        assert [(row.check, row.level, row.fix, row.feature) for row in found] == [
            (name, "info", None, "speed") for name in ("cores", "ram", "network", "disk")
        ]
        make(tmp_path, "proc/cpuinfo", b"\xff\xffcpu MHz : x\n")
        make(tmp_path, "sys/firmware/dmi/entries/17-0/raw", b"short")
        make(tmp_path, "sys/class/net/eth0/speed", "-1\n")


def test_hardware_is_told_beside_what_is_recommended(tmp_path: Path) -> None:
    make(tmp_path, "proc/cpuinfo", "processor : 0\ncpu MHz : 2596.1\n\nprocessor : 1\ncpu MHz : 2400\n")
    assert hardware.cores(tmp_path) == "2 cores of 2.6 GHz"
    make(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3800000\n")
    assert hardware.cores(tmp_path) == "2 cores of 3.8 GHz"
    make(tmp_path, "sys/firmware/dmi/entries/17-0/raw", module(8192, 0x1A, 3200, 2666))
    make(tmp_path, "sys/firmware/dmi/entries/17-1/raw", module(0, 0x02, 0, 0))
    assert hardware.memory(tmp_path) == "DDR4-2666"
    make(tmp_path, "sys/firmware/dmi/entries/17-0/raw", module(8192, 0x22, 4800, 0))
    assert hardware.memory(tmp_path) == "DDR5-4800"
    make(tmp_path, "sys/class/net/lo/speed", "-1\n")
    make(tmp_path, "sys/class/net/eth0/speed", "1000\n")
    make(tmp_path, "sys/class/net/eth1/speed", "25000\n")
    assert hardware.network(tmp_path) == "a network link of 25 Gbit/s"
    make(tmp_path, "sys/block/nvme0n1/size", "1")
    assert hardware.disk(tmp_path) == "NVMe: nvme0n1"
