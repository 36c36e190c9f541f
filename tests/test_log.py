# SPDX-License-Identifier: Apache-2.0
"""The log: one line per event whatever a peer is called, with the journal's prefix only where the journal reads."""

import contextlib
import io
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawd import log
from clawd.errors import HostError

pytestmark = pytest.mark.plain
PEOPLE = r"\d\d:\d\d:\d\d\.\d{3} "


@pytest.fixture(autouse=True)
def _quiet_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log, "JOURNAL", "/nonexistent/journal")  # a host's own gets nothing of these tests
    yield
    for handler in logging.getLogger("clawd").handlers:
        handler.close()
    logging.getLogger("clawd").handlers.clear()


def journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> io.TextIOWrapper:
    stream = path.open("w", encoding="utf-8")
    status = os.fstat(stream.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    return stream


def test_people_read_the_time_the_level_and_the_fields_in_order() -> None:
    stream = io.StringIO()
    log.start(stream)
    log.event("producer attached", name="llama-0", pid=7, ring=None)
    log.warning("ring quarantined", name="a b")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(PEOPLE + "INFO producer attached name=llama-0 pid=7 ring=-", first)
    assert re.fullmatch(PEOPLE + 'WARNING ring quarantined name="a b"', second)


def test_the_journal_gets_priorities_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with journal(tmp_path / "journal", monkeypatch) as stream:
        log.start(stream, logging.DEBUG)
        log.event("ready")
        log.warning("slow", turn_ns=5)
        log.failure("cannot go on", HostError("no memory", "add some"))
        log.event("turn", logging.DEBUG)
    assert (tmp_path / "journal").read_text().splitlines() == [
        "<6>ready",
        "<4>slow turn_ns=5",
        '<3>cannot go on error="no memory; add some"',
        "<7>turn",
    ]


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """In journald's place."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as server:
        server.bind(str(tmp_path / "journald"))
        monkeypatch.setattr(log, "JOURNAL", str(tmp_path / "journald"))
        yield server


def test_journald_gets_a_field_for_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journald: socket.socket
) -> None:
    with journal(tmp_path / "journal", monkeypatch) as stream:
        log.start(stream)
        log.warning("stream refused", stream="chat 1", reason="exists", pid=None)
        assert journald.recv(4096).decode().splitlines() == [
            'MESSAGE=stream refused stream="chat 1" reason=exists pid=-',
            "PRIORITY=4",
            "SYSLOG_IDENTIFIER=clawd",
            "STREAM=chat 1",
            "REASON=exists",
            "PID=-",
        ]
        # a name that would be a field of its own
        log.event("client connected", client="x\nPRIORITY=0")
        packet = journald.recv(4096)
        assert packet.count(b"\nPRIORITY=") == 2
        assert packet.endswith(b"\nCLIENT\n" + (12).to_bytes(8, "little") + b"x\nPRIORITY=0\n")
    assert (tmp_path / "journal").read_text() == ""


def test_a_journald_that_is_full_holds_nobody_up_and_is_told_how_much_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journald: socket.socket
) -> None:
    with journal(tmp_path / "journal", monkeypatch) as stream:
        log.start(stream)
        sent = 5000  # more than the kernel keeps for a datagram socket
        for number in range(sent):
            log.event("turn", number=number)
        got = 0
        with contextlib.suppress(BlockingIOError):
            while journald.recv(4096):
                got += 1
        assert 0 < got < sent
        log.event("again")
        assert f"LOST={sent - got}\n" in journald.recv(4096).decode()
        log.event("and again")
        assert "LOST" not in journald.recv(4096).decode()


def test_without_journald_lines_go_where_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journald: socket.socket
) -> None:
    with journal(tmp_path / "journal", monkeypatch) as stream:
        log.start(stream)
        journald.close()
        log.warning("slow", stream="a")
    assert (tmp_path / "journal").read_text() == "<4>slow stream=a\n"


def test_another_file_than_the_journals_gets_no_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal(tmp_path / "journal", monkeypatch).close()
    with (tmp_path / "other").open("w") as stream:
        assert not log.is_journal(stream)
    assert not log.is_journal(io.StringIO())


def test_a_fault_of_clawd_leaves_a_traceback_with_a_prefix_on_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with journal(tmp_path / "journal", monkeypatch) as stream:
        log.start(stream)
        try:
            raise ValueError("odd\ncase")
        except ValueError as error:
            log.failure("turn failed", error)
    lines = (tmp_path / "journal").read_text().splitlines()
    assert lines[0] == '<3>turn failed error="odd\\ncase"'
    assert lines[1] == "<3>Traceback (most recent call last):"
    assert [line for line in lines if not line.startswith("<3>")] == []


def test_below_the_level_nothing_is_written() -> None:
    stream = io.StringIO()
    log.start(stream, logging.WARNING)
    log.event("not shown")
    assert stream.getvalue() == ""


def test_starting_again_does_not_double_the_lines() -> None:
    stream = io.StringIO()
    log.start(io.StringIO())
    log.start(stream)
    log.event("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_closed_stderr_stops_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    log.start(stream)
    stream.close()
    log.event("said to nobody")
    assert capfd.readouterr() == ("", "")


@given(st.text(st.characters(), max_size=20))
def test_no_value_breaks_a_line_or_reaches_the_terminal_raw(value: str) -> None:
    stream = io.StringIO()
    log.start(stream)
    log.event("opened", stream=value, after=1)
    text = stream.getvalue()
    assert text.endswith(" after=1\n")
    assert text[:-1].isprintable()


def test_text_in_another_script_stays_readable() -> None:
    assert log.field("stream", "你好") == "stream=你好"
    assert log.field("stream", "你 好") == 'stream="你 好"'
    assert log.field("stream", "\x1b[2J") == 'stream="\\u001b[2J"'
