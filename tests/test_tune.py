# SPDX-License-Identifier: Apache-2.0
"""`clawctl tune` on real kernels' values, each test in a network namespace of its own; the host stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import become
from tests.network import ENVIRONMENT, NEEDED, Namespace, namespace, snapshot

pytestmark = [pytest.mark.plain, NEEDED]


@pytest.fixture(scope="module", autouse=True)
def _host_stays() -> Iterator[None]:
    before = snapshot()
    yield
    assert snapshot() == before


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Namespace]:
    with namespace(tmp_path / "state") as made:
        yield made


def states(value: dict[str, object]) -> dict[str, str]:
    rows = value["rows"]
    assert isinstance(rows, list)
    return {row["place"]["name"]: row["state"] for row in rows}


def test_it_shows_plans_applies_verifies_and_takes_back(net: Namespace) -> None:
    before = net.values()
    shown = net.told("show")
    assert (shown["profile"], shown["netns"]["is_host"]) in [("low-latency", False), ("low-latency", None)]
    rows = {row["place"]["name"]: row for row in shown["rows"]}
    reuse = rows["net.ipv4.tcp_tw_reuse"]
    assert (reuse["live"], reuse["wanted"], reuse["state"], reuse["takes"]) == ("2", "1", "differs", "new sockets")
    assert reuse["reason"].startswith("A service that connects anew")

    plan = net.told("plan")
    operations = [operation for change in plan["changes"] for operation in change["operations"]]
    assert "sysctl -w net.ipv4.tcp_fastopen=3" in operations
    assert net.told("apply", "--dry-run")["changes"] == plan["changes"]
    assert net.values() == before, "a plan changes nothing"

    told = net.tune("apply")
    assert "net.ipv4.tcp_fastopen is now 3" in told
    after = net.values()
    assert {key: after[key] for key in after if after[key] != before[key]} == {
        change["place"]["name"]: change["new"] for change in plan["changes"]
    }
    assert net.told("apply")["outcomes"] == [], "a second time there is nothing to do"
    verified = net.told("verify")
    assert verified["drift"] == []
    assert set(states(verified).values()) <= {"ok", "n/a"}

    undo = net.told("revert", "--dry-run")["changes"]
    assert {change["place"]["name"]: change["new"] for change in undo} == {
        change["place"]["name"]: change["old"] for change in plan["changes"]
    }
    net.tune("revert")
    assert net.values() == before
    assert "nothing to take back" in net.tune("revert")


def test_the_plan_is_what_a_shell_would_do(net: Namespace) -> None:
    plan = net.told("plan")
    net.run("sh", "-c", "; ".join(one for change in plan["changes"] for one in change["operations"]))
    assert net.told("plan")["changes"] == []


def test_drift_is_found_with_who_wrote_it_and_is_left_at_a_revert(net: Namespace) -> None:
    before = net.values()
    net.tune("apply")
    net.set("net.ipv4.tcp_tw_reuse", 0)
    net.set("net.ipv4.tcp_autocorking", 1)
    drift = {row["place"]["name"]: row for row in net.told("verify", code=4)["drift"]}
    assert set(drift) == {"net.ipv4.tcp_tw_reuse", "net.ipv4.tcp_autocorking"}
    assert drift["net.ipv4.tcp_tw_reuse"]["by"].startswith("somebody wrote it after clawctl tune pid=")
    assert drift["net.ipv4.tcp_autocorking"]["by"].startswith("somebody put back what was there before")
    outcomes = {row["place"]["name"]: row for row in net.told("revert")["outcomes"]}
    assert outcomes["net.ipv4.tcp_tw_reuse"]["result"] == "kept"
    assert net.values() == {**before, "net.ipv4.tcp_tw_reuse": "0"}


def doctor_says(net: Namespace) -> list[dict[str, str]]:
    """What it makes of what was tuned here."""
    code = (
        "import json, sys; from pathlib import Path; from clawd.ctl.tuned import find_tuned;"
        "print(json.dumps([vars(found) for found in find_tuned(Path(sys.argv[1]))]))"
    )
    return list(json.loads(net.python(code, net.state)))


def test_doctor_tells_what_is_not_as_it_was_tuned_any_more(net: Namespace) -> None:
    assert doctor_says(net) == [], "nothing was"
    net.tune("apply")
    [found] = doctor_says(net)
    assert (found["level"], found["fix"]) == ("ok", None)
    net.set("net.ipv4.tcp_tw_reuse", 0)
    [found] = doctor_says(net)
    assert (found["level"], found["fix"]) == ("warn", "clawctl tune apply, or revert")
    assert "net.ipv4.tcp_tw_reuse (somebody wrote it after clawctl tune pid=" in found["what"]
    assert "autocorking" not in found["what"]
    [journal] = net.state.glob("*.journal")
    journal.chmod(0o666)
    [found] = doctor_says(net)
    assert found["level"] == "info"


def test_floors_are_only_raised_and_bits_only_set(net: Namespace) -> None:
    net.set("net.core.somaxconn", 65000)
    net.set("net.ipv4.tcp_fastopen", 0x401)
    net.set("net.ipv4.tcp_notsent_lowat", 16384)
    net.tune("apply")
    assert net.get("net.core.somaxconn") == "65000"
    assert net.get("net.ipv4.tcp_fastopen") == str(0x403)
    assert net.get("net.ipv4.tcp_notsent_lowat") == "16384"
    assert net.told("verify")["drift"] == []
    net.set("net.core.somaxconn", 128)
    net.tune("apply")
    assert net.get("net.core.somaxconn") == "4096"
    net.tune("revert")
    assert net.get("net.core.somaxconn") == "128"
    assert net.get("net.ipv4.tcp_fastopen") == str(0x401)


def test_another_profile_takes_back_what_it_does_not_ask_for(net: Namespace) -> None:
    before = net.values()
    net.tune("apply")
    net.tune("apply", "--profile", "shared-host")
    assert net.values() == {**before, "net.ipv4.tcp_fastopen": "3"}
    assert net.told("verify")["profile"] == "shared-host", "the one that was applied"
    net.tune("revert")
    assert net.values() == before


def test_what_makes_a_value_do_nothing_is_told(net: Namespace) -> None:
    net.set("net.ipv4.tcp_timestamps", 0)
    text = net.tune("show")
    assert "net.ipv4.tcp_tw_reuse: net.ipv4.tcp_timestamps is 0" in text


def test_by_the_option_it_is_that_namespace_alone(net: Namespace, tmp_path: Path) -> None:
    before = net.values()
    words = net.command("apply", "--netns", f"pid:{net.holder.pid}", "--json")
    value = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout)
    inode = os.stat(f"/proc/{net.holder.pid}/ns/net").st_ino
    assert value["netns"]["inode"] == inode
    assert {row["place"]["kind"] for row in value["rows"]} == {"sysctl", "qdisc"}, "nothing of the host"
    assert net.get("net.ipv4.tcp_fastopen") == "3"
    # from outside: its entries wait for it
    other = subprocess.run(net.command("revert"), capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout
    assert f"it is in network namespace {inode}: give that as --netns" in " ".join(other.split())
    assert net.get("net.ipv4.tcp_fastopen") == "3"
    subprocess.run(net.command("revert", "--netns", str(inode)), capture_output=True, check=True, env=ENVIRONMENT)
    assert net.values() == before


KILLED = """
import os, signal, sys
from pathlib import Path
from clawd.kernel import profile
from clawd.kernel.tuning import Tuning
from tests.network import snapshot

