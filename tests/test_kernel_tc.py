# SPDX-License-Identifier: Apache-2.0
"""Queues of devices: the express class goes first, what others made stays, a kill half-way leaves no half."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd.kernel import tc
from tests.network import NEEDED, Namespace, namespace

pytestmark = [pytest.mark.plain, NEEDED]

HEAD = """
import os, signal, sys
from pathlib import Path
from clawd.kernel import netns, tc
from clawd.kernel.change import Change, Place, Trouble
from clawd.kernel.tuning import Tuning
state, name = Path(sys.argv[1]), sys.argv[2]
tuning = Tuning("test", state)
place = Place(tc.KIND, name, netns.current().cookie, tc.find_device(name).identity)
lever = tc.Queues()
def apply(value):
    def plan(entries):
        live = lever.read(place)
        return [Change(place, live, value)] if live != value else []
    return tuning._tuner().apply(plan, "test")
"""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Namespace]:
    with namespace(tmp_path / "state") as made:
        made.run("sh", "-c", "ip link add v0 type veth peer name v1 && ip link set v0 up && ip link set v1 up")
        yield made


def queues(net: Namespace, device: str) -> list[str]:
    return net.run("tc", "qdisc", "show", "dev", device).splitlines()


def do(net: Namespace, program: str, device: str = "v0") -> str:
    return net.python(HEAD + program, net.state, device)


def admin(net: Namespace, text: str, *words: str, code: int = 0) -> dict[str, object]:
    """`clawctl tune` with an admin's profile `mine`."""
    admins = net.state.parent / "profiles"
    admins.mkdir(exist_ok=True)
    (admins / "mine.conf").write_text(text)
    program = (
        "import sys; from pathlib import Path; from clawd.kernel import profile;"
        f"real = profile.load; profile.load = lambda name: real(name, Path({str(admins)!r}));"
        "from clawd.ctl.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = net.command(*words, "--json")
    value = json.loads(net.run(command[0], "-c", program, *command[3:], code=code))
    assert isinstance(value, dict)
    return value


HTB = "[qdisc]\nkind = htb\nrate = 10mbit\nexpress = 40%\n"


def test_an_express_class_where_it_was_asked_for_and_back(net: Namespace) -> None:
    before = queues(net, "v0")
    plan = admin(net, HTB, "plan", "--profile", "mine", "--device", "v0")
    change = next(one for one in plan["changes"] if one["place"]["kind"] == "qdisc")  # type: ignore[attr-defined]
    assert change["is_disruptive"]
    assert change["undo"] == ["tc qdisc del dev v0 root handle c1a0:"]
    assert (
        "tc class add dev v0 parent c1a0:1 classid c1a0:10 htb rate 4000000bit ceil 10000000bit prio 0"
        in (change["operations"])
    )
    assert queues(net, "v0") == before
    admin(net, HTB, "apply", "--profile", "mine", "--device", "v0")
    classes = net.run("tc", "class", "show", "dev", "v0")
    assert "class htb c1a0:10 parent c1a0:1 prio 0 rate 4Mbit ceil 10Mbit" in classes
    assert "class htb c1a0:20 parent c1a0:1 prio 1 rate 6Mbit ceil 10Mbit" in classes
    assert admin(net, HTB, "verify", "--device", "v0")["drift"] == []
    assert admin(net, HTB, "apply", "--device", "v0")["outcomes"] == []
    assert net.told("revert")["outcomes"]
    assert queues(net, "v0") == before
    assert net.run("tc", "class", "show", "dev", "v0") == net.run("tc", "filter", "show", "dev", "v0") == ""


def test_the_commands_of_the_plan_make_the_same(net: Namespace) -> None:
    plan = admin(net, HTB, "plan", "--profile", "mine", "--device", "v0")
    change = next(one for one in plan["changes"] if one["place"]["kind"] == "qdisc")  # type: ignore[attr-defined]
    net.run("sh", "-ec", "\n".join(change["operations"]))
    assert do(net, "print(lever.read(place))") == "htb 10000000 40\n"


TRAFFIC = """
import json, socket, struct, sys
IP_TOS, IPV6_TCLASS, SO_PRIORITY, ETH_P_ALL = 1, 67, 12, 3
ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
ear.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
ear.bind(("v1", 0))
ear.settimeout(30)
def mouth(family, address, *option):
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    if option:
        made.setsockopt(*option)
    made.connect((address, 9))
    return made
bulk = mouth(socket.AF_INET, "10.1.0.2")
express = [
    mouth(socket.AF_INET, "10.1.0.2", socket.IPPROTO_IP, IP_TOS, 0xB8),
    mouth(socket.AF_INET, "10.1.0.2", socket.SOL_SOCKET, SO_PRIORITY, struct.pack("I", 0xC1A00010)),
    mouth(socket.AF_INET6, "fd00::2", socket.IPPROTO_IPV6, IPV6_TCLASS, 0xB8),
]
for number in range(300):
    bulk.send(b"bulk" + bytes(996))
for number, one in enumerate(express):
    one.send(b"express%d" % number)
bulk.send(b"last")
seen = []
while not seen or seen[-1] != "last":
    frame = ear.recv(2000)
    for word in (b"express0", b"express1", b"express2", b"bulk", b"last"):
        if word in frame:
            seen.append(word.decode())
print(json.dumps(seen))
"""


def test_express_overtakes_what_is_queued(net: Namespace) -> None:
    net.run("sh", "-ec", """
        ip addr add 10.1.0.1/24 dev v0; ip -6 addr add fd00::1/64 dev v0 nodad
        mac=$(ip -o link show v1 | sed 's/.*ether \\([^ ]*\\).*/\\1/')
        ip neigh add 10.1.0.2 lladdr $mac dev v0; ip neigh add fd00::2 lladdr $mac dev v0
    """)  # fmt: skip
    admin(net, HTB.replace("10mbit", "2mbit"), "apply", "--profile", "mine", "--device", "v0")
    seen = json.loads(net.python(TRAFFIC))
    assert seen.count("bulk") == 300, "nothing was lost"
    behind = [seen.index(f"express{number}") for number in range(3)]
    assert max(behind) < 150, f"of 300 queued packets so many went first: {behind}"


def test_a_root_that_somebody_made_stays_and_so_does_clsact(net: Namespace) -> None:
    net.run("sh", "-ec", """
        tc qdisc add dev v0 root handle 7: tbf rate 1mbit burst 10k latency 50ms
        tc qdisc add dev v0 clsact
        tc filter add dev v0 egress protocol ip prio 9 u32 match ip dst 10.9.9.8/32 flowid 1:1
        tc qdisc add dev v1 clsact
        tc filter add dev v1 ingress protocol ip prio 9 u32 match ip dst 10.9.9.8/32 flowid 1:1
    """)  # fmt: skip
    looks = [*(["tc", "filter", "show", "dev", d, way] for d in ("v0", "v1") for way in ("egress", "ingress")),
             ["tc", "qdisc", "show", "dev", "v0"]]  # fmt: skip
    before = [net.run(*look) for look in looks]
    assert "flowid 1:1" in before[0]
    value = admin(net, HTB, "apply", "--profile", "mine", "--device", "v0", "--device", "v1")
    rows = {row["place"]["name"]: row for row in value["rows"]}  # type: ignore[attr-defined]
    assert (rows["v0"]["state"], rows["v1"]["state"]) == ("n/a", "ok")
    assert rows["v0"]["why"] == "its root queue, tbf 7:, is somebody else's and stays"
    assert [net.run(*look) for look in looks] == before
    net.tune("revert")
    assert [net.run(*look) for look in looks] == before


def test_a_root_that_somebody_put_over_ours_stays_at_a_revert(net: Namespace) -> None:
    admin(net, HTB, "apply", "--profile", "mine", "--device", "v0")
    net.run("tc", "qdisc", "replace", "dev", "v0", "root", "handle", "9:", "tbf", "rate", "1mbit", "burst", "10k",
            "latency", "50ms")  # fmt: skip
    drift = admin(net, HTB, "verify", "--device", "v0")
    assert [row["state"] for row in drift["rows"] if row["place"]["name"] == "v0"] == ["n/a"]  # type: ignore
    results = {row["place"]["name"]: row["result"] for row in net.told("revert")["outcomes"]}
    assert results["v0"] == "kept"
    assert "tbf 9:" in queues(net, "v0")[0]


def test_a_class_that_somebody_added_to_ours_is_drift_and_stays(net: Namespace) -> None:
    admin(net, HTB, "apply", "--profile", "mine", "--device", "v0")
    net.run("tc", "class", "add", "dev", "v0", "parent", "c1a0:1", "classid", "c1a0:77", "htb", "rate", "1mbit")
    drift = admin(net, HTB, "verify", "--device", "v0", code=4)["drift"]
    assert [row["place"]["name"] for row in drift] == ["v0"]  # type: ignore[attr-defined]
    results = {row["place"]["name"]: row["result"] for row in net.told("revert")["outcomes"]}
    assert results["v0"] == "kept"
    assert "c1a0:77" in net.run("tc", "class", "show", "dev", "v0")


def test_another_device_of_the_same_name_is_let_alone(net: Namespace) -> None:
    admin(net, HTB, "apply", "--profile", "mine", "--device", "v0")
    net.run("sh", "-ec", "ip link del v0; ip link add v0 type veth peer name v1; ip link set v0 up")
    outcomes = {row["place"]["name"]: row for row in net.told("revert")["outcomes"]}
    assert (outcomes["v0"]["result"], outcomes["v0"]["why"]) == ("gone", "v0 is another device by now")


def test_a_device_without_a_queue_and_a_kernel_without_fq_are_no_drift(net: Namespace) -> None:
    rows = {row["place"]["name"]: row for row in net.told("verify", "--device", "v0", code=4)["rows"]}
    assert (rows["v0"]["state"], rows["v0"]["why"]) == (
        "n/a",
        "it has no queue of its own: the device below it has",
    )
    # the device by which the namespace's default route goes is the one that is meant
    net.run("sh", "-ec", "ip addr add 10.1.0.1/24 dev v0; ip route add default via 10.1.0.2")
    assert "v0" in {row["place"]["name"] for row in net.told("show")["rows"]}


KILLED = """
class Deadly:
    def __init__(self, handle, left):
        self.handle, self.left = handle, left
    def __getattr__(self, what):
        return getattr(self.handle, what)
    def tc(self, *words, **options):
        strike()
        return self.handle.tc(*words, **options)
left = -1
def strike():
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
from contextlib import contextmanager
netlink, program = tc._netlink, tc._tc
@contextmanager
def deadly(what):
    with netlink(what) as handle:
        yield Deadly(handle, left)
def deadly_program(*words):
    strike()
    program(*words)
tc._netlink, tc._tc = deadly, deadly_program
def seen():
    import subprocess
    text = "for w in qdisc class filter; do tc $w show dev $0; done | grep -v '^qdisc clsact' | sort"
    return subprocess.run(["sh", "-c", text, name], capture_output=True, text=True, check=True).stdout
value, at, original = sys.argv[3], 0, lever.read(place)
before = seen()
apply(value)
planned = seen()
tuning.revert()
assert seen() == before != planned
while True:
    pid = os.fork()
    if pid == 0:
        left = at
        tuning = Tuning("test", state)
        os._exit(0 if apply(value)[0].result == "done" else 3)
    end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert end in (0, -9), end
    tuning = Tuning("test", state)
    tuning.recover()
    assert lever.read(place) in (original, value), (at, lever.read(place))
    if value.startswith("htb"):  # of other kinds the kernel numbers each leaf anew
        assert seen() in (before, planned), (at, seen())
    tuning.revert()
    assert lever.read(place) == original, (at, lever.read(place))
    if end == 0:
        break
    at += 1
print(at)
"""


def test_killed_between_two_calls_there_is_no_half(net: Namespace) -> None:
    assert int(net.python(HEAD + KILLED, net.state, "v0", "htb 8000000 25")) >= 6


TAP = """
import ctypes, fcntl, os, struct, subprocess, sys
TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_MULTI_QUEUE = 0x400454CA, 2, 0x1000, 0x100
files = [os.open("/dev/net/tun", os.O_RDWR) for _ in range(4)]
for file in files:
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", b"q0", IFF_TAP | IFF_NO_PI | IFF_MULTI_QUEUE))
subprocess.run(["ip", "link", "set", "q0", "up"], check=True)
"""


def test_each_queue_of_a_device_with_several_gets_a_leaf(net: Namespace) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun, so no device with several queues")
    program = TAP + HEAD + """
look = ["tc", "qdisc", "show", "dev", "q0"]
show = lambda: sorted(subprocess.run(look, capture_output=True, text=True, check=True).stdout.splitlines())
before = show()
assert lever.read(place).startswith("default mq "), lever.read(place)
assert len(before) == 5, before
outcome, = apply("mq pfifo")
assert outcome.result == "done", outcome
after = show()
assert sum(" parent c1a0:" in line and line.startswith("qdisc pfifo ") for line in after) == 4, after
assert apply("mq pfifo") == []
subprocess.run(["tc", "qdisc", "replace", "dev", "q0", "parent", "c1a0:3", "bfifo"], check=True)
assert lever.read(place) == "partial"
subprocess.run(["tc", "qdisc", "replace", "dev", "q0", "parent", "c1a0:3", "pfifo"], check=True)
tuning.revert()
assert show() == before, show()
"""  # fmt: skip
    net.python(program, net.state, "q0")
    # its queues are the process's: the next one has a device of its own
    assert int(net.python(TAP + HEAD + KILLED, net.state, "q0", "mq pfifo")) >= 5


def test_whether_the_kernel_has_a_queue_is_seen_without_trying(tmp_path: Path) -> None:
    assert not tc.has_scheduler("fq", tmp_path)
    modules = tmp_path / "lib/modules" / platform.release()
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text("kernel/net/sched/sch_fq_codel.ko.xz:\n")
    assert not tc.has_scheduler("fq", tmp_path)
    assert tc.has_scheduler("fq_codel", tmp_path)
    (modules / "modules.builtin").write_text("kernel/net/sched/sch_fq.ko\n")
    assert tc.has_scheduler("fq", tmp_path)
    (tmp_path / "boot").mkdir()
    (tmp_path / f"boot/config-{platform.release()}").write_text(
        "# CONFIG_NET_SCH_SFQ is not set\nCONFIG_NET_SCH_HTB=m\n"
    )
    assert tc.has_scheduler("htb", tmp_path)
    assert not tc.has_scheduler("sfq", tmp_path)


def test_default_routes_of_both_families(tmp_path: Path) -> None:
    zero = "0" * 32
    (tmp_path / "route").write_text(
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0\n"
        "eth1 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
        "eth2 00000000 00000000 0000 0 0 0 00000000 0 0 0\n"
    )
    (tmp_path / "ipv6_route").write_text(
        f"{zero} 00 {zero} 00 {zero} 00000400 1 0 00000003 wlan0\n{zero} 00 {zero} 00 {zero} ffffffff 1 0 00200200 lo\n"
    )
    assert tc.route_devices(tmp_path) == ["eth0", "wlan0"]
