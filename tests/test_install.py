# SPDX-License-Identifier: Apache-2.0
"""scripts/install and scripts/machine as far as they can be tried without changing this host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import packages

pytestmark = pytest.mark.plain
ROOT = Path(__file__).parent.parent
INSTALL = ROOT / "scripts/install"
needs_debian = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg here")


def run(*command: str | Path, **options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **options}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("name", ["install", "machine", "host.sh"])
def test_it_is_good_bash(name: str) -> None:
    checked = run("bash", "-n", ROOT / "scripts" / name)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_help_names_every_option_and_another_is_refused() -> None:
    told = run(INSTALL, "--help")
    assert told.returncode == 0
    for option in re.findall(r"^\t(--[a-z-]+)\)", INSTALL.read_text(), re.MULTILINE):
        assert option in told.stdout
    refused = run(INSTALL, "--force")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == 'install: no option "--force"; see scripts/install --help\n'


def test_what_it_needs_is_what_the_daemon_declares() -> None:
    told = run(INSTALL, "--needs")
    assert told.returncode == 0
    names = {re.split(r"\W", line)[0] for line in told.stdout.splitlines()}
    assert {"cffi", "posix", "pyzmq", "rich", "pyroute2"} <= names
    assert "systemd" not in names, "Debian's"


@needs_debian
def test_without_debians_packages_it_names_the_command(tmp_path: Path) -> None:
    query = tmp_path / "dpkg-query"
    query.write_text("#!/bin/sh\nexit 1\n")
    query.chmod(0o755)
    refused = run(INSTALL, "--dry-run", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert refused.returncode == 1
    assert refused.stderr == (
        "install: Debian packages are missing; run: sudo apt-get install -y python3 python3-venv python3-systemd\n"
    )


@needs_debian
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_package_has_all_that_a_dry_run_told(tmp_path: Path) -> None:
    wheel = packages.make_wheel(packages.tree(tmp_path / "tree"), tmp_path)
    made = run(INSTALL, "--wheel", wheel, "--deb", tmp_path / "clawd.deb")
    assert made.returncode == 0, made.stderr
    listed = run("dpkg-deb", "-c", tmp_path / "clawd.deb").stdout.splitlines()
    paths = {line.split()[5].removeprefix(".") for line in listed}
    assert {line.split()[1] for line in listed} == {"root/root"}
    assert not [line for line in listed if re.match(r".{5}w|.{8}w", line) and not line.startswith("l")]
    told = run(INSTALL, "--dry-run").stdout
    for path in re.findall(r"^  (/\S+)$", told, re.MULTILINE):
        pattern = re.escape(path).replace("VERSION\\.whl", r"\S+\.whl")
        assert any(re.fullmatch(pattern, found) for found in paths), path
    control = run("dpkg-deb", "-e", tmp_path / "clawd.deb", tmp_path / "control")
    assert control.returncode == 0
    assert (tmp_path / "control/conffiles").read_text() == "/etc/clawd/clawd.conf\n"
    for name in ("postinst", "prerm", "postrm"):
        checked = run("bash", "-n", tmp_path / "control" / name)
        assert (checked.returncode, checked.stderr) == (0, "")
