# SPDX-License-Identifier: Apache-2.0
"""Who may connect by tcp: every mechanism and every sort of key, keys that come and go, sessions and ids of others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET6, create_server
from typing import Any

import pytest
import zmq

from clawd import protocol
from clawd.consumer import Consumer
from clawd.core import lib
from clawd.errors import AttachError, ControlError
from clawd.keys import ALLOW_DIR, Allowed, AllowList, Pair, allow, make_pair, make_server, read_pair, write_pair
from clawd.producer import Producer
from clawd.server.zap import DOMAIN, Zap
from tests import ports
from tests.daemon import PATIENCE_S, Daemon


class Site:
    """A daemon on loopback, with keys."""

    def __init__(self, directory: Path, *flags: str, host: str = "127.0.0.1") -> None:
        directory.mkdir(exist_ok=True)
        self.keys = directory / "keys"
        self.directory = directory
        self.server = make_server(self.keys)
        self.port = ports.pair()
        self.endpoint = f"tcp://{host}:{self.port}"
        self.daemon = Daemon(
            directory / "run", "--tcp-listen", f"{host}:{self.port}", "--keys-dir", str(self.keys), *flags
        )
        self.right = self.key("right")

    def key(self, name: str, role: str = "consumer", *, known: bool = True) -> Path:
        pair = make_pair()
        path = self.directory / f"{name}.key"
        write_pair(path, pair, "test")
        if known:
            allow(self.keys, Allowed(name, pair.public, role))
        return path

    def consumer(self, key: Path) -> Consumer:
        return Consumer(endpoint=self.endpoint, key=key, server_key=self.server.public)

    def serves(self, key: Path) -> None:
        """A client with this key reads a stream."""
        name = f"s{time.monotonic_ns()}"
        with self.consumer(key) as consumer, Producer("p", self.daemon.runtime_dir) as producer:
            reading = consumer.attach(name)
            producer.open(name).write("x")
            token = reading.read(PATIENCE_S)
            assert token is not None
            assert token.data == b"x"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    with made.daemon:
        yield made


@contextmanager
def dealer(site: Site, pair: Pair | None, server: str = "", identity: bytes = b"", lane: int = 0) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        for option, value in ((zmq.LINGER, 0), (zmq.PROBE_ROUTER, 1), (zmq.IMMEDIATE, 1)):
            socket.setsockopt(option, value)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        if pair:
            socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
            socket.curve_serverkey = server.encode()
        socket.connect(f"tcp://127.0.0.1:{site.port + lane}")
        yield socket


def ask(socket: Any, message: protocol.Message | None = None) -> dict[str, Any]:
    if message:
        socket.send(protocol.encode(message))
    assert socket.poll(PATIENCE_S * 1000), "no answer"
    return dict(json.loads(socket.recv()))


def await_hang_up(context: Any, socket: Any, endpoint: str) -> None:
    """Connect, and see that the other end ends it: libzmq may not dial again."""
    with context.socket(zmq.PAIR) as monitor:
        socket.monitor("inproc://hang-ups", zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        monitor.connect("inproc://hang-ups")
        socket.connect(endpoint)
        assert monitor.poll(PATIENCE_S * 1000), "it was not hung up on"
        socket.monitor(None, 0)


@pytest.mark.parametrize("how", ["null", "plain", "unknown key", "wrong server key"])
def test_who_has_not_the_right_key_gets_no_word(site: Site, how: str) -> None:
    stranger = make_pair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        if how == "plain":
            socket.plain_username, socket.plain_password = b"clawd", b"clawd"
        elif how != "null":
            socket.curve_publickey, socket.curve_secretkey = stranger.public.encode(), stranger.secret.encode()
            server = site.server.public if how == "unknown key" else make_pair().public
            socket.curve_serverkey = server.encode()
        await_hang_up(context, socket, site.endpoint)
        assert not socket.poll(0)
    site.serves(site.right)


def test_a_client_with_an_unknown_key_is_told_so_until_it_is_known(site: Site) -> None:
    key = site.key("late", known=False)
    public = key.read_text().split("public = ")[1].split("\n")[0]
    with site.consumer(key) as consumer, Producer("p", site.daemon.runtime_dir) as producer:
        for _ in range(2):
            with pytest.raises(AttachError, match="does not know this key") as caught:
                consumer.attach("s").read(PATIENCE_S)
            assert caught.value.code == "denied"
        allow(site.keys, Allowed("late", public, "consumer"))
        producer.open("s").write("x")
        deadline = time.monotonic() + PATIENCE_S
        while True:  # one more refusal may be on its way
            try:
                assert consumer.attach("s").read(PATIENCE_S)
                break
            except AttachError:
                assert time.monotonic() < deadline


def test_a_revoked_key_is_cut_off_and_stays_out(site: Site) -> None:
    other = site.key("other")
    with site.consumer(other) as consumer, Producer("p", site.daemon.runtime_dir) as producer:
        reading, stream = consumer.attach("s"), producer.open("s")
        stream.write("before")
        assert reading.read(PATIENCE_S)
        (site.keys / ALLOW_DIR / "other").unlink()
        started = time.monotonic()
        site.daemon.log.wait("client gone")
        assert time.monotonic() - started < 3
        stream.write("after")
        with pytest.raises(AttachError, match="does not know this key"):
            reading.read(PATIENCE_S)
    site.serves(site.right)


def test_a_key_for_observers_may_not_be_more(site: Site) -> None:
    key = site.key("watcher", "observer")
    with site.consumer(key) as consumer, pytest.raises(AttachError, match="may not be used as consumer"):
        consumer.attach("s", wait=1).read(PATIENCE_S)


def test_nobody_gets_in_when_nobody_answers_for_keys() -> None:
    """ZAP's socket is gone: the domain is enforced, so libzmq refuses by itself."""
    server, client = make_pair(), make_pair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        zap = Zap(context, None)
        zap.close()
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        # libzmq closes a socket in its own time: a handshake that still found ZAP's has no answer, for half a minute
        router.setsockopt(zmq.HANDSHAKE_IVL, 500)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.curve_server, router.curve_secretkey = True, server.secret.encode()
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.curve_publickey, dealer.curve_secretkey = client.public.encode(), client.secret.encode()
        dealer.curve_serverkey = server.public.encode()
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.PROBE_ROUTER, 1)
        await_hang_up(context, dealer, f"tcp://127.0.0.1:{port}")
        assert not router.poll(0)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda known: [b"clawd", b"127.0.0.1", b"", b"NULL"],
        lambda known: [b"clawd", b"127.0.0.1", b"", b"PLAIN", b"a", b"b"],
        lambda known: [b"other", b"127.0.0.1", b"", b"CURVE", known],
        lambda known: [b"clawd", b"127.0.0.1", b"", b"CURVE", known[:31]],
        lambda known: [b"clawd", b"127.0.0.1", b"", b"CURVE", known, known],
        lambda known: [b"clawd", b"127.0.0.1", b"", b"CURVE", bytes(32)],
        lambda known: [b"clawd"],
        lambda known: [],
    ],
)
def test_zap_says_no_to_all_but_a_known_key(tmp_path: Path, request_of: Any) -> None:
    make_server(tmp_path)
    pair = make_pair()
    allow(tmp_path, Allowed("a", pair.public, "consumer"))
    known = zmq.utils.z85.decode(pair.public)
    with zmq.Context() as context, context.socket(zmq.REQ) as libzmq:
        zap = Zap(context, AllowList(tmp_path))
        libzmq.connect("inproc://zeromq.zap.01")

        def code(request: list[bytes]) -> bytes:
            libzmq.send_multipart([b"1.0", b"1", *request])
            while not libzmq.poll(0):
                zap.look()
            return bytes(libzmq.recv_multipart()[2])

        assert code(request_of(known)) in (b"400", b"500")
        assert code([b"clawd", b"10.0.0.9", b"", b"CURVE", known]) == b"200"
        zap.close()


