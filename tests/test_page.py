# SPDX-License-Identifier: Apache-2.0
"""The page of figures: its layout, rows that are never torn, and readers that believe nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd import page as page_module
from clawd import stats
from clawd.core import Label, Limits, Told, ffi, lib, page_bytes
from clawd.ctl import consumers
from clawd.errors import ControlError
from clawd.page import Life, Page, Unreachable
from tests.cprogram import CSRC, NATIVE, compile_c, run_c
from tests.rig import DEFAULTS, Rig

MAGIC_AT, LAYOUT_AT, BYTES_AT = 0, 4, 8
STREAMS_AT = ffi.offsetof("struct claw_page_header", "streams")
DEFAULT_LIMITS = Limits(64 << 20, 4 << 20, 10**9, 16384, 64, 1024, 65536)


@contextlib.contextmanager
def shown(tmp_path: Path, **limits: int) -> Iterator[tuple[Rig, Path]]:
    """A core whose page is found through a runtime directory, as a daemon's is."""
    instance = secrets.token_hex(8)
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir(exist_ok=True)
    (runtime_dir / "instance").write_text(f"{instance}\n")
    path = page_module.SHM / page_module.stats_name(instance)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
    try:
        os.posix_fallocate(fd, 0, page_bytes(Limits(**(DEFAULTS | limits))))
        with Rig(limits, page_fd=fd) as rig:
            rig.core.publish(9, 1, "1.2.3", runtime_dir)
            yield rig, runtime_dir
    finally:
        os.close(fd)
        path.unlink()


def shared(runtime_dir: Path) -> Path:
    return page_module.SHM / page_module.stats_name(page_module.read_instance(runtime_dir))


def poke(path: Path, at: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)


def test_with_the_default_limits_it_takes_at_most_8_mib() -> None:
    assert page_bytes(DEFAULT_LIMITS) <= 8 << 20


def test_every_row_is_whole_words_and_its_seq_is_first() -> None:
    for name in ("stream", "ring", "connection", "mark"):
        assert ffi.sizeof(f"struct claw_page_{name}") % 8 == 0
        assert ffi.offsetof(f"struct claw_page_{name}", "seq") == 0


def test_the_way_to_a_client_is_shown_where_it_is_known(tmp_path: Path) -> None:
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        near, far = rig.core.connect(), rig.core.connect()
        for number, name in ((near, "near"), (far, "far")):
            rig.core.label_connection(number, Label(name, 42, 1001, lib.CLAW_ROLE_CONSUMER))
        rig.turn()
        value = {"consumers": stats.consumers(page)}
        assert {row["rtt_us"] for row in value["consumers"]} == {None}
        assert "loss" not in consumers.show(value)
        rig.core.open_way(far)
        rig.core.tell_way(far, Told(time.monotonic_ns(), 41_000, 3_000, 1000, 15))
        rig.turn()
        value = {"consumers": stats.consumers(page)}
        row = {row["name"]: row for row in value["consumers"]}["far"]
        assert (row["rtt_us"], row["jitter_us"], row["loss_ppm"]) == (41_000, 3_000, 15_000)
        assert 0 <= row["way_age_ns"] < 20 * 10**9
        lines = {line.split()[0]: line.split() for line in consumers.show(value).splitlines()}
        assert lines["NAME"][5:8] == ["RTT", "JITTER", "LOSS"]
        assert lines["far"][5:8] == ["41ms", "3ms", "1.5%"]
        assert lines["near"][5:8] == ["-", "-", "-"]


