# SPDX-License-Identifier: Apache-2.0
"""Reload: a running daemon takes all of a new configuration or none, tells what waits for a restart, loses no token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clawd import protocol
from clawd.config import DAEMON_SETTINGS, ROWS, Config
from clawd.consumer import Consumer
from clawd.ctl.client import Client
from clawd.errors import ConfigErrors
from clawd.producer import Producer
from clawd.server.settings import merge
from clawd.sources import Configuration, Origin, Sources
from tests import load
from tests.daemon import SANITIZED, Daemon, until
from tests.history import History, Put

GOOD = """\
[stream]
keep = 20s             # 结束后保留
stream_bytes = 1M
buffer_size = 64k
prefetch_window=3
timeout=50ms
max_streams = 512

[network]
tcp_fastopen=on
keepalive=15s
"""


class Served:
    """A daemon with a clawd.conf."""

    def __init__(self, daemon: Daemon, file: Path) -> None:
        self.daemon = daemon
        self.file = file

    def settings(self) -> protocol.InEffect:
        with Client(self.daemon.runtime_dir) as client:
            return client.ask(protocol.Settings(), protocol.InEffect)

    def hang_up(self) -> None:
        """SIGHUP, until systemd would know that the reload is over."""
        self.daemon.process.send_signal(signal.SIGHUP)
        assert self.daemon.await_ready()

    def reload(self, text: str | None = None) -> protocol.Reloaded:
        if text is not None:
            self.file.write_text(text)
        with Client(self.daemon.runtime_dir) as client:
            answer = client.ask(protocol.Reload(), protocol.Reloaded)
        assert self.daemon.await_ready()  # systemd is told of these, too
        return answer

    def read_notes(self) -> None:
        """Be systemd: a queue of notes that nobody reads would hold the daemon up."""
        with contextlib.suppress(BlockingIOError):
            while self.daemon._notify.recv(4096, socket.MSG_DONTWAIT):
                pass

    def state(self) -> dict[str, Any]:
        answer = self.settings()
        return {name: getattr(answer, name) for name in ("generation", "loaded_ns", "error", "pending_restart")}

    def values(self) -> Mapping[str, str]:
        return self.settings().values


@pytest.fixture
def served(start: Callable[..., Daemon], tmp_path: Path) -> Served:
    file = tmp_path / "clawd.conf"
    file.write_text(GOOD)
    return Served(start("--config", str(file), "--spool-bytes", "8M"), file)


def test_it_starts_with_what_the_file_says_and_tells_where_each_value_was_set(served: Served) -> None:
    answer = served.settings()
    assert answer.values == {
        "runtime_dir": str(served.daemon.runtime_dir),
        "buffer_size": "64k",
        "spool_bytes": "8M",
        "stream_bytes": "1M",
        "keep": "20s",
        "max_streams": "512",
        "user_streams": "12288",
        "max_producers": "64",
        "user_producers": "48",
        "max_ring_bytes": "1G",
        "user_ring_bytes": "768M",
        "max_clients": "1024",
        "user_clients": "768",
        "max_attachments": "65536",
        "user_attachments": "49152",
        "prefetch_window": "3",
        "timeout": "50ms",
        "pace": "smooth",
        "max_delay": "200ms",
        "bucket": "50",
        "refill_rate": "30",
        "leak_rate": "45",
        "burst_rate": "80",
        "burst": "8",
        "tcp_listen": "off",
        "keys_dir": "/etc/clawd/keys",
        "loss_threshold": "2",
        "express_dscp": "off",
        "congestion": "kernel",
        "tcp_fastopen": "on",
        "keepalive": "15s",
        "producers": "any",
        "consumers": "any",
        "observers": "any",
        "admins": "none",
        "tune": "off",
        "profile": "low-latency",
        "boost": "off",
        "pressure": "on",
    }
    origins = answer.origins
    assert (origins["keep"], origins["keepalive"]) == (f"{served.file}:2", f"{served.file}:11")
    assert (origins["spool_bytes"], origins["max_clients"]) == ("--spool-bytes", "default")
    assert (answer.file, answer.flags["spool_bytes"]) == (str(served.file), "8M")
    assert (answer.generation, answer.error, answer.pending_restart) == (1, None, [])


def test_a_bad_file_at_the_start_is_exit_2_with_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "clawd.conf"
    file.write_text("[stream]\nkeep = soon\nspool = 1M\n")
    command = [sys.executable, "-m", "clawd", "--config", str(file), "--runtime-dir", str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert [line.split(": ")[1] for line in run.stderr.splitlines()] == [f"{file}:2", f"{file}:3"]
    assert not (tmp_path / "run").exists()


def test_a_reload_applies_what_it_can_and_names_what_waits_for_a_restart(served: Served) -> None:
    before = served.state()
    answer = served.reload("[stream]\nkeep = 1h\nbuffer_size = 256k\nmax_streams = 1024\nspool_bytes = 16M\n")
    assert answer.errors == []
    assert answer.changed == ["buffer_size", "stream_bytes", "keep"]
    assert answer.pending_restart == ["max_streams"]  # the flag still wins over the file's spool_bytes
    values = served.values()
    assert (values["keep"], values["buffer_size"], values["stream_bytes"]) == ("1h", "256k", "4M")
    assert (values["max_streams"], values["spool_bytes"]) == ("512", "8M")
    state = served.state()
    assert state == {
        "generation": 2,
        "loaded_ns": state["loaded_ns"],
        "error": None,
        "pending_restart": ["max_streams"],
    }
    assert state["loaded_ns"] > before["loaded_ns"]
    assert served.daemon.log.wait("configuration reloaded", "generation=2", "pending_restart=max_streams")
    assert served.reload(GOOD).pending_restart == []
    assert served.state()["generation"] == 3


def test_a_signal_reloads_too_and_systemd_is_told(served: Served) -> None:
    served.file.write_text("[stream]\nkeep = 1h\n")
    served.daemon.process.send_signal(signal.SIGHUP)
    told = served.daemon._notify.recv(4096)
    assert told.startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    assert served.daemon.await_ready()
    assert served.values()["keep"] == "1h"
    served.file.write_text("[stream]\nkeep = soon\n")
    served.hang_up()
    assert served.values()["keep"] == "1h"
    assert served.state()["generation"] == 2
    served.daemon.log.wait("configuration not reloaded, the old one stays", f"{served.file}:2")


def test_a_storm_of_signals_does_no_harm(served: Served) -> None:
    served.file.write_text("[stream]\nkeep = 1h\n")
    for _ in range(2000):
        served.daemon.process.send_signal(signal.SIGHUP)

    def is_applied() -> bool:
        served.read_notes()
        return served.values()["keep"] == "1h"

    until(is_applied, "the reload")
    served.read_notes()


def test_with_any_error_nothing_changes_but_the_error_and_the_next_good_file_clears_it(served: Served) -> None:
    before = served.state()
    answer = served.reload("[stream]\nkeep = 1h\nbuffer_size = 3k\nspol_bytes = 1M\n")
    assert answer.errors == [
        f'{served.file}:3: buffer_size: "3k" is not allowed; it must be a power of two, 4k to 64M',
        f"{served.file}:4: spol_bytes: no such setting; did you mean spool_bytes?",
    ]
    assert (answer.generation, answer.changed) == (1, [])
    assert served.state() == {**before, "error": answer.errors[0] + " (and 1 more)"}
    assert served.values()["keep"] == "20s"
    served.file.unlink()
    assert "No such file" in served.reload().errors[0]
    served.reload(GOOD)
    assert served.state()["error"] is None


def test_a_smaller_ring_is_what_the_next_producer_gets(served: Served) -> None:
    with Producer("old", served.daemon.runtime_dir):
        served.reload("[stream]\nbuffer_size = 4k\n")
        with Producer("new", served.daemon.runtime_dir):
            served.daemon.log.wait("producer attached", "producer=old", f"ring_bytes={64 << 10}")
            served.daemon.log.wait("producer attached", "producer=new", f"ring_bytes={4 << 10}")


def test_a_shorter_keep_counts_for_streams_that_ended_before(served: Served) -> None:
    with Producer("p", served.daemon.runtime_dir) as producer:
        stream = producer.open("s")
        stream.write("x")
        stream.close("stop")
        served.daemon.await_total("streams_ended", 1)
        served.reload("[stream]\nkeep = 1ms\n")
        until(lambda: served.daemon.total("streams_ended") == 0, "the end of what is kept")


def test_reloads_under_load_lose_nothing(served: Served, history: History, seed: int) -> None:
    """Good and bad ones, by signal and by request, while two producers write and a client reads."""
    names, count = load.names(6), 150 if SANITIZED else 600
    for name in names:
        history.put(name, *(Put(item.data, item.urgent, item.count) for item in load.tokens(seed, name, count)))
        history.end(name, "stop")
    with (
        Consumer(served.daemon.runtime_dir) as consumer,
        load.Writer(served.daemon.runtime_dir, "one") as one,
        load.Writer(served.daemon.runtime_dir, "two") as two,
    ):
        readings = {name: consumer.attach(name) for name in names}
        one.load(names[:3], count, seed)
        two.load(names[3:], count, seed)
        for turn in range(20):
            if turn % 3 == 2:
                assert served.reload("[stream]\nkeep = soon\n").errors
            else:
                served.file.write_text(f"[stream]\nkeep = {turn + 1}min\nstream_bytes = {4 - turn % 3}M\n")
                served.hang_up()
        for name, reading in readings.items():
            history.reading(name).follow(reading)
        assert (one.wait(), two.wait()) == ("done", "done")
    history.check()
    assert served.state()["generation"] == 15


# --- any mutation ---


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("mutated")
    file = directory / "clawd.conf"
    file.write_text(GOOD)
    flags = ("--config", str(file), "--spool-bytes", "8M")
    with Daemon(directory / "run", *flags) as daemon:
        yield Served(daemon, file)


_bytes = st.binary(max_size=5)
_token = st.sampled_from(
    [
        b"\n",
        b"#",
        b" # ",
        b"=",
        b"[stream]\n",
        b"[network]\n",
        b"[x]",
        b"1",
        b"k",
        b"M",
        b"h",
        b"64M",
        b"on",
        b"\xe7\x8e",
    ]
)
_cut = st.tuples(st.integers(0, len(GOOD.encode())), st.integers(0, 14), st.one_of(_bytes, _token))
_line = st.builds(
    lambda row, text: f"{row.key} = {text}\n".encode(),
    st.sampled_from(list(ROWS.values())),
    st.sampled_from(
        ["0", "1", "8", "16k", "128k", "1M", "7M", "16M", "50ms", "1s", "1h", "off", "/x", "", "-1", "1.5M"]
    ),
)


def _mutate(cuts: list[tuple[int, int, bytes]], extra: list[bytes]) -> bytes:
    data = GOOD.encode()
    for start, length, new in cuts:
        data = data[:start] + new + data[start + length :]
    return data.replace(b"[network]", b"".join(extra) + b"[network]", 1)


def loaded(sources: Sources) -> tuple[Config | None, str]:
    """The Config, or else the first complaint."""
    try:
        return sources.load().config, ""
    except ConfigErrors as errors:
        return None, str(errors.errors[0])


@settings(
    max_examples=int(os.environ.get("CLAWD_TEST_EXAMPLES", "40" if SANITIZED else "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)
@given(st.lists(_cut, max_size=3), st.lists(_line, max_size=2))
@example([], [b"spool_bytes = 1G\n"])
@example([], [b"max_clients = 8\n", b"max_clients = 8\n"])
@example([(0, len(GOOD.encode()), b"")], [])
def test_any_mutation_of_a_good_file_applies_fully_or_changes_the_error_alone(
    mutated: Served, cuts: list[tuple[int, int, bytes]], extra: list[bytes]
) -> None:
    before, values_before = mutated.state(), mutated.values()
    mutated.file.write_bytes(_mutate(cuts, extra))
    mutated.hang_up()
    state, values = mutated.state(), mutated.values()
    flags = {"runtime_dir": str(mutated.daemon.runtime_dir), "spool_bytes": "8M"}
    wanted, complaint = loaded(Sources(mutated.file, flags))
    if wanted is None:
        assert state["error"].startswith(complaint)
        assert state == {**before, "error": state["error"]}
        assert values == values_before
        return
    assert (state["error"], state["generation"]) == (None, before["generation"] + 1)
    differing = []
    for row in DAEMON_SETTINGS:
        key = row.key
        text = row.kind.format(getattr(wanted, key))
        if values[key] == text:
            continue
        assert values[key] == values_before[key]
        assert not row.reload
        differing.append(key)
    assert state["pending_restart"] == differing


# --- what counts at once ---


def configuration(**values: Any) -> Configuration:
    return Configuration(Config(**values), {key: Origin("default") for key in ROWS})


def test_a_pair_that_only_a_restart_makes_possible_waits_together() -> None:
    old = configuration(spool_bytes=8 << 20, stream_bytes=4 << 20)
    new = configuration(spool_bytes=64 << 20, stream_bytes=16 << 20, keep=1)
    config, pending = merge(old, new)
    assert pending == ("spool_bytes", "stream_bytes")
    assert config == Config(spool_bytes=8 << 20, stream_bytes=4 << 20, keep=1)
    smaller = configuration(spool_bytes=64 << 20, stream_bytes=6 << 20)
    config, pending = merge(old, smaller)
    assert (pending, config.stream_bytes) == (("spool_bytes",), 6 << 20)


def test_a_smaller_spool_waits_and_a_smaller_stream_does_not() -> None:
    old = configuration(spool_bytes=64 << 20, stream_bytes=16 << 20)
    config, pending = merge(old, configuration(spool_bytes=8 << 20, stream_bytes=4 << 20))
    assert (pending, config.stream_bytes, config.spool_bytes) == (("spool_bytes",), 4 << 20, 64 << 20)


# --- who may ---


@pytest.mark.root
def test_another_user_is_denied_and_may_look(served: Served) -> None:
    run = served.daemon.runtime_dir
    for path in (run.parent, *run.parent.parents):
        if path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)  # pytest's directories: let them not be what refuses
    run.chmod(0o755)
    (run / protocol.CONTROL_SOCKET).chmod(0o666)
    code = (
        "import os, socket, sys\nnobody = (65534,) * 3\n"
        "os.setresgid(*nobody); os.setgroups([]); os.setresuid(*nobody)\n"
        "for op in ('reload', 'settings'):\n"
        "    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "    control.connect(sys.argv[1])\n"
        '    control.send(b\'{"op":"%s"}\' % op.encode())\n'
        "    print(control.recv(1 << 16).decode())\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(run / protocol.CONTROL_SOCKET)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused, shown = (json.loads(line) for line in done.stdout.splitlines())
    assert (refused["op"], refused["code"]) == ("error", "denied")
    assert shown["values"]["keep"] == "20s"
    assert served.state()["generation"] == 1
    assert served.daemon.log.wait("reload denied", "uid=65534")
