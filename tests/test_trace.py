# SPDX-License-Identifier: Apache-2.0
"""`clawctl trace` beside a real clawd: stages, one stream, files for viewers, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clawd import protocol
from clawd.consumer import Consumer
from clawd.ctl import client, trace_progress, trace_sched, trace_stages, trace_stream, trace_target
from clawd.ctl.trace_file import TraceFile
from clawd.ctl.trace_stages import Trace
from clawd.ctl.trace_target import Target
from clawd.errors import HostError
from clawd.page import Page
from clawd.producer import Producer
from tests.cgroups import alone
from tests.daemon import PATIENCE_S, Daemon, until
from tests.test_ctl import clawctl, command

pytestmark = pytest.mark.plain
COST = {"cpu_ns": 1, "bpf_ns": 10, "bpf_runs": 2, "bpf_share": 0.001}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone():
        yield


def no_tracer(*_: Any) -> Any:
    raise HostError("bcc is not installed", "apt-get install python3-bpfcc")


def rows(value: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["class"]): row for row in value["stages"]}


def test_stages_count_what_came_since_the_trace_began(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("s")
        reading = consumer.attach("s", wait=PATIENCE_S)
        for _ in range(101):
            stream.write("x")
        for _ in range(101):
            reading.read(PATIENCE_S)
        # clawd counts a frame once all of a turn's are out, which may be after it was read
        with Page(daemon.runtime_dir) as page:
            until(lambda: page.totals().sent == 101, "101 counted")
        with Trace(daemon.runtime_dir, ("writes",), no_tracer) as trace:
            other = producer.open("t")
            second = consumer.attach("t", wait=PATIENCE_S)
            for _ in range(53):
                other.write("y")
            for _ in range(53):
                second.read(PATIENCE_S)
            until(lambda: rows(trace.collect())["relay", "rest"]["count"] == 52, "53 sent")
            value = trace.collect()
    found = rows(value)
    for stage in ("committed", "released", "relay"):
        assert (found[stage, "first"]["count"], found[stage, "rest"]["count"]) == (1, 52), stage
    assert 1 <= found["sent", "rest"]["count"] <= 52, "of several that go at once it is one"
    assert found["written", "first"]["count"] == 1
    assert ("written", "rest") not in found
    row = found["sent", "rest"]
    assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"] <= row["max_us"]
    assert (row["since"], row["backend"]) == ("released", "core")
    dark = found["acked", "first"]
    reason = "needs root" if os.geteuid() else "bcc is not installed; apt-get install python3-bpfcc"
    assert (dark["count"], dark["p50_us"], dark["backend"]) == (0, None, f"none: {reason}")
    text = trace_stages.show(value)
    assert f"socket, device, acked, network: none: {reason}" in text.replace("\n    ", " ")
    assert "cost:" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_a_compiler_took_is_of_its_cost_and_what_was_before_is_not(daemon: Daemon) -> None:
    def busy(*_: Any) -> Any:
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
        raise HostError("no tracer", "none")

    spin = time.process_time() + 0.5
    while time.process_time() < spin:
        pass
    with Trace(daemon.runtime_dir, ("writes",), busy) as trace:
        cpu_ns = trace.collect()["cost"]["cpu_ns"]
    assert cpu_ns < 0.3 * 10**9 if os.geteuid() else cpu_ns >= 0.3 * 10**9
    with Trace(daemon.runtime_dir, ("writes",), no_tracer) as trace:
        assert trace.collect()["cost"]["cpu_ns"] < 0.3 * 10**9


@pytest.mark.parametrize(
    ("listen", "lanes"),
    [
        ("off", {}),
        ("127.0.0.1:7400", {7400: "rest", 7401: "first"}),
        ("[::1]:7400, 10.0.0.1:80", {7400: "rest", 7401: "first", 80: "rest", 81: "first"}),
    ],
)
def test_the_class_of_a_port_is_that_of_its_lane(
    monkeypatch: pytest.MonkeyPatch, daemon: Daemon, listen: str, lanes: dict[int, str]
) -> None:
    told = protocol.InEffect(1, 0, None, [], None, {}, {"tcp_listen": listen}, {})
    monkeypatch.setattr(trace_target.Client, "ask", lambda *_: told)
    assert trace_target.target_of(daemon.runtime_dir) == Target(daemon.pid, lanes)


def test_a_clawd_that_does_not_answer_has_no_lanes_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 0.1)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        target = trace_target.target_of(daemon.runtime_dir)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert (target.pid, target.lanes) == (daemon.pid, {})
    assert target.unknown.startswith("clawd did not answer within")
    with Trace(daemon.runtime_dir, ("writes",), no_tracer) as trace:
        trace._target = target
        value = trace.collect()
        value["notes"] = [*trace._notes(value["counters"])]
    text = trace_stages.show(value).replace("\n    ", " ")
    assert f"note: the kernel's rows are all rest, for the lanes are not known: {target.unknown}" in text


def test_one_object_a_line_each_interval_and_the_last(daemon: Daemon) -> None:
    run = clawctl(daemon.runtime_dir, "trace", "--json", "--duration", "0.5", "--interval", "0.2")
    assert run.returncode == 0, run.stderr
    values = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(values) == 3
    for value in values:
        assert value["version"] == 1
        assert set(value["stages"][0]) >= {
            "name", "class", "count", "p50_us", "p90_us", "p99_us", "max_us", "backend"}  # fmt: skip
        assert value["cost"]["cpu_ns"] > 0
    spans = [value["cost"]["elapsed_ns"] for value in values]
    assert spans == sorted(spans)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (("--stage", "released"), {("released", "first"), ("released", "rest")}),
        (("--class", "first"), {(stage, "first") for stage in trace_stages.STAGES}),
        (("--stage", "acked", "--class", "rest"), {("acked", "rest")}),
    ],
)
def test_one_stage_or_class_alone(daemon: Daemon, arguments: tuple[str, ...], left: set[tuple[str, str]]) -> None:
    run = clawctl(daemon.runtime_dir, "trace", "stages", "--json", "--duration", "0.1", *arguments)
    assert set(rows(json.loads(run.stdout))) == left


def test_a_signal_ends_it_with_what_was_seen(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    words = command(daemon.runtime_dir, "trace", "--json", "--interval", "0.1", "--perfetto", str(file))
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout
    first = json.loads(run.stdout.readline())
    run.send_signal(signal.SIGTERM)
    rest, told = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, told) == (0, "")
    last = json.loads(rest.splitlines()[-1])
    assert last["cost"]["elapsed_ns"] > first["cost"]["elapsed_ns"]
    check_events(json.loads(file.read_text()))


def test_a_stream_as_a_waterfall(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("told")
        stream.write("before")
        until(lambda: daemon.total("tokens") == 1, "the first token")
        words = command(daemon.runtime_dir, "trace", "stream", "told", "--json", "--perfetto", str(file))
        run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert run.stdout
        head = json.loads(run.stdout.readline())
        assert (head["stream"]["name"], head["stream"]["tokens"]) == ("told", 1)
        until(lambda: daemon.streams()["told"]["attachments"] == 1, "attached")
        for _ in range(7):
            stream.write("x")
        stream.close()
        values = [json.loads(line) for line in run.stdout]
        run.stdout.close()
        assert run.wait(PATIENCE_S) == 0
    assert values.pop()["end"] == "stop"
    assert [value["seq"] for value in values] == list(range(1, 8))
    assert values[0]["gap_ns"] is None
    for before, now in pairwise(values):
        assert now["gap_ns"] == now["written_ns"] - before["written_ns"] >= 0
    assert all(0 < value["way_ns"] < 20 * 10**9 for value in values)
    events = json.loads(file.read_text())
    check_events(events)
    bars = [event for event in events if event["ph"] == "X" and event["name"].startswith("token")]
    assert [event["name"] for event in bars] == [f"token {number}" for number in range(1, 8)]
    assert bars[0]["dur"] == values[0]["way_ns"] / 1000
    assert all("critical" in trace_stream.show({**value, "class": "critical"}) for value in values)


def test_what_was_written_before_has_no_way_but_gaps(daemon: Daemon) -> None:
    with Producer("p", daemon.runtime_dir) as producer:
        stream = producer.open("over")
        for _ in range(3):
            stream.write("x")
        stream.close()
        until(lambda: daemon.total("tokens") == 3, "three tokens")
        run = clawctl(daemon.runtime_dir, "trace", "stream", "over", "--json")
        values = [json.loads(line) for line in run.stdout.splitlines()]
        text = clawctl(daemon.runtime_dir, "trace", "stream", "over").stdout
    assert [(value["seq"], value["way_ns"]) for value in values[1:-1]] == [(0, None), (1, None), (2, None)]
    assert values[1]["gap_ns"] is None
    assert values[3]["gap_ns"] >= 0
    assert "since the one before" in text
    assert max(map(len, text.splitlines())) <= 80


def test_bars_are_twice_as_long_in_time_a_column() -> None:
    bars = []
    for way_ns in (0, 99_999, 100_000, 200_000, 400_000, 10**15):
        value = {"seq": 1, "class": "normal", "gap_ns": None, "way_ns": way_ns}
        bars.append(trace_stream.show(value).split()[-1])
    assert bars == ["#" * length for length in (1, 1, 2, 3, 4, trace_stream.BAR)]


@pytest.mark.parametrize(
    ("committed_us", "released_us", "bar"),
    [
        (0, 0, "#######"),
        (None, None, "#######"),
        (450, 450, "...####"),
        (450, 3200, "...===#"),
        (0, 3199, "=====##"),
        (6000, 6000, "......#"),
    ],
)
def test_a_bar_shows_what_its_token_waited_for(committed_us: int | None, released_us: int | None, bar: str) -> None:
    at = [None if each is None else each * 1000 + 7 for each in (committed_us, released_us)]
    value = {"seq": 1, "class": "normal", "gap_ns": None, "written_ns": 7, "committed_ns": at[0], "released_ns": at[1],
             "way_ns": 6_000_000}  # fmt: skip
    assert trace_stream.show(value).split()[-1] == bar


def test_what_a_pacer_holds_is_seen_as_held(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with Producer("p", daemon.runtime_dir) as producer, Consumer(daemon.runtime_dir) as consumer:
        stream = producer.open("held", pace="steady")
        consumer.attach("held")
        words = command(daemon.runtime_dir, "trace", "stream", "held", "--json", "--perfetto", str(file))
        run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert run.stdout
        assert json.loads(run.stdout.readline())["look_ns"] == trace_progress.LOOK_NS
        until(lambda: daemon.streams()["held"]["attachments"] == 2, "attached")
        for _ in range(15):  # more than the bucket lets go at once
            stream.write("x")
        stream.close()
        values = [json.loads(line) for line in run.stdout][:-1]
        run.stdout.close()
        assert run.wait(PATIENCE_S) == 0
    for value in values:
        assert value["written_ns"] <= value["committed_ns"] <= value["released_ns"] <= value["read_ns"], value
    held = [value["released_ns"] - value["committed_ns"] for value in values]
    ways = [value["way_ns"] for value in values]
    print(list(zip(held, ways, strict=True)))
    assert ways[-1] > 100_000_000
    assert held[-1] > ways[-1] * 0.8
    assert "====" in trace_stream.show(values[-1])
    events = json.loads(file.read_text())
    check_events(events)
    longest = max((event for event in events if event["name"] == "held by its pacer"), key=lambda event: event["dur"])
    assert longest["dur"] > 0.8 * ways[-1] / 1000


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("stage",), 2, 'no trace of "stage"; did you mean "stages"?'),
        (("stream",), 2, "trace stream takes the name of a stream, and nothing else does"),
        (("sched", "x"), 2, "trace stream takes the name of a stream, and nothing else does"),
        (("--duration", "0"), 2, 'argument --duration: "0" is not allowed; it must be 0.1 to 86400 seconds'),
        (("--stage", "nowhere"), 2, "argument --stage: invalid choice"),
        (("sched", "--stage", "sent"), 2, "--stage is of trace stages, not of sched"),
        (("sockets", "--class", "first"), 2, "--class is of trace stages, not of sockets"),
        (("sockets", "--perfetto", "x"), 2, "--perfetto is of trace stages, stream, sched, not of sockets"),
        (("stream", "x", "--interval", "1"), 2, "--interval is of trace stages, sockets, sched, not of stream"),
        (("stream", "no-such"), 1, 'no stream "no-such" is open; clawctl streams lists them'),
        (("--perfetto", "/nowhere/x"), 1, 'cannot write "/nowhere/x": No such file or directory'),
    ],
)
def test_mistakes_are_told_in_a_line(daemon: Daemon, arguments: tuple[str, ...], code: int, told: str) -> None:
    run = clawctl(daemon.runtime_dir, "trace", *arguments)
    assert run.returncode == code
    assert run.stderr.startswith(f"clawctl: {told}")
    assert run.stderr.count("\n") == 1


def test_without_a_daemon_it_says_so(tmp_path: Path) -> None:
    run = clawctl(tmp_path, "trace")
    assert run.returncode == 3
    assert run.stderr.count("\n") == 1


def check_events(events: list[dict[str, Any]]) -> None:
    """What viewers ask of the form: each track has its name before its first bar, and bars that do not overlap."""
    assert events[0] == {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "clawd"}}
    names: dict[int, str] = {}
    ends: dict[int, float] = {}
    times: dict[str, float] = {}
    part_end = 0.0
    for event in events:
        assert (event["pid"], type(event["name"])) == (1, str)
        assert event["name"]
        if event["ph"] == "M":
            [(key, value)] = event["args"].items()
            assert key == ("sort_index" if event["name"] == "thread_sort_index" else "name")
            if event["name"] == "thread_name":
                assert event["tid"] not in {event["pid"], *names}
                names[event["tid"]] = value
        elif event["ph"] == "C":
            assert event["args"]
            assert all(type(value) in (int, float) and value >= 0 for value in event["args"].values())
            assert event["ts"] > times.get(event["name"], 0)
            times[event["name"]] = event["ts"]
        else:
            assert (event["ph"], set(event)) == ("X", {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"})
            assert event["tid"] in names
            assert event["dur"] >= 0
            end = event["ts"] + event["dur"]
            if event["name"].startswith("token "):
                assert event["ts"] >= ends.get(event["tid"], 0)
                ends[event["tid"]] = end
                part_end = event["ts"]
            else:  # a stage of the token before it, within its bar and after the stage before
                assert part_end <= event["ts"] < end < ends[event["tid"]]
                part_end = end


def test_tokens_that_are_under_way_at_once_are_bars_of_different_tracks(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace.json") as file:
        for seq, (written_us, way_us) in enumerate([(10, 30), (20, 20), (30, None), (40, 5), (50, 0), (51, 1)]):
            way_ns = None if way_us is None else way_us * 1000
            file.token("é", {"seq": seq, "class": "normal", "written_ns": written_us * 1000, "way_ns": way_ns})
    events = json.loads((tmp_path / "trace.json").read_text())
    check_events(events)
    bars = [event for event in events if event["ph"] == "X"]
    assert [event["tid"] for event in bars if event["name"].startswith("token")] == [2, 3, 4, 4, 2, 2]
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert named == ["é"] * 3


def test_a_file_that_was_cut_off_still_opens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    file.stages({"stages": [{"name": "sent", "class": "all", "count": 3, "p50_us": 1.5, "p99_us": 9.0}]})
    events = json.loads(path.read_text() + "]")
    assert (events[1]["name"], events[1]["ph"]) == ("sent", "C")
    assert events[1]["args"] == {"p50 (µs)": 1.5, "p99 (µs)": 9.0}
    check_events(events)
    with file:
        pass
    assert json.loads(path.read_text()) == events


@pytest.mark.parametrize("arguments", [("stages",), ("stream", "no-such")])
def test_a_file_stays_as_it_was_when_there_is_nothing_to_trace(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("[1, 2, 3]")
    for path in (kept, new):
        run = clawctl(tmp_path, "trace", *arguments, "--perfetto", str(path))
        assert run.returncode == 3, run.stderr
    assert kept.read_text() == "[1, 2, 3]"
    assert not new.exists()


def test_a_file_that_is_written_has_nothing_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("x" * 10_000)
    with TraceFile(path):
        assert path.stat().st_size == 10_000
    assert [event["name"] for event in json.loads(path.read_text())] == ["process_name"]


def test_who_had_the_processor_is_a_table() -> None:
    value = {
        "stages": [],
        "counters": {"missed": 0, "full_threads": 2, "full_takers": 3},
        "preempted": 7,
        "takers": [{"name": "cc1\x1b[2J", "waits": 3, "wait_ns": 5_000_000, "preempted": 2}],
        "cost": COST,
    }
    text = trace_sched.show(value)
    assert "clawd was pre-empted 7 times" in text
    assert "cc1?[2J" in text
    assert "5 ns a run" in text
    assert "not followed: 2 threads, for want of room; 3 times who had the processor" in text


def test_writes_that_were_not_followed_are_told_to_people_too() -> None:
    value: dict[str, Any] = {"stages": [], "counters": {"missed": 7, "full_sockets": 0, "writes": 9}, "cost": COST}
    assert "not followed: 7 writes, of sockets that were busy" in trace_stages.show(value)
    value["counters"]["missed"] = 0
    assert "not followed" not in trace_stages.show(value)