def test_it_shows_what_a_turn_did(tmp_path: Path) -> None:
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        ring = rig.ring()
        rig.core.label_ring(ring.index, Label("llama-0", 41, 1000, lib.CLAW_ROLE_PRODUCER))
        number = rig.core.connect()
        rig.core.label_connection(number, Label("reader", 42, 1001, lib.CLAW_ROLE_OBSERVER))
        ring.open(1, "s-1", requested_ns=5)
        ring.write(1, b"abc")
        ring.write(1, b"de")
        rig.core.attach(number, 1, b"s-1", credit=1 << 20, deadline_ns=1 << 62)
        rig.core.count_clients(3)
        rig.turn()
        assert (page.header().pid, page.header().daemon_epoch, page.header().clients) == (os.getpid(), 9, 3)
        [stream] = stats.streams(page)
        assert (stream["name"], stream["state"], stream["tokens"], stream["text_bytes"]) == ("s-1", "live", 2, 5)
        assert (stream["next_seq"], stream["attachments"], stream["reason"]) == (2, 1, None)
        [producer] = stats.producers(page)
        assert (producer["name"], producer["pid"], producer["uid"]) == ("llama-0", 41, 1000)
        assert (producer["tokens"], producer["records"], producer["used_bytes"], producer["state"]) == (2, 3, 0, "live")
        [client] = stats.consumers(page)
        assert (client["name"], client["role"], client["attachments"]) == ("reader", "observer", 1)
        assert client["sent_bytes"] == client["unacked_bytes"] > 0
        status = stats.status(page)
        assert (status["clawd_version"], status["producers"], status["clients"]) == ("1.2.3", 1, 3)
        assert status["totals"]["tokens"] == page.totals().tokens == 2
        assert page.quantiles(lib.CLAW_HIST_COMMIT, (0.5,))[0] + status["totals"]["odd_clock"] == 2


def test_first_tokens_are_accounted_by_themselves_too() -> None:
    stages = ((lib.CLAW_HIST_COMMIT, lib.CLAW_HIST_COMMIT_FIRST), (lib.CLAW_HIST_HELD, lib.CLAW_HIST_HELD_FIRST),
              (lib.CLAW_HIST_SEND, lib.CLAW_HIST_SEND_FIRST))  # fmt: skip
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        for handle in range(3):
            ring.open(handle, f"s{handle}")
        rig.turn()
        for handle in range(3):
            rig.core.attach(client, handle + 1, f"s{handle}".encode(), credit=1 << 20)
        for turn in range(4):
            for handle in range(3):
                ring.put(lib.CLAW_TOKEN, handle, b"a", at=time.monotonic_ns() - (9_000_000 if turn == 0 else 1_000_000))
            rig.turn()
            for frame in rig.frames:
                rig.core.sent(frame, time.monotonic_ns())
        for every, first in stages:
            assert (rig.core.quantiles(every, (0.5,))[0], rig.core.quantiles(first, (0.5,))[0]) == (12, 3), every
        for _, first in (stages[0], stages[2]):
            assert rig.core.quantiles(first, (0.0,))[1][0] >= 9_000_000 * 0.96


def test_a_slot_that_is_used_again_shows_nothing_of_the_one_before(tmp_path: Path) -> None:
    with shown(tmp_path, max_streams=1) as (rig, runtime_dir), Page(runtime_dir) as page:
        ring = rig.ring()
        ring.open(1, "a-long-name-of-the-first")
        ring.write(1, b"abc")
        ring.close(1, b"because")
        rig.turn()
        assert [(row["name"], row["reason"]) for row in stats.streams(page)] == [
            ("a-long-name-of-the-first", "because")
        ]
        ring.open(2, "b")
        rig.turn()
        [stream] = stats.streams(page)
        assert (stream["name"], stream["reason"], stream["state"], stream["tokens"]) == ("b", None, "live", 0)
        number = rig.core.connect()
        rig.core.label_connection(number, Label("first", 1, 2, lib.CLAW_ROLE_CONSUMER))
        rig.turn()
        rig.core.disconnect(number)
        rig.core.connect()
        rig.turn()
        [client] = stats.consumers(page)
        assert (client["name"], client["pid"], client["role"]) == (None, None, None)


def test_what_is_gone_has_no_row(tmp_path: Path) -> None:
    with shown(tmp_path, keep_ns=0) as (rig, runtime_dir), Page(runtime_dir) as page:
        ring = rig.ring()
        number = rig.core.connect()
        ring.open(1, "s")
        ring.close(1)
        rig.turn()
        assert len(stats.producers(page)) == len(stats.consumers(page)) == 1
        rig.core.leave_ring(ring.index)
        rig.turn()
        rig.core.drop_ring(ring.index)
        rig.core.disconnect(number)
        rig.turn()
        assert (stats.producers(page), stats.consumers(page), stats.streams(page)) == ([], [], [])


@pytest.mark.parametrize("room", range(93, 99))
def test_a_reason_that_is_too_long_is_cut_before_a_character(tmp_path: Path, room: int) -> None:
    reason = b"x" * room + "é∑🦞".encode() + b"y" * 20
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        ring = rig.ring()
        ring.open(1, "s")
        ring.close(1, reason)
        rig.turn()
        [stream] = stats.streams(page)
        assert "�" not in stream["reason"]
        assert reason.decode().startswith(stream["reason"])
        assert lib.CLAW_PAGE_REASON - 4 < len(stream["reason"].encode()) <= lib.CLAW_PAGE_REASON


