# SPDX-License-Identifier: Apache-2.0
"""`clawctl` as people and programs run it, against a clawd that runs, is stopped, was killed, or never was."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from clawd import protocol
from clawd.consumer import Consumer
from clawd.ctl import render
from clawd.ctl.main import VERBS
from clawd.errors import AttachError
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon, until

pytestmark = pytest.mark.plain

LISTS = ("streams", "producers", "consumers")
LOOKS = ("status", *LISTS)
HOSTILE = "e\x1b[31mvil\u202e"


def hostile_producer(runtime_dir: Path) -> Producer:
    """One that says what the SDK would refuse to say, as a program of its own may."""
    with patch("clawd.ring.encoded", lambda _what, value, _longest: value.encode()):
        return Producer(HOSTILE, runtime_dir)


def let_in(daemon: Daemon) -> None:
    """Let everybody come as far as to the runtime directory's files."""
    for path in [daemon.runtime_dir, *daemon.runtime_dir.parents]:
        if "pytest" in str(path):
            path.chmod(0o755)


def command(runtime_dir: Path, *words: str) -> Sequence[str]:
    return [sys.executable, "-m", "clawd.ctl.main", *words, "--runtime-dir", str(runtime_dir)]


def clawctl(runtime_dir: Path, *words: str, columns: int = 80, env: dict[str, str] | None = None) -> Any:
    environment = {**os.environ, "COLUMNS": str(columns), **(env or {})}
    return subprocess.run(
        command(runtime_dir, *words), capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )


def told(runtime_dir: Path, *words: str) -> dict[str, Any]:
    """What --json says, of a command that must succeed."""
    run = clawctl(runtime_dir, *words, "--json")
    assert (run.returncode, run.stderr) == (0, "")
    value = json.loads(run.stdout)
    assert value["version"] == 1
    return dict(value)


@contextmanager
def busy(daemon: Daemon) -> Iterator[None]:
    """Two producers, one stream that lives and one that ended, a reader."""
    with Producer("llama-0", daemon.runtime_dir) as one, Producer("vllm", daemon.runtime_dir) as two:
        live, ended = one.open("live-1"), two.open("a-stream-with-a-name-that-is-a-good-deal-longer-than-it-has-to-be")
        ended.write("done")
        ended.close("stop")
        live.write("Hel")
        with Consumer(daemon.runtime_dir) as consumer:
            reading = consumer.attach("live-1")
            assert reading.read(PATIENCE_S).text == "Hel"
            until(lambda: daemon.total("ended") == 1, "the end")
            yield


def test_status_and_lists_tell_what_there_is(daemon: Daemon) -> None:
    with busy(daemon):
        value = told(daemon.runtime_dir, "status")
        assert (value["pid"], value["producers"], value["clients"], value["answering"]) == (daemon.pid, 2, 1, True)
        assert value["totals"]["tokens"] == 2
        rows = told(daemon.runtime_dir, "streams")["streams"]
        assert [(row["name"][:8], row["state"], row["reason"]) for row in rows] == [
            ("live-1", "live", None),
            ("a-stream", "ended", "stop"),
        ]
        rows = told(daemon.runtime_dir, "producers")["producers"]
        assert [(row["name"], row["pid"], row["uid"], row["streams"]) for row in rows] == [
            ("llama-0", os.getpid(), os.getuid(), 1),
            ("vllm", os.getpid(), os.getuid(), 0),
        ]
        [row] = told(daemon.runtime_dir, "consumers")["consumers"]
        assert (row["pid"], row["role"], row["attachments"], row["blocked"]) == (os.getpid(), "consumer", 1, False)


@pytest.mark.parametrize("columns", [80, 20])
@pytest.mark.parametrize("verb", LOOKS)
def test_a_table_is_no_wider_than_the_terminal(daemon: Daemon, verb: str, columns: int) -> None:
    with busy(daemon):
        run = clawctl(daemon.runtime_dir, verb, columns=columns)
        assert (run.returncode, run.stderr) == (0, "")
        lines = run.stdout.splitlines()
        assert len(lines) > 1
        assert [line for line in lines if len(line) > columns] == []


def test_no_verb_is_status(daemon: Daemon) -> None:
    run = clawctl(daemon.runtime_dir)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("clawd 0.")


def test_nothing_to_list_is_a_header_alone(daemon: Daemon) -> None:
    for verb in LISTS:
        assert told(daemon.runtime_dir, verb)[verb] == []
        run = clawctl(daemon.runtime_dir, verb)
        assert (run.returncode, len(run.stdout.splitlines())) == (0, 1)


