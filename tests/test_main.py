# SPDX-License-Identifier: Apache-2.0
"""The `clawd` command: exit codes and one-line errors. The daemon behind it is a stand-in here."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import clawd
from clawd import __main__ as command
from clawd import log
from clawd.config import Config
from clawd.errors import AlreadyRunning, HostError
from clawd.sources import Configuration, Sources

pytestmark = pytest.mark.plain
NO_FILE = ["--config", os.devnull]
Serve = Callable[[Configuration, Sources], int]


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Serve], None]]:
    def install(serve: Serve) -> None:
        for name in ("clawd.server", "clawd.server.loop"):
            module = ModuleType(name)
            module.__dict__["__path__"] = []
            monkeypatch.setitem(sys.modules, name, module)
        module.__dict__["serve"] = serve

    yield install
    log._LOGGER.handlers.clear()


def raising(error: BaseException) -> Serve:
    def serve(configuration: Configuration, sources: Sources) -> int:
        raise error

    return serve


def test_the_daemon_gets_the_config_and_gives_the_exit_code(daemon) -> None:
    seen = []
    daemon(lambda configuration, sources: seen.append((configuration.config, sources)) or 0)
    assert command.main([*NO_FILE, "--max-producers", "3"]) == 0
    assert seen == [(Config(max_producers=3), Sources(Path(os.devnull), {"max_producers": "3"}))]
    daemon(lambda configuration, sources: 1)
    assert command.main(NO_FILE) == 1


def test_all_that_is_wrong_with_a_file_is_one_line_each_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "clawd.conf"
    file.write_text("[stream]\nkeep = soon\ntimeot = 1s\n")
    assert command.main(["--config", str(file), "--max-clients", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == (
        "",
        [
            f'clawd: {file}:2: keep: "soon" is not a duration; write digits, then ns, us, ms, s, min or h, as in 50ms',
            f"clawd: {file}:3: timeot: no such setting; did you mean timeout?",
            'clawd: --max-clients: "0" is not allowed; it must be 1 to 65536',
        ],
    )


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (HostError("no room in /dev/shm", "give it 64M"), "clawd: no room in /dev/shm; give it 64M\n"),
        (AlreadyRunning("another clawd serves /run/clawd"), "clawd: another clawd serves /run/clawd\n"),
        (
            ModuleNotFoundError("no zmq", name="zmq"),
            "clawd: the module zmq is missing; run: pip install 'clawd[daemon]'\n",
        ),
    ],
)
def test_an_expected_error_is_one_line_and_exit_1(daemon, error, shown, capsys: pytest.CaptureFixture[str]) -> None:
    daemon(raising(error))
    assert command.main(NO_FILE) == 1
    assert capsys.readouterr() == ("", shown)


def test_a_fault_of_clawd_is_not_hidden(daemon) -> None:
    daemon(raising(ModuleNotFoundError("no such module", name="clawd.server.lop")))
    with pytest.raises(ModuleNotFoundError):
        command.main(NO_FILE)


def test_an_interrupt_is_a_clean_end(daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon(raising(KeyboardInterrupt()))
    assert command.main(NO_FILE) == 0
    assert capsys.readouterr() == ("", "")


def test_a_bad_flag_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*NO_FILE, "--keep", "soon"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith('clawd: --keep: "soon" is not a duration; ')
    assert command.main(["--kep", "1s"]) == 2
    assert capsys.readouterr().err == "clawd: unrecognized arguments: --kep 1s (clawd --help shows every setting)\n"


def test_the_module_runs_as_a_command() -> None:
    run = subprocess.run([sys.executable, "-m", "clawd", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"clawd {clawd.__version__}\n", "")
    run = subprocess.run([sys.executable, "-m", "clawd", "--nonsense"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
