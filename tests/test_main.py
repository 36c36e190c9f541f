# SPDX-License-Identifier: Apache-2.0
"""The `clawd` command: exit codes and one-line errors. The daemon behind it is a stand-in here."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

import clawd
from clawd import __main__ as command
from clawd import log
from clawd.config import Config
from clawd.errors import AlreadyRunning, HostError

pytestmark = pytest.mark.plain


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Config], int]], None]]:
    def install(serve: Callable[[Config], int]) -> None:
        for name in ("clawd.server", "clawd.server.loop"):
            module = ModuleType(name)
            module.__dict__["__path__"] = []
            monkeypatch.setitem(sys.modules, name, module)
        module.__dict__["serve"] = serve

    yield install
    log._LOGGER.handlers.clear()


def raising(error: BaseException) -> Callable[[Config], int]:
    def serve(config: Config) -> int:
        raise error

    return serve


def test_the_daemon_gets_the_config_and_gives_the_exit_code(daemon) -> None:
    seen = []
    daemon(lambda config: seen.append(config) or 0)
    assert command.main(["--max-producers", "3"]) == 0
    assert seen == [Config(max_producers=3)]
    daemon(lambda config: 1)
    assert command.main([]) == 1


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
    assert command.main([]) == 1
    assert capsys.readouterr() == ("", shown)


def test_a_fault_of_clawd_is_not_hidden(daemon) -> None:
    daemon(raising(ModuleNotFoundError("no such module", name="clawd.server.lop")))
    with pytest.raises(ModuleNotFoundError):
        command.main([])


def test_an_interrupt_is_a_clean_end(daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon(raising(KeyboardInterrupt()))
    assert command.main([]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_bad_flag_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--keep", "soon"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith('clawd: --keep: "soon" is not a duration; ')


def test_the_module_runs_as_a_command() -> None:
    run = subprocess.run([sys.executable, "-m", "clawd", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"clawd {clawd.__version__}\n", "")
    run = subprocess.run([sys.executable, "-m", "clawd", "--nonsense"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
