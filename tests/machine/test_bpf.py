# SPDX-License-Identifier: Apache-2.0
"""BPF where systemd, fq, netem and clawd's own units are: what the development host lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.machine.host import OPT, SOURCE, entries, pid, run, until

LANE = """
import json, socket, sys
helper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
helper.connect("/run/clawd-kernel/kernel.sock")
helper.send(json.dumps({"op": "set_lane", "port": int(sys.argv[1]), "lane": "express", "pacing": 4000000,
                        "dscp": int(sys.argv[2])}).encode())
print(helper.recv(1 << 17).decode(), flush=True)
for line in sys.stdin:
    helper.send(line.strip().encode())
    print(helper.recv(1 << 17).decode(), flush=True)
"""
STAGES = """
import sys
sys.path.insert(0, {source!r})
from tests.test_bpf_tracer import medians, slow
from tests.veth import link
with link() as (near, far):
    for command in {commands!r}:
        near.run(command)
    print(slow(medians(near, far, size=1400, quiet={quiet}, pacing={pacing})))
"""


@contextmanager
def lane(port: int, dscp: int = 0) -> Iterator[Any]:
    """clawd's user names a lane to the helper; what is yielded asks it."""
    words = ["setpriv", "--reuid", "clawd", "--regid", "clawd", "--init-groups", sys.executable, "-c", LANE]
    process = subprocess.Popen([*words, str(port), str(dscp)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout

    def ask(**request: Any) -> dict[str, Any]:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    try:
        assert json.loads(process.stdout.readline())["op"] == "shaping"
        until(lambda: ask(op="shape")["reason"] != "its program is being compiled", "compiled")
        yield ask
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def test_the_unit_compiles_attaches_pins_and_proves_that_it_runs() -> None:
    run("systemctl", "start", "clawd-kernel")
    with lane(5710) as ask:
        state = ask(op="shape")
        assert (state["state"], state["reason"], state["unpinned"]) == ("attached", None, None), state
        assert state["is_proved"], "clawd-kernel is in clawd.slice itself"
        assert state["cgroup"] == "/sys/fs/cgroup/clawd.slice"
        pins = sorted(path.name for path in Path("/sys/fs/bpf/clawd").iterdir())
        assert pins == ["shaper-link", "shaper-policies", "shaper-rows"]
    run("systemctl", "stop", "clawd-kernel")
    assert not Path("/sys/fs/bpf/clawd").exists()
    run("systemctl", "start", "clawd-kernel")


def test_a_killed_unit_leaves_it_in_force_and_the_next_sweeps() -> None:
    with lane(5710) as ask:
        assert ask(op="shape")["state"] == "attached"
        run("systemctl", "kill", "-s", "KILL", "clawd-kernel")
    until(lambda: run("systemctl", "is-active", "clawd-kernel", check=False).stdout == "active\n", "started again")
    with lane(5710) as ask:
        assert ask(op="shape")["state"] == "attached"
        assert ask(op="shape")["others"] == []


def test_a_restart_of_clawd_attaches_nothing_anew() -> None:
    with lane(5710) as ask:
        before = ask(op="shape")["since_ns"]
        run("systemctl", "restart", "clawd")
        after = ask(op="shape")
        assert (after["state"], after["since_ns"]) == ("attached", before)


def test_fq_is_who_paces_where_it_is() -> None:
    run("ip", "link", "add", "claw0", "type", "dummy")
    try:
        run("ip", "link", "set", "claw0", "up")
        run("ip", "addr", "add", "10.98.0.1/24", "dev", "claw0")
        run("ip", "route", "add", "default", "dev", "claw0", "metric", "9999")
        run("tc", "qdisc", "replace", "dev", "claw0", "root", "fq")
        with lane(5710) as ask:
            assert ask(op="shape")["pacers"]["claw0"] == "fq"
            run("tc", "qdisc", "replace", "dev", "claw0", "root", "pfifo")
            assert ask(op="shape")["pacers"]["claw0"] == "tcp"
    finally:
        run("ip", "link", "del", "claw0")


@pytest.mark.parametrize(
    ("commands", "quiet", "pacing", "stages"),
    [
        ([], False, 0, "[]"),
        ([], False, 40_000, "['socket']"),
        # The same pacing as times of departure: tcp lets go at once, and fq holds back
        (["tc qdisc add dev near root fq"], False, 40_000, "['device']"),
        (["tc qdisc add dev near root netem delay 60ms"], False, 0, "['device']"),
        ([], True, 0, "['acked']"),
    ],
)
def test_a_delay_shows_in_its_stage_alone(commands: list[str], quiet: bool, pacing: int, stages: str) -> None:
    program = STAGES.format(source=str(SOURCE), commands=commands, quiet=quiet, pacing=pacing)
    assert run(sys.executable, "-c", program).stdout.splitlines()[-1] == stages


def test_delay_and_loss_of_the_way_are_in_a_sockets_row() -> None:
    """By the rows that the unit hands over, of a socket of clawd.slice."""
    program = (SOURCE / "tests/machine/rows.py").read_text()
    # By what was installed: where the tests' copy of it is, nothing compiled may be loaded
    python = ["env", "-u", "PYTHONPATH", str(OPT / "bin/python"), "-P", "-c", program, str(SOURCE)]
    scope = ["systemd-run", "--scope", "--quiet", "--slice", "clawd.slice", *python]
    told = json.loads(run(*scope).stdout.splitlines()[-1])
    assert 40_000 <= told["delayed"]["srtt_us"] <= 200_000, told
    assert told["plain"]["srtt_us"] < 20_000, told
    assert told["jittered"]["jitter_us"] > told["plain"]["jitter_us"], told
    assert told["lossy"]["retrans"] > 0, told
    assert told["plain"]["retrans"] == 0, told


def packet_programs() -> int:
    """On clawd's own group: systemd's, where the unit has IPAddressDeny=, and trace's."""
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        "from tests.test_bpf_tracer import attached\nfrom clawd.kernel.tracer import cgroup_of\n"
        f"print(len(attached(cgroup_of({pid()}))))"
    )
    return int(run(sys.executable, "-c", program).stdout)


def test_trace_needs_no_helper_and_leaves_nothing() -> None:
    run("systemctl", "stop", "clawd-kernel")
    before = packet_programs()
    try:
        value = json.loads(run("clawctl", "trace", "--json", "--duration", "1").stdout.splitlines()[-1])
        rows = {(row["name"], row["class"]): row for row in value["stages"]}
        for stage in ("socket", "device", "acked"):
            assert not rows[stage, "first"]["backend"].startswith("none"), rows[stage, "first"]
        assert value["cost"]["bpf_runs"] is not None
        assert packet_programs() == before
        process = subprocess.Popen(["clawctl", "trace", "--json", "--interval", "0.5"], stdout=subprocess.PIPE)
        assert process.stdout
        assert process.stdout.readline()
        assert packet_programs() == before + 2
        process.kill()
        process.wait()
        process.stdout.close()
        until(lambda: packet_programs() == before, "programs gone")
    finally:
        run("systemctl", "start", "clawd-kernel")


def test_nothing_of_all_that_is_a_failure_in_the_journal() -> None:
    assert [entry["MESSAGE"] for entry in entries("-u", "clawd-kernel", "-p", "err")] == []