state, verb = Path(sys.argv[1]), sys.argv[2]
chosen = profile.load("low-latency")
original = snapshot()
Tuning("test", state).apply(chosen)
planned = snapshot()
assert planned != original
if verb == "apply":
    Tuning("test", state).revert()
at, is_done = 0, False
while not is_done:
    pid = os.fork()
    if pid == 0:
        left = at
        def step(name):
            global left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        tuning = Tuning("test", state, step=step)
        tuning.apply(chosen) if verb == "apply" else tuning.revert()
        os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert end in (0, -signal.SIGKILL), end
    is_done = end == 0
    tuning = Tuning("test", state)
    tuning.recover()
    if verb == "apply":
        assert snapshot() in (original, planned), at
        tuning.revert()
    else:
        tuning.revert()
    assert snapshot() == original, at
    assert tuning.journal.load() == ([], ""), at
    if verb == "revert":
        tuning.apply(chosen)
    at += 1
Tuning("test", state).revert()
print(at)
"""


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_killed_at_any_step_it_is_as_before_or_as_planned(net: Namespace, verb: str) -> None:
    killed = int(net.python(KILLED, net.state, verb))
    assert killed > 20, "the run had fewer steps than places"


ROUNDS = """
import sys
from pathlib import Path
from clawd.kernel import profile
from clawd.kernel.tuning import Tuning
from tests.network import snapshot

