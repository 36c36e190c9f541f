# SPDX-License-Identifier: Apache-2.0
"""What the sysctls do, seen in the kernel's counters and on running out of ports; and how they are read and written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd.kernel import knobs, origin, profile
from clawd.kernel.change import ABSENT, INVALID, Place, Trouble
from clawd.kernel.sysctl import Sysctls, canonical
from tests.network import NEEDED, Namespace, namespace

pytestmark = pytest.mark.plain


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Namespace]:
    with namespace(tmp_path / "state") as made:
        yield made


FAST_OPEN = """
import json, socket
MSG_FASTOPEN, TCP_FASTOPEN = 0x20000000, 23
def counters():
    names, values = [line.split()[1:] for line in open("/proc/thread-self/net/netstat") if line.startswith("TcpExt:")]
    return {name: int(value) for name, value in zip(names, values) if name.startswith("TCPFastOpen")}
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN, 16)
listener.listen(16)
before = counters()
for word in (b"first", b"second"):  # the first one gets the cookie
    client = socket.socket()
    client.sendto(word, MSG_FASTOPEN, listener.getsockname())
    served = listener.accept()[0]
    assert served.recv(100) == word
    client.close(); served.close()
after = counters()
print(json.dumps({name: after[name] - before[name] for name in after}))
"""


@NEEDED
def test_with_the_profile_a_request_comes_with_the_syn_and_is_counted(net: Namespace) -> None:
    net.set("net.ipv4.tcp_fastopen", 1)
    without = json.loads(net.python(FAST_OPEN))
    net.tune("apply")
    with_it = json.loads(net.python(FAST_OPEN))
    assert (without["TCPFastOpenPassive"], with_it["TCPFastOpenPassive"]) == (0, 1)
    assert with_it["TCPFastOpenActive"] == 1


@NEEDED
def test_a_listener_that_has_not_asked_gets_no_fast_open_queue(net: Namespace) -> None:
    net.tune("apply")
    program = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockopt(socket.IPPROTO_TCP, 23))"
    assert net.python(program) == "0\n", "what other services of the host did not ask for"


PORTS = """
import errno, socket, subprocess, sys, time
# a peer in another namespace, over veth: loopback has rules of its own
peer = subprocess.Popen(["unshare", "-n", sys.executable, "-c", '''
import socket, sys
print("here", flush=True)
sys.stdin.readline()
server = socket.create_server(("10.2.0.2", 7000), backlog=64)
print("ready", flush=True)
while True:
    got = server.accept()[0]
    got.recv(1)   # until the client has closed: the client is the one that waits
    got.close()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert peer.stdout.readline() == "here\\n"
def sh(text):
    subprocess.run(["sh", "-ec", text], check=True)
sh(f"ip link add p0 type veth peer name p1; ip link set p1 netns {peer.pid}; ip addr add 10.2.0.1/24 dev p0;"
   f"ip link set p0 up;"
   f"nsenter --net=/proc/{peer.pid}/ns/net sh -ec 'ip addr add 10.2.0.2/24 dev p1; ip link set p1 up'")
sh("echo 40000 40007 >/proc/sys/net/ipv4/ip_local_port_range")
peer.stdin.write("go\\n"); peer.stdin.flush()
assert peer.stdout.readline() == "ready\\n"
def connect():
    made = socket.socket()
    made.settimeout(20)
    try:
        made.connect(("10.2.0.2", 7000))
    except OSError as error:
        assert error.errno == errno.EADDRNOTAVAIL, error
        return False
    made.close()
    return True
try:
    used = 0
    while connect():
        used += 1
        assert used <= 8
    print(used)
    # a port is used again once the peer's timestamps have moved on, a second later
    end = time.monotonic() + 5
    while not (again := connect()) and time.monotonic() < end:
        time.sleep(0.1)
    print(again)
finally:
    peer.kill(); peer.wait()
"""


@NEEDED
@pytest.mark.parametrize("is_tuned", [False, True], ids=["with 0", "with the profile"])
def test_ports_that_ran_out_are_used_again_with_the_profile_alone(net: Namespace, is_tuned: bool) -> None:
    net.set("net.ipv4.tcp_tw_reuse", 0)
    if is_tuned:
        net.tune("apply")
    assert net.python(PORTS).split() == ["8", str(is_tuned)]


@pytest.mark.parametrize(
    ("name", "live", "told"),
    [
        ("net.core.somaxconn", "65000", "a listener lets 4096 wait"),
        ("net.ipv4.tcp_keepalive_time", "61", "a new socket has 7200"),
        ("net.ipv4.tcp_congestion_control", "nosuch", "a new socket has "),
        ("net.ipv4.tcp_fastopen", "3", "a listener that asks for TCP Fast Open gets no queue"),
    ],
)
@NEEDED
def test_a_value_that_does_nothing_is_found(net: Namespace, name: str, live: str, told: str) -> None:
    program = """
import socket, sys
from clawd.kernel import effect
from clawd.kernel.change import OK, Place, Row
if sys.argv[1].endswith("fastopen"):
    effect.TCP_FASTOPEN = 9  # TCP_DEFER_ACCEPT: a listener that has no queue says 0
    effect.QUEUE = 0
print(effect.effect(Row(Place("sysctl", sys.argv[1]), sys.argv[2], sys.argv[2], OK)))
"""
    assert net.run(sys.executable, "-c", program, name, live).startswith(told)


# --- reading and writing ---


def test_values_are_compared_as_numbers_and_words() -> None:
    assert canonical("4096\t131072\t6291456\n") == "4096 131072 6291456"
    assert canonical("0x403\n") == "1027"
    assert canonical(" cubic \n") == "cubic"


@pytest.mark.parametrize("name", ["net/ipv4/x", "..", "net..x", "net.ipv4.tcp_x\n", "/etc/passwd", "net", "a.b/../c"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(Trouble, match="no sysctl's name"):
        Sysctls(tmp_path).read(Place("sysctl", name))


@NEEDED
def test_the_kernels_refusals_are_classified(net: Namespace) -> None:
    program = """
import json
from clawd.kernel.change import Place, Trouble
from clawd.kernel.sysctl import Sysctls
def why(name, value):
    try:
        Sysctls().write(Place("sysctl", name), value)
    except Trouble as error:
        return error.why
print(json.dumps([why("net.ipv4.tcp_nothing", "1"), why("net.ipv4.tcp_tw_reuse", "99"),
                  why("net.ipv4.tcp_congestion_control", "nosuch"), why("net.core.default_qdisc", "fq"),
                  why("net.ipv4.tcp_tw_reuse", "1")]))
"""
    assert json.loads(net.python(program)) == [ABSENT, INVALID, "module_missing", ABSENT, None]


def test_what_could_not_be_put_back_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vm/dirty"
    path.parent.mkdir()
    path.write_text("0\n")
    written = []

    def put(self: Sysctls, place: Place, value: str, what: str) -> None:
        written.append(value)
        if value == "0":
            raise Trouble(INVALID, f"{what}: the kernel refuses the value")

    monkeypatch.setattr(Sysctls, "_put", put)
    with pytest.raises(Trouble, match='present value "0" could not be put back'):
        Sysctls(tmp_path).write(Place("sysctl", "vm.dirty"), "5")
    assert written == ["0"]


# --- what else decides, and what is in the files ---


def test_the_file_that_wins_at_the_next_boot_is_named(tmp_path: Path) -> None:
    for name, text in {
        "etc/sysctl.d/50-a.conf": "net.ipv4.tcp_tw_reuse = 0\n",
        "usr/lib/sysctl.d/50-a.conf": "net.ipv4.tcp_tw_reuse = 7\n",
        "usr/lib/sysctl.d/90-b.conf": "# net.core.somaxconn = 1\n-net/ipv4/tcp_tw_reuse = 2\n\n; x = 1\n",
        "run/sysctl.d/99-c.conf": "net.ipv4.* = 5\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = origin.boot_lines(tmp_path)
    found = origin.winner(lines, "net.ipv4.tcp_tw_reuse")
    assert found is not None
    assert (str(found), found.value) == ("/usr/lib/sysctl.d/90-b.conf:2", "2")
    wild = origin.winner(lines, "net.ipv4.tcp_fastopen")
    assert str(wild) == "/run/sysctl.d/99-c.conf:1"
    assert origin.winner(lines, "net.core.somaxconn") is None


def test_programs_that_write_sysctls_are_named(tmp_path: Path) -> None:
    for pid, name in (("12", "tuned"), ("13", "bash")):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "comm").write_text(f"{name}\n")
    assert origin.writers(tmp_path) == ["tuned (pid 12)"]


def test_each_key_of_the_files_has_its_reason_and_a_row() -> None:
    for name in profile.names():
        loaded = profile.load(name)
        assert loaded.about
        for wish in loaded.wishes:
            if wish.kind == "sysctl":
                assert len(wish.reason) > 30, f"{wish.origin}: {wish.name} without a reason above it"
                assert wish.name in knobs.KNOBS


def test_the_file_at_the_top_is_the_packages_own_and_sysctl_can_read_it() -> None:
    top = Path(__file__).resolve().parents[1] / "sysctl/60-clawd.conf"
    assert top.resolve() == (profile.OURS / profile.SYSCTLS).resolve()
    for line in top.read_text().splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"net\.[a-z0-9_.]+ = [0-9]+", line), line


@pytest.mark.parametrize(
    ("key", "live", "wanted", "aim"),
    [
        ("net.core.somaxconn", "128", "4096", "4096"),
        ("net.core.somaxconn", "65535", "4096", "65535"),
        ("net.ipv4.tcp_notsent_lowat", "4294967295", "131072", "131072"),
        ("net.ipv4.tcp_notsent_lowat", "16384", "131072", "16384"),
        ("net.ipv4.tcp_fastopen", "1024", "3", "1027"),
        ("net.ipv4.tcp_tw_reuse", "2", "1", "1"),
        ("net.ipv4.tcp_congestion_control", "cubic", "bbr", "bbr"),
    ],
)
def test_rules(key: str, live: str, wanted: str, aim: str) -> None:
    assert knobs.KNOBS[key].aim(live, wanted) == aim