def test_without_keys_clients_of_this_host_need_none_and_others_are_refused(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as libzmq:
        zap = Zap(context, None)
        libzmq.connect("inproc://zeromq.zap.01")
        for address, want in ((b"127.0.0.1", b"200"), (b"::1", b"200"), (b"10.0.0.9", b"400"), (b"nonsense", b"400")):
            libzmq.send_multipart([b"1.0", b"1", b"clawd", address, b"", b"NULL"])
            while not libzmq.poll(0):
                zap.look()
            assert libzmq.recv_multipart()[2] == want
        zap.close()


def test_beyond_loopback_clawd_does_not_start_without_keys(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "run", "--tcp-listen", f"0.0.0.0:{ports.pair()}", "--keys-dir", str(tmp_path / "none"))
    try:
        line = daemon.refused()
    finally:
        daemon.discard()
    assert 'no keys for clients of other hosts, who could reach "0.0.0.0"' in line
    assert "clawctl keys relay new" in line


def test_a_secret_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (site.keys / "relay.key").chmod(0o644)
    try:
        assert "can be read by others" in site.daemon.refused()
    finally:
        site.daemon.discard()


def test_a_session_belongs_to_the_key_that_joined_it(site: Site) -> None:
    """Also when its secret got out: another key is refused, and the client goes on."""
    pair = make_pair()
    allow(site.keys, Allowed("thief", pair.public, "consumer"))
    with site.consumer(site.right) as consumer, Producer("p", site.daemon.runtime_dir) as producer:
        reading, stream = consumer.attach("s"), producer.open("s")
        stream.write("1")
        assert reading.read(PATIENCE_S)
        session = str(consumer._link._session.name)
        with dealer(site, pair, site.server.public) as thief:
            assert ask(thief)["connection"] == 0
            answer = ask(thief, protocol.Join(protocol.VERSION, "consumer", session))
            assert (answer["op"], answer["code"]) == ("error", "denied")
        stream.write("2")
        assert reading.read(PATIENCE_S)


def test_a_routing_id_that_is_taken_gives_nothing_of_its_owners(site: Site) -> None:
    """libzmq refuses the second of a name (no handover), and sessions do not go by names anyway."""
    pairs = [make_pair(), make_pair()]
    for number, pair in enumerate(pairs):
        allow(site.keys, Allowed(f"k{number}", pair.public, "consumer"))
    public = site.server.public
    with dealer(site, pairs[0], public, b"same") as owner, dealer(site, pairs[0], public, b"same", 1) as express:
        for lane in (owner, express):
            assert ask(lane)["connection"] == 0
            lane.send(protocol.encode(protocol.Join(protocol.VERSION, "consumer", "o" * 32)))
        connected = ask(owner)
        assert connected["connection"] > 0
        with (
            dealer(site, pairs[1], public, b"same") as squatter,
            Producer("p", site.daemon.runtime_dir) as producer,
        ):
            owner.send(protocol.encode(protocol.Attach(session="o" * 32, id=1, stream="s")))
            producer.open("s").write("mine")
            frame = b""
            while b"mine" not in frame:  # OPEN may come in a frame of its own
                assert owner.poll(PATIENCE_S * 1000), "it got nothing"
                frame = owner.recv()
                assert frame[0] == lib.CLAW_FRAME_DATA
            assert not squatter.poll(200), "it got something"


def test_a_client_that_says_nothing_is_gone_though_its_sockets_answer(tmp_path: Path) -> None:
    """libzmq's own thread answers heartbeats, also for a client that hangs."""
    site = Site(tmp_path, "--keepalive", "1s")
    pair = read_pair(site.right)
    with (
        site.daemon,
        dealer(site, pair, site.server.public) as bulk,
        dealer(site, pair, site.server.public, lane=1) as ex,
    ):
        for lane in (bulk, ex):
            assert ask(lane)["connection"] == 0
            lane.send(protocol.encode(protocol.Join(protocol.VERSION, "consumer", "o" * 32)))
        connected = ask(bulk)
        assert (connected["connection"] > 0, connected["keepalive_ms"]) == (True, 1000)
        started = time.monotonic()
        assert "reason=silent" in site.daemon.log.wait("tcp client dropped")
        assert 0.5 < time.monotonic() - started < 2.5


@pytest.mark.parametrize("key", [None, "there"])
def test_a_key_goes_with_the_servers(site: Site, key: str | None) -> None:
    path = site.right if key else None
    server = None if key else site.server.public
    with pytest.raises(ControlError, match="go together"):
        Consumer(endpoint=site.endpoint, key=path, server_key=server)


@pytest.mark.parametrize("endpoint", ["tcp://", "tcp://host", "tcp://host:0", "tcp://host:99999", "tcp://host:x", []])
def test_an_endpoint_that_is_none_is_refused(endpoint: Any) -> None:
    with pytest.raises(ControlError, match="endpoint"):
        Consumer(endpoint=endpoint)


def test_a_clawd_that_is_not_there_is_told_when_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawd.link._ANSWER_S", 0.2)
    with (
        Consumer(endpoint=f"tcp://127.0.0.1:{ports.pair()}") as consumer,
        pytest.raises(ControlError, match="no answer from clawd at"),
    ):
        consumer.attach("s", wait=0.1).read(PATIENCE_S)


def test_a_thread_that_reads_is_woken_by_a_token_from_far(site: Site) -> None:
    with site.consumer(site.right) as consumer, Producer("p", site.daemon.runtime_dir) as producer:
        reading, stream = consumer.attach("s"), producer.open("s")
        got = threading.Event()

        def read() -> None:
            for _ in reading:
                got.set()

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(20):
            stream.write("x")
            assert got.wait(PATIENCE_S)
            got.clear()
        stream.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_an_address_of_ipv6_serves_likewise(tmp_path: Path) -> None:
    try:
        with create_server(("::1", 0), family=AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error.strerror}")
    site = Site(tmp_path, host="[::1]")
    with site.daemon:
        site.serves(site.right)
        site.daemon.log.wait("client connected", "address=::1")