before = snapshot()
chosen = [profile.load(name) for name in profile.names()]
for round in range(100):
    tuning = Tuning("test", Path(sys.argv[1]))
    outcomes = tuning.apply(chosen[round % len(chosen)])
    assert outcomes and all(outcome.result == "done" for outcome in outcomes)
    tuning.revert()
    if round % 10 == 9:
        assert snapshot() == before, round
"""


def test_a_hundred_rounds_leave_no_trace(net: Namespace) -> None:
    net.python(ROUNDS, net.state)


# --- bad input: one line, nothing changed ---


def own_profile(net: Namespace, text: str) -> list[str]:
    """How to run it with an admin's profile `mine`."""
    admins = net.state.parent / "profiles"
    admins.mkdir()
    (admins / "mine.conf").write_text(text)
    program = (
        "import sys; from pathlib import Path; from clawd.kernel import profile;"
        f"real = profile.load; profile.load = lambda name: real(name, Path({str(admins)!r}));"
        "from clawd.ctl.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = net.command("apply", "--profile", "mine")
    return [words[0], "-c", program, *words[3:]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[sysctl]\nnet.ipv4.tcp_tw_reus = 1\n", "mine.conf:2: net.ipv4.tcp_tw_reus: no sysctl that can be tuned; did"),
        ("[sysctl]\nkernel.panic = 1\n", "kernel.panic: no sysctl that can be tuned"),
        ("[sysctl]\nnet.ipv4.tcp_tw_reuse = 7\n", '"7" is not allowed; it must be 0 to 2, or leave'),
        ("[sysctl]\nnet.ipv4.tcp_congestion_control = ../x\n", '"../x" is not allowed; it must be the name of'),
        ("[qdisc]\nkind = cake\n", '"cake" is not allowed; it must be fq, fq_codel, pfifo, htb, or leave'),
        ("[qdisc]\nkind = htb\nrate = fast\n", '"fast" is no rate; it must be 1mbit to 30gbit'),
        ("[sched]\nslice = 1s\n", '"1s" is not allowed; it must be 100us to 100ms'),
        ("[weight]\nuser.slice = 3\n", "user.slice: no slice of clawd's"),
        ("[tune]\n", "no section [tune]"),
        ("[profile]\nbase = mine\n", "profile mine is its own base"),
        ("[profile]\nbase = nothing\n", 'no profile "nothing"; there is low-latency, mine, shared-host, wan'),
        ("x = 1\n", "x is of no section"),
        ("[sysctl\n", "is not a section"),
    ],
)
def test_a_profile_with_a_mistake_changes_nothing(net: Namespace, text: str, told: str) -> None:
    before = net.values()
    said = net.run(*own_profile(net, text), code=1)
    assert told in said
    assert all(line.startswith("clawctl: ") for line in said.splitlines()[:1])
    assert net.values() == before