def test_a_row_is_never_torn_while_another_process_writes_it(tmp_path: Path) -> None:
    sources = [NATIVE / "page_stress.c", CSRC / "page.c", CSRC / "guard.c"]
    run = run_c(compile_c(tmp_path / "stress", sources, "-O2"))
    print(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert "torn" not in run.stdout
    assert int(run.stdout.split()[0]) > 50_000, "looks find whole rows"


def test_a_row_whose_writer_stopped_in_it_is_passed_over_and_counted(tmp_path: Path) -> None:
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        ring = rig.ring()
        ring.open(1, "a")
        ring.open(2, "b")
        rig.turn()
        first = page.header().streams.offset
        poke(shared(runtime_dir), first, struct.pack("<Q", 7))
        assert [row["name"] for row in stats.streams(page)] == ["b"]
        assert page.unread == 1
        poke(shared(runtime_dir), first, struct.pack("<Q", 8))
        assert [row["name"] for row in stats.streams(page)] == ["a", "b"]
        assert page.unread == 0


def test_what_came_lately_is_what_came_since_the_older_mark(tmp_path: Path) -> None:
    mark_ns = lib.CLAW_PAGE_MARK_S * 10**9
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        ring = rig.ring()
        ring.open(1, "s")
        seen = []
        for number in range(5):
            now_ns = 1 + number * mark_ns
            for _ in range(1 + number):
                ring.put(lib.CLAW_TOKEN, 1, b"x", at=now_ns)
            rig.turn(now_ns)
            lately = page.lately(lib.CLAW_HIST_COMMIT)
            assert lately.count == sum(lately.bucket)
            seen.append(lately.count)
        # at the start there is a mark; later each turn of these makes one, of what there was with its own tokens
        assert seen == [1, 1 + 2, 3, 4, 5]
        assert page.hist(lib.CLAW_HIST_COMMIT).count == 15


def test_what_waited_for_a_clawd_that_took_over_is_not_lately(tmp_path: Path) -> None:
    settle_ns = lib.CLAW_PAGE_SETTLE_S * 10**9
    with shown(tmp_path) as (rig, runtime_dir):
        ring = rig.ring()
        ring.open(1, "s")
        rig.turn(2)
        size = shared(runtime_dir).stat().st_size
        for length in (0, size):  # each clawd has a page of its own
            os.truncate(shared(runtime_dir), length)
        rig.restart()
        rig.core.publish(10, 10**9, "1.2.3", runtime_dir)
        with Page(runtime_dir) as page:
            assert page.totals().recovered_rings == 1
            for passed_ns, lately in ((0, 0), (settle_ns - 1, 0), (settle_ns, 0), (settle_ns + 1, 1)):
                ring.put(lib.CLAW_TOKEN, 1, b"x", at=10**9)
                rig.turn(10**9 + passed_ns)
                assert page.lately(lib.CLAW_HIST_COMMIT).count == lately, passed_ns
            assert page.hist(lib.CLAW_HIST_COMMIT).count == 4


def test_lengths_that_no_clawd_writes_are_refused(tmp_path: Path) -> None:
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        rig.ring().open(1, "a")
        rig.turn()
        at = page.header().streams.offset + ffi.offsetof("struct claw_page_stream", "name_len")
        poke(shared(runtime_dir), at, struct.pack("<I", 257))
        with pytest.raises(ControlError, match="cannot read clawd's figures"):
            stats.streams(page)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (MAGIC_AT, struct.pack("<I", 1)),
        (LAYOUT_AT, struct.pack("<I", lib.CLAW_PAGE_LAYOUT + 1)),
        (BYTES_AT, struct.pack("<Q", 4096)),
        (STREAMS_AT, struct.pack("<Q", 1 << 40)),  # where the table is
        (STREAMS_AT, struct.pack("<Q", 2**64 - 8)),
        (STREAMS_AT, struct.pack("<Q", 473)),
        (STREAMS_AT + 8, struct.pack("<I", 8)),  # bytes of a row
        (STREAMS_AT + 12, struct.pack("<I", 2**32 - 1)),  # how many
        (ffi.offsetof("struct claw_page_header", "version"), b"x" * 32),
        (ffi.offsetof("struct claw_page_header", "runtime_dir"), b"/" * 256),
    ],
)
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, at: int, value: bytes) -> None:
    with shown(tmp_path) as (_, runtime_dir):
        poke(shared(runtime_dir), at, value)
        with pytest.raises(ControlError, match="is not a page of figures of this version"):
            Page(runtime_dir)


