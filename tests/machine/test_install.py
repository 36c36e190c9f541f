# SPDX-License-Identifier: Apache-2.0
"""scripts/install as admins use it: what it puts where, an upgrade under load, taking away, and the Debian package."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import SOURCE, Traffic, pid, run, shown

INSTALL = str(SOURCE / "scripts/install")
CONFIG = Path("/etc/clawd/clawd.conf")
ENVIRONMENT = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/results/wheels"}
PLACES = ("/opt", "/etc", "/usr/bin", "/usr/include", "/usr/lib/systemd", "/usr/lib/sysusers.d", "/usr/lib/tmpfiles.d")
MORE_PLACES = ("/usr/share", "/var/lib/systemd", "/run", "/dev/shm")
INSTALL_S = 900
pytestmark = pytest.mark.timeout(2 * INSTALL_S)
NOISE = ("/run/systemd", "/run/log", "/run/udev", "/run/machine-tests", "/run/mount", "/var/lib/systemd", "/run/user")


@pytest.fixture(scope="module")
def wheel() -> str:
    return glob.glob("/results/wheels/clawd-*.whl")[0]


@pytest.fixture(scope="module")
def package(wheel: str) -> str:
    install("--wheel", wheel, "--deb", "/run/clawd.deb")
    return "/run/clawd.deb"


def install(*options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    # to make the environment takes a minute or more in emulation
    return run(INSTALL, *options, env=ENVIRONMENT, check=check, timeout=INSTALL_S)


def everything() -> set[str]:
    """Names of all files where an installer might put some."""
    # files come and go while it looks
    found = run("find", *PLACES, *MORE_PLACES, "-xdev", "-print", check=False).stdout.splitlines()
    return {path for path in found if not path.startswith(NOISE) and not path.endswith(".pyc")}


@pytest.fixture
def installed(package: str) -> Iterator[None]:
    """What the other tests need is there again afterwards."""
    yield
    if not Path("/opt/clawd").exists():
        run("dpkg", "-i", package)
    run("usermod", "-aG", "clawd", "engine")


def test_every_file_is_in_its_place() -> None:
    for path in (
        "/usr/bin/clawd",
        "/usr/bin/clawctl",
        "/usr/include/clawd_ring.h",
        "/usr/share/clawd/60-clawd.conf",
        "/usr/lib/systemd/system/clawd.service",
        "/usr/lib/sysusers.d/clawd.conf",
        "/usr/lib/tmpfiles.d/clawd.conf",
        "/etc/clawd/clawd.conf",
        "/usr/share/man/man1/clawd.1.gz",
        "/usr/share/man/man1/clawctl.1.gz",
        "/usr/share/man/man5/clawd.conf.5.gz",
        "/usr/share/bash-completion/completions/clawctl",
        "/usr/share/zsh/vendor-completions/_clawctl",
    ):
        status = Path(path).stat()
        assert (status.st_uid, status.st_mode & 0o022) == (0, 0), path
    assert len(glob.glob("/usr/share/clawd/clawd-*-cp311-abi3-*.whl")) == 1
    for page in ("clawd", "clawctl", "clawd.conf"):
        assert page in run("man", "-w", page).stdout
    assert "keep" in CONFIG.read_text()
    assert run("clawctl", "config", "check").stdout.startswith("good: 0 of ")
    assert not [path for path in everything() if "stage" in Path(path).parts]
    assert "/tmp/" not in run("cat", "/opt/clawd/pyvenv.cfg", "/opt/clawd/bin/clawd", "/opt/clawd/bin/clawctl").stdout


def test_bcc_is_the_systems() -> None:
    found = run(
        "/opt/clawd/bin/python", "-I", "-c", "import bcc, systemd, zmq; print(bcc.__file__, zmq.__file__)"
    ).stdout
    bcc, zmq = found.split()
    assert bcc.startswith("/usr/lib/python3/")
    assert zmq.startswith("/opt/clawd/"), "an upgrade of Debian's must not change what clawd runs with"


def test_an_upgrade_in_the_middle_of_streams_keeps_them_and_the_configuration(wheel: str) -> None:
    before, default, files = pid(), CONFIG.read_text(), everything()
    mine = default.replace("#keep = 60s", "keep = 7min")
    CONFIG.write_text(mine)
    try:
        with Traffic("upgraded", streams=10) as traffic:
            told = install("--wheel", wheel)
            assert f"kept {CONFIG}" in told.stdout
            assert pid() not in (0, before)
            traffic.finish()
        assert CONFIG.read_text() == mine
        assert "7min" in run("clawctl", "config", "show").stdout
    finally:
        CONFIG.write_text(default)
    assert everything() == files, "the same again: nothing new, nothing gone"


def test_a_dry_run_does_nothing() -> None:
    files, main = everything(), pid()
    assert "/opt/clawd" in install("--dry-run").stdout
    assert "/usr/bin/clawctl" in install("--uninstall", "--dry-run").stdout
    assert (everything(), pid()) == (files, main)


def test_an_uninstall_leaves_nothing_but_what_the_admin_made(installed: None) -> None:
    mine = Path("/etc/clawd/clawd.conf.d/mine.conf")
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("[stream]\nkeep = 2min\n")
    background = "clawd_background.slice"
    run("systemd-run", "--unit=yields", f"--slice={background}", "sleep", "infinity")
    told = install("--uninstall").stdout
    assert f"kept {background}: something runs in it" in told
    assert shown("yields", "ActiveState") == "active"
    run("systemctl", "stop", "yields", background)
    assert f"kept {mine.parent}" in told
    assert "kept the group clawd, of engine" in told
    left = [path for path in everything() if "clawd" in path and not path.endswith(".deb")]
    assert sorted(left) == ["/etc/clawd", str(mine.parent), str(mine)]
    assert run("getent", "passwd", "clawd", check=False).returncode != 0
    assert run("systemctl", "list-unit-files", "--no-legend", "clawd*", check=False).stdout == ""
    assert run("systemctl", "list-units", "--all", "--no-legend", "clawd*").stdout == ""
    run("rm", "-r", "/etc/clawd")
    run("groupdel", "clawd")
    again = install("--uninstall", check=False)
    assert (again.returncode, again.stderr) == (1, "install: clawd is not installed here: no /opt/clawd/manifest\n")


def test_the_debian_package_installs_upgrades_and_purges(installed: None, package: str, wheel: str) -> None:
    run("systemctl", "enable", "--now", "clawd")
    assert run("dpkg", "-V", "clawd").stdout == ""
    assert "install: clawd is here as a Debian package" in install("--wheel", wheel, check=False).stderr
    main = pid()
    with Traffic("packaged") as traffic:
        run("dpkg", "-i", package)
        assert pid() not in (0, main)
        traffic.finish()
    run("gpasswd", "-d", "engine", "clawd")
    run("systemctl", "start", "clawd_background.slice")
    run("dpkg", "--purge", "clawd")
    assert shown("clawd", "LoadState") == "not-found"
    assert [path for path in everything() if "clawd" in path] == [package]
    assert run("getent", "group", "clawd", check=False).returncode != 0