def test_a_profile_of_ones_own_is_built_on_another(net: Namespace) -> None:
    text = "[profile]\nbase = shared-host\n[sysctl]\nnet.ipv4.tcp_tw_reuse = 1   # ports\nnet.core.somaxconn = leave\n"
    before = net.values()
    net.run(*own_profile(net, text))
    assert net.values() == {**before, "net.ipv4.tcp_fastopen": "3", "net.ipv4.tcp_tw_reuse": "1"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("aply",), 'no action "aply" of tune; did you mean "apply"?'),
        (("apply", "--profile", "low-latncy"), 'no profile "low-latncy"; did you mean low-latency?'),
        (("apply", "--profile", "../../etc/x"), 'no profile "../../etc/x"; there is low-latency'),
        (("apply", "--device", "eth77"), 'there is no device "eth77" in this network namespace; see: ip link'),
        (("apply", "--netns", "nowhere"), 'there is no network namespace "nowhere"; see: ip netns list'),
        (("apply", "--netns", "../1"), 'there is no network namespace "../1"'),
        (("apply", "--netns", "pid:999999999"), 'network namespace "pid:999999999": No such file'),
    ],
)
def test_what_there_is_not_is_one_line_and_nothing_is_changed(
    net: Namespace, words: tuple[str, ...], told: str
) -> None:
    before = net.values()
    said = net.tune(*words, code=2 if words[0] == "aply" else 1)
    assert said.startswith(f"clawctl: {told}")
    assert said.count("\n") == 1
    assert net.values() == before


def test_a_value_that_the_kernel_refuses_leaves_the_others(net: Namespace) -> None:
    text = "[sysctl]\nnet.ipv4.tcp_congestion_control = nosuch\n"
    said = net.run(*own_profile(net, text), code=1)
    assert 'net.ipv4.tcp_congestion_control = "nosuch": the kernel has no such module' in " ".join(said.split())
    assert net.get("net.ipv4.tcp_tw_reuse") == "1"
    assert "tcp_congestion_control" not in (net.state / "tune.journal").read_text()


READ_ONLY = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec"


def test_where_sysctls_are_read_only_it_says_so_and_what_is_right_already_is_right(net: Namespace) -> None:
    before = net.values()
    words = ["unshare", "-m", "sh", "-c", f'{READ_ONLY} "$@"', "sh"]
    said = " ".join(net.run(*words, *net.command("apply"), code=1).split())
    assert "net.ipv4.tcp_tw_reuse FAILED" in said
    assert "/proc/sys is read-only here; run it as root, on the host" in said
    assert net.values() == before
    net.tune("apply")
    net.run(*words, *net.command("apply"))
    net.run(*words, *net.command("verify"))


def test_without_root_it_shows_and_changes_nothing(net: Namespace) -> None:
    before = net.values()
    if become.is_closed():
        pytest.skip(become.CLOSED)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    said = net.run(*nobody, *net.command("apply"), code=1)
    assert said == "clawctl: changing the kernel needs root; sudo clawctl tune apply\n"
    assert "net.ipv4.tcp_tw_reuse" in net.run(*nobody, *net.command("show"))
    assert net.values() == before


def test_two_at_once_are_told_apart(net: Namespace) -> None:
    net.state.mkdir()
    before = net.values()
    words = ["flock", net.state / "tune.lock", *net.command("apply")]
    said = net.run(*words, code=1)
    assert said == "clawctl: another clawctl tune or clawd-kernel is tuning; try again when it is done\n"
    assert net.values() == before


def test_a_journal_that_was_cut_is_one_line(net: Namespace) -> None:
    net.tune("apply")
    after = net.values()
    path = net.state / "tune.journal"
    path.write_bytes(path.read_bytes()[:-20])
    for action in ("apply", "revert"):
        said = net.tune(action, code=1)
        assert "is damaged, so what it says is not put back" in said
        assert said.count("\n") == 1
    assert "is damaged" in net.tune("show")
    assert net.values() == after