@pytest.mark.parametrize("verb", LOOKS)
def test_a_stopped_daemon_is_looked_at_and_degraded(daemon: Daemon, verb: str) -> None:
    with busy(daemon):
        before = told(daemon.runtime_dir, verb)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            run = clawctl(daemon.runtime_dir, verb, "--json")
            table = clawctl(daemon.runtime_dir, verb)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert (run.returncode, table.returncode) == (4, 4)
        assert run.stderr.count("\n") == 1
        assert "clawd does not answer" in run.stderr
        value = json.loads(run.stdout)
        assert value["answering"] is False
        assert before["answering"] is True
        if verb == "streams":
            assert value["streams"] == before["streams"]


@pytest.mark.parametrize("words", [("tail", "live-1"), ("cancel", "live-1")])
def test_what_needs_an_answer_does_not_wait_for_a_stopped_daemon(daemon: Daemon, words: tuple[str, ...]) -> None:
    with busy(daemon):
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            run = clawctl(daemon.runtime_dir, *words)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert (run.returncode, run.stdout) == (3, "")
        assert "clawd does not answer" in run.stderr


@pytest.mark.parametrize("words", [*((verb,) for verb in LOOKS), ("tail", "s"), ("cancel", "s"), ("cancel", "s", "--dry-run")])  # fmt: skip # noqa: E501
def test_without_a_daemon_it_is_one_line_and_exit_3(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = clawctl(tmp_path / "nowhere", *words)
    assert (run.returncode, run.stdout) == (3, "")
    assert run.stderr.startswith("clawctl: cannot find clawd at ")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_daemon_that_ended_is_unreachable(victim: Daemon, end: str) -> None:
    getattr(victim, end)()
    for verb in ("status", "streams"):
        run = clawctl(victim.runtime_dir, verb)
        assert (run.returncode, run.stdout) == (3, "")
        assert run.stderr.startswith("clawctl: no clawd runs at ")
    with Daemon(victim.runtime_dir, "--spool-bytes", "1M", "--stream-bytes", "64k") as successor:
        assert told(victim.runtime_dir, "status")["pid"] == successor.pid


@pytest.mark.parametrize("verb", LOOKS)
def test_a_closed_pipe_is_no_traceback(daemon: Daemon, verb: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        run = subprocess.run(
            command(daemon.runtime_dir, verb), stdout=closed, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
    assert (run.returncode, run.stderr) == (1, "")


WITHOUT_HARM = [
    *((verb,) for verb in LOOKS),
    ("top", "--count=1", "--interval=0.1"),
    ("stop", "--dry-run"),
    ("config",),
]


@pytest.mark.parametrize("words", WITHOUT_HARM)
def test_an_output_that_is_closed_or_full_is_no_traceback(daemon: Daemon, words: tuple[str, ...]) -> None:
    for where, code, said in ((">&-", 0, ""), (">/dev/full", 1, "clawctl: cannot write the output: No space left")):
        run = subprocess.run(
            ["bash", "-c", f'"$@" {where}', "bash", *command(daemon.runtime_dir, *words)],
            stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert (run.returncode, run.stderr.count("\n")) == (code, code)
        assert run.stderr.startswith(said)


def test_what_a_peer_named_does_not_reach_the_terminal_as_an_escape(daemon: Daemon) -> None:
    with hostile_producer(daemon.runtime_dir) as producer:
        producer.open("s")
        until(lambda: "s" in daemon.streams(), "the stream")
        assert told(daemon.runtime_dir, "producers")["producers"][0]["name"] == HOSTILE
        shown = clawctl(daemon.runtime_dir, "producers").stdout
        assert "\x1b" not in shown
        assert "e?[31mvil?" in shown


def test_whoever_may_not_read_the_page_is_told_so(daemon: Daemon) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    let_in(daemon)
    program = (
        "import os, sys; from pathlib import Path; from clawd.ctl.main import main\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "sys.exit(main(['status', '--runtime-dir', sys.argv[1]]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(daemon.runtime_dir)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert "Permission denied; be root or of the group of" in run.stderr


# --- usage ---


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("strems",), 'did you mean "streams"?'),
        (("producer",), 'did you mean "producers"?'),
        (("xyz",), "verbs: status, top,"),
        (("status", "--nonsense"), "unrecognized arguments: --nonsense (clawctl status --help"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
        (("tail",), "required: STREAM (clawctl tail --help"),
        (("cancel", "a", "b"), "unrecognized arguments: b"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_right(tmp_path: Path, words: tuple[str, ...], hint: str) -> None:
    run = clawctl(tmp_path, *words)
    assert (run.returncode, run.stdout) == (2, "")
    assert hint in run.stderr
    assert run.stderr.count("\n") == 1


def test_options_may_come_before_the_verb(daemon: Daemon) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "clawd.ctl.main", "--runtime-dir", daemon.runtime_dir, "--json", "streams"],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (run.returncode, json.loads(run.stdout)["streams"]) == (0, [])


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_has_an_example_and_fits_80_columns(verb: str) -> None:
    words = [verb, "--help"] if verb else ["--help"]
    run = subprocess.run(
        [sys.executable, "-m", "clawd.ctl.main", *words], capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "CLAWD_RUNTIME_DIR": "/run/clawd"},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    for name in [verb] if verb else VERBS:
        assert VERBS[name].EXAMPLE in run.stdout
        assert VERBS[name].HELP[1:] in run.stdout
    assert "exit codes: 0 done" in run.stdout
    assert [line for line in run.stdout.splitlines() if len(line) > 80] == []


def test_a_narrow_table_loses_its_last_columns_and_no_first() -> None:
    shown = render.table(("name", "state", "tokens"), [("a-long-name-indeed", "live", 12345)], 22)
    assert shown.splitlines()[0].split() == ["NAME", "STATE"]
    assert render.table(("name", "n"), [("abc", 1)], 22).splitlines() == ["NAME  N", "abc   1"]


# --- tail ---


class Tail:
    """A running `clawctl tail`."""

    def __init__(self, daemon: Daemon, *words: str) -> None:
        self.process = subprocess.Popen(
            command(daemon.runtime_dir, "tail", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        until(self._attached(daemon), "the observer to attach")

    @staticmethod
    def _attached(daemon: Daemon) -> Any:
        return lambda: any(
            row["role"] == "observer" and row["attachments"]
            for row in told(daemon.runtime_dir, "consumers")["consumers"]
        )

    def rest(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out.decode(), err.decode()


def test_tail_shows_what_comes_from_now_on_and_why_it_ended(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("before ")
        until(lambda: daemon.total("tokens") == 1, "the token")
        tail = Tail(daemon, "s")
        stream.write("Hél".encode()[:2])
        stream.write("Hél".encode()[2:])
        assert tail.process.stdout
        assert tail.process.stdout.read(4).decode() == "Hél", "it comes live"
        stream.close("stop")
        assert tail.rest() == (0, "", "clawctl: the stream ended: stop\n")


def test_tail_from_start_shows_all_that_is_kept(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        for number in range(100):
            stream.write(f"{number} ")
        stream.close("length")
        until(lambda: daemon.total("ended") == 1, "the end")
    run = clawctl(daemon.runtime_dir, "tail", "s", "--from-start")
    assert (run.returncode, run.stderr) == (0, "clawctl: the stream ended: length\n")
    assert run.stdout == "".join(f"{number} " for number in range(100))
    run = clawctl(daemon.runtime_dir, "tail", "s")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "clawctl: the stream ended: length\n")


def test_tail_as_json_is_an_object_a_token_and_the_end(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("a", urgent=True)
        stream.write("b", count=3)
        stream.close("stop")
        until(lambda: daemon.total("ended") == 1, "the end")
    run = clawctl(daemon.runtime_dir, "tail", "s", "--from-start", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(line["seq"], line["text"], line["count"]) for line in lines[:-1]] == [(0, "a", 1), (1, "b", 3)]
    assert lines[-1] == {"version": 1, "end": "stop"}


def test_tail_says_where_tokens_are_missing(start: Any) -> None:
    daemon = start("--spool-bytes", "1M", "--stream-bytes", "16k")
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        for _ in range(2000):
            stream.write("x" * 100, block=PATIENCE_S)
        stream.close("stop", block=PATIENCE_S)
        until(lambda: daemon.total("ended") == 1, "the end")
    run = clawctl(daemon.runtime_dir, "tail", "s", "--from-start")
    assert run.returncode == 0
    assert "are missing: evicted" in run.stderr
    run = clawctl(daemon.runtime_dir, "tail", "s", "--from-start", "--json")
    assert [line for line in run.stdout.splitlines() if '"gap"' in line]


def test_tail_of_a_stream_that_is_not_there_is_exit_1(daemon: Daemon) -> None:
    for words in (("nope",), ("nope", "--from-start"), ("nope", "--json")):
        run = clawctl(daemon.runtime_dir, "tail", *words)
        assert (run.returncode, run.stdout) == (1, "")
        assert run.stderr == 'clawctl: no stream "nope" is open; clawctl streams lists them\n'


def test_an_interrupted_tail_ends_quietly_and_harms_nothing(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        stream.write("a")
        reading = consumer.attach("s")
        assert reading.read(PATIENCE_S).text == "a"
        tail = Tail(daemon, "s")
        tail.process.send_signal(signal.SIGINT)
        assert tail.rest() == (0, "", "")
        stream.write("b")
        stream.close("stop")
        assert [token.text for token in reading] == ["b"]
        assert reading.end_reason == "stop"
    assert daemon.total("cancelled") == 0


def test_tail_gives_up_when_the_daemon_is_gone(victim: Daemon) -> None:
    with Producer("p", victim.runtime_dir) as producer:
        producer.open("s").write("a")
        until(lambda: victim.total("tokens") == 1, "the token")
        tail = Tail(victim, "s")
        victim.kill()
        code, out, err = tail.rest()
        assert (code, out) == (3, "")
        assert "no clawd runs at" in err


def test_an_observer_may_not_cancel(daemon: Daemon) -> None:
    class Observer(Consumer):
        _role = "observer"

    with Producer("p", daemon.runtime_dir) as producer, Observer(daemon.runtime_dir) as observer:
        stream = producer.open("s")
        reading = observer.attach("s")
        stream.write("a")
        assert reading.read(PATIENCE_S).text == "a"
        reading.cancel()
        with pytest.raises(AttachError, match="may not cancel"):
            reading.read(PATIENCE_S)
        stream.write("b")
        stream.close("stop")
        early = observer.attach("later")
        early.cancel()
        producer.open("later").close("stop")
        until(lambda: daemon.total("ended") == 2, "the ends")
    assert daemon.total("cancelled") == 0


# --- cancel ---


def test_cancel_ends_a_stream_for_everybody(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        reading = consumer.attach("s")
        stream.write("a")
        assert reading.read(PATIENCE_S).text == "a"
        plan = told(daemon.runtime_dir, "cancel", "s", "--dry-run")
        assert (plan["cancelled"], plan["dry_run"], plan["tokens"], plan["readers"]) == (False, True, 1, 1)
        table = clawctl(daemon.runtime_dir, "cancel", "s", "--dry-run").stdout
        assert table == "would cancel s after 1 tokens, 1 readers\n"
        assert not stream.cancelled
        done = told(daemon.runtime_dir, "cancel", "s")
        assert (done["cancelled"], done["dry_run"], done["stream"]) == (True, False, "s")
        assert list(reading) == []
        assert reading.end_reason == "cancelled"
        assert stream.cancelled
        for words in (("s",), ("s", "--dry-run")):
            run = clawctl(daemon.runtime_dir, "cancel", *words)
            assert (run.returncode, run.stdout) == (1, "")
            assert 'stream "s" has ended already' in run.stderr


@pytest.mark.parametrize("words", [("nope",), ("nope", "--dry-run"), ("nope", "--json")])
def test_cancel_of_a_stream_that_is_not_there_is_exit_1(daemon: Daemon, words: tuple[str, ...]) -> None:
    run = clawctl(daemon.runtime_dir, "cancel", *words)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith('clawctl: no stream "nope" is open')


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_cancel_of_what_is_no_name_is_exit_1(daemon: Daemon, name: str) -> None:
    run = clawctl(daemon.runtime_dir, "cancel", name)
    assert (run.returncode, run.stdout) == (1, "")
    assert "is no name of a stream" in run.stderr


def test_somebody_else_may_not_cancel(daemon: Daemon) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("a")
        until(lambda: daemon.total("tokens") == 1, "the token")
        answers: list[bytes] = []

        def ask() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
                control.settimeout(PATIENCE_S)
                control.connect(os.fspath(daemon.runtime_dir / protocol.CONTROL_SOCKET))
                control.send(protocol.encode(protocol.CancelStream("s")))
                answers.append(control.recv(4096))

        (daemon.runtime_dir / protocol.CONTROL_SOCKET).chmod(0o666)
        let_in(daemon)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                ask()
                code = 0 if json.loads(answers[0])["code"] == "denied" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not stream.cancelled