def test_more_rows_in_use_than_there_are_do_no_harm(tmp_path: Path) -> None:
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        rig.ring().open(1, "a")
        rig.turn()
        poke(shared(runtime_dir), STREAMS_AT + 16, struct.pack("<I", 2**32 - 1))
        assert [row["name"] for row in stats.streams(page)] == ["a"]


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    with shown(tmp_path) as (_, runtime_dir):
        size = shared(runtime_dir).stat().st_size
        for other in (size + 4096, size - 64, 100, 0):
            os.truncate(shared(runtime_dir), other)
            with pytest.raises(ControlError, match="is not a page of figures"):
                Page(runtime_dir)


def test_a_page_that_is_truncated_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    # in a process of its own: the guard against SIGBUS is for all of it
    program = (
        "import os, sys; from pathlib import Path\n"
        "from clawd.core import guard; from clawd.errors import ControlError; from clawd.page import Page\n"
        "guard(); page = Page(Path(sys.argv[1])); page.header(); os.truncate(sys.argv[2], 0)\n"
        "try: page.totals()\n"
        "except ControlError as error: print(error)"
    )
    with shown(tmp_path) as (_, runtime_dir):
        command = [sys.executable, "-c", program, str(runtime_dir), str(shared(runtime_dir))]
        run = subprocess.run(command, capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.startswith("cannot read clawd's figures: Bad address")


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    with shown(tmp_path) as (_, runtime_dir):
        path = shared(runtime_dir)
        aside = path.with_name(path.name + "-aside")
        path.rename(aside)
        try:
            path.symlink_to(aside)
            with pytest.raises(ControlError, match="cannot read clawd's figures"):
                Page(runtime_dir)
        finally:
            path.unlink()
            aside.rename(path)


def test_a_page_that_others_may_write_is_refused(tmp_path: Path) -> None:
    with shown(tmp_path) as (_, runtime_dir):
        shared(runtime_dir).chmod(0o666)
        with pytest.raises(ControlError, match="is not of the owner"):
            Page(runtime_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_page_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with shown(tmp_path) as (_, runtime_dir):
        os.chown(shared(runtime_dir), 12345, -1)
        with pytest.raises(ControlError, match="is not of the owner"):
            Page(runtime_dir)
        os.chown(runtime_dir, 12345, -1)
        Page(runtime_dir).close()


def test_a_page_that_is_not_published_yet_is_not_believed(tmp_path: Path) -> None:
    with shown(tmp_path) as (_, runtime_dir):
        poke(shared(runtime_dir), MAGIC_AT, bytes(4))
        with pytest.raises(Unreachable, match="is only starting"):
            Page(runtime_dir)


@pytest.mark.parametrize("text", ["", "x" * 16 + "\n", "../../../etc/pa\n", "0123456789abcdef"])
def test_an_instance_file_that_is_wrong_names_no_page(tmp_path: Path, text: str) -> None:
    (tmp_path / "instance").write_text(text)
    with pytest.raises(Unreachable, match="its instance file is broken"):
        Page(tmp_path)


def test_a_writer_without_a_lock_that_does_not_turn_is_gone(tmp_path: Path) -> None:
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page:
        rig.core.turn()
        assert page.life() is Life.ANSWERING
        old = ffi.offsetof("struct claw_page_header", "beat_ns")
        poke(shared(runtime_dir), old, struct.pack("<Q", 1))
        assert page.life() is Life.GONE
        assert page_module.is_locked(runtime_dir) is False


def test_one_that_turns_again_while_it_is_watched_answers(tmp_path: Path) -> None:
    with shown(tmp_path) as (rig, runtime_dir), Page(runtime_dir) as page, (runtime_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        poke(shared(runtime_dir), ffi.offsetof("struct claw_page_header", "beat_ns"), struct.pack("<Q", 1))
        timer = threading.Timer(0.2, rig.core.turn)
        timer.start()
        assert page.life() is Life.ANSWERING
        timer.join()
        poke(shared(runtime_dir), ffi.offsetof("struct claw_page_header", "beat_ns"), struct.pack("<Q", 1))
        assert page.life() is Life.SILENT
