# SPDX-License-Identifier: Apache-2.0
"""Clients of other hosts: they come by tcp on two lanes, join both to one session, and show by pings that they live."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq

from clawd import log, protocol
from clawd.config import Config
from clawd.core import Core, Label, lib
from clawd.descriptors import RELAY_SLACK
from clawd.errors import HostError
from clawd.keys import SERVER_FILE, UID_BASE, Allowed, AllowList, Pair, read_pair
from clawd.server.lanes import STRANGER_NS, Connection, Lane, Route
from clawd.server.network import TcpWay
from clawd.server.relay import ROLES
from clawd.server.shaping import Paced, Shaping, lanes
from clawd.server.tcp import fast_open, is_loopback, listen
from clawd.server.tcpdoor import TcpDoor
from clawd.server.zap import DOMAIN, Zap

SWEEP_NS = 1_000_000_000
"""How often keys, silence and the ways to clients are looked at."""
NO_KEY = Allowed("", "", "consumer")
"""Who comes from this host where no keys are asked for."""


class Relay(Protocol):
    """What this needs of relay.py."""

    context: zmq.Context[zmq.Socket[bytes]]

    def open(self, route: Route, express: Route | None = None) -> Connection | None: ...
    def name(self, connection: Connection, session: str, label: Label) -> None: ...
    def reply(self, route: Route, message: protocol.Message) -> None: ...
    def drop(self, connection: Connection) -> None: ...
    def lose(self, route: Route) -> None: ...


@dataclass(eq=False)
class Session:
    """A client's two routes, until both are there and then as long as its connection is."""

    key: str
    label: Label
    key_name: str
    routes: dict[int, Route] = field(default_factory=dict)
    connection: Connection | None = None
    way: TcpWay | None = None
    sockets: list[Paced] = field(default_factory=list)
    is_doubled: bool = False


class Far:
    """The tcp lanes of all endpoints, and who is on them."""

    def __init__(self, core: Core, relay: Relay, config: Config) -> None:
        """Raises HostError when an address cannot be had, or may not be without keys."""
        self._core = core
        self._relay = relay
        self.lanes: list[Lane] = []
        self._doors: dict[Lane, TcpDoor] = {}
        self._listeners: list[socket.socket] = []
        self._by_fd: dict[tuple[Lane, int], Route] = {}
        self._sessions: dict[str, Session] = {}
        self._joined = 0
        """Sessions that have a connection."""
        self._sweep_ns = 0
        self._unseen: set[object] = set()
        self._pair, self._allow = _keys(config.keys_dir)
        self._zap = Zap(relay.context, self._allow)
        self._unseen.add(self._zap)
        places = [
            (host, port + later, kind)
            for host, port in config.tcp_listen
            for later, kind in enumerate((lib.CLAW_LANE_BULK, lib.CLAW_LANE_EXPRESS))
        ]
        names = {lib.CLAW_LANE_BULK: "bulk", lib.CLAW_LANE_EXPRESS: "express"}
        self._ports = [(port, names[kind]) for _, port, kind in places]
        # Before anybody can connect: sockets that are there already are not shaped
        self._shaping = Shaping(core, self._policies(config))
        self.apply(config)
        self._shaping.poll()
        for host, port, kind in places:
            self._listen(host, port, kind, config)

    def apply(self, config: Config) -> None:
        """What a reload may change."""
        self.keepalive_ns = config.keepalive
        self._loss_on_ppm = config.loss_threshold * 10_000
        if getattr(self, "_fastopen", config.tcp_fastopen) != config.tcp_fastopen:
            for listener in self._listeners:
                fast_open(listener, config.tcp_fastopen)
        self._fastopen = config.tcp_fastopen
        self._shaping.ask(self._policies(config))

    def _policies(self, config: Config) -> list[protocol.SetLane]:
        congestion = "" if config.congestion == "kernel" else config.congestion
        return lanes(self._ports, config.express_dscp, congestion)

    def _listen(self, host: str, port: int, kind: int, config: Config) -> None:
        is_express = kind == lib.CLAW_LANE_EXPRESS
        listener = listen(host, port, fastopen=config.tcp_fastopen, keepalive_ns=config.keepalive, thin=is_express)
        self._listeners.append(listener)
        address = str(listener.getsockname()[0])
        if self._pair is None and not is_loopback(address):
            hint = f"make keys: clawctl keys relay new NAME --keys-dir {config.keys_dir}; or listen on 127.0.0.1"
            raise HostError(f'no keys for clients of other hosts, who could reach "{host}"', hint)
        lane = Lane(self._relay.context, kind, is_far=True)
        router = lane.socket
        beat_ms = config.keepalive // 1_000_000
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, beat_ms)
        router.setsockopt(zmq.IPV6, int(listener.family == socket.AF_INET6))
        if self._pair is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        door = TcpDoor(
            self._relay.context, router, f"door-{len(self.lanes)}", config.max_clients + RELAY_SLACK, is_express
        )
        door.listen(listener)
        shown = f"[{address}]" if listener.family == socket.AF_INET6 else address
        # libzmq closes what it is given; ours is kept for options that change while it listens
        given = listener.dup()
        try:
            router.setsockopt(zmq.USE_FD, given.fileno())
            router.bind(f"tcp://{shown}:{port}")
        except zmq.ZMQError as error:
            given.close()
            raise HostError(f'cannot listen on "{host}:{port}": {error.strerror}') from error
        given.detach()
        self.lanes.append(lane)
        self._doors[lane] = door
        self._unseen.add(door)
        log.event("listening", host=host, port=port, lane="express" if is_express else "bulk", curve=bool(self._pair))

    def watches(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Descriptors and what to call when they are readable."""
        for lane in self.lanes:
            yield lane.fd, lambda: None
        yield self._zap.fd, lambda: self._unseen.add(self._zap)
        for door in self._doors.values():
            yield door.fd, lambda door=door: self._unseen.add(door)  # type: ignore[misc]

    def close(self) -> list[threading.Thread]:
        """Before the lanes are. Join the threads after the context's end."""
        for listener in self._listeners:
            listener.close()
        self._shaping.close()
        self._zap.close()
        return [door.close() for door in self._doors.values()]

    # --- who comes and goes ---

    def look(self) -> bool:
        """Answer who asks to come in, see who left. True: there may be more."""
        if not self._unseen:
            return False
        if self._zap in self._unseen and not self._zap.look():
            self._unseen.discard(self._zap)
        for lane, door in self._doors.items():
            if door in self._unseen:
                self._see(lane, door)
        return bool(self._unseen)

    def _see(self, lane: Lane, door: TcpDoor) -> None:
        if door.look():
            self._unseen.add(door)
        else:
            self._unseen.discard(door)
        while door.left:
            route = self._by_fd.pop((lane, door.left.pop()), None)
            if route:
                self._relay.lose(route)

    def meet(self, lane: Lane, routing_id: bytes, origin: zmq.Frame) -> None:
        """A route that is new: say that we are here, so that it joins."""
        door = self._doors[lane]
        fd = int(origin.get(zmq.SRCFD))
        # What the door was told before this message is of earlier connections, which had the same descriptor perhaps
        for _ in range(2):
            self._see(lane, door)
        door.know(fd)
        now_ns = time.monotonic_ns()
        key = ""
        if self._allow is not None:
            key = str(origin.get("User-Id"))
        route = Route(lane, routing_id, now_ns, fd=fd, key=key, heard_ns=now_ns)
        lane.routes[routing_id] = route
        self._by_fd[lane, fd] = route
        self._relay.reply(route, protocol.Connected(protocol.VERSION, 0))

    def shut(self, lane: Lane, fd: int) -> None:
        """Hang up on one connection."""
        self._doors[lane].shut(fd)

    def join(self, route: Route, request: protocol.Message) -> None:
        """A route says whose it is; with both lanes joined the client has its connection."""
        if isinstance(request, protocol.Ping):
            self._relay.reply(route, protocol.Pong() if route.session else protocol.Connected(protocol.VERSION, 0))
            return
        assert isinstance(request, protocol.Join)
        allowed = NO_KEY if self._allow is None else self._allow.find(route.key)
        if allowed is None or request.role not in ("observer", allowed.role):
            text = f"this key may not be used as {request.role}"
            self._relay.reply(route, protocol.Failure(code="denied", text=text))
            return
        session = self._sessions.get(request.session)
        if session and session.key != route.key:
            self._relay.reply(route, protocol.Failure(code="denied", text="this session is another client's"))
            return
        if session and session.connection:  # it came again on this lane, before the loss of the old one was seen
            self._relay.drop(session.connection)
            session = None
        if session is None:
            label = Label(f"{allowed.name or 'tcp'}/{request.client}", 0, _uid(allowed), ROLES[request.role])
            session = self._sessions[request.session] = Session(route.key, label, allowed.name)
        session.routes[route.lane.kind] = route
        route.session = request.session
        if len(session.routes) == 2:
            self._open(request.session, session)

    def _open(self, name: str, session: Session) -> None:
        bulk, express = session.routes[lib.CLAW_LANE_BULK], session.routes[lib.CLAW_LANE_EXPRESS]
        connection = self._relay.open(bulk, express)
        if connection is None:
            del self._sessions[name]
            bulk.session = express.session = ""
            return
        session.connection = connection
        self._count(1)
        connection.key_name = session.key_name
        self._relay.name(connection, name, session.label)
        peer = self._doors[bulk.lane].peer(bulk.fd)
        if peer and not is_loopback(peer):
            session.way = TcpWay(bulk.fd)
            session.sockets = [self._paced(each) for each in (bulk, express)]
            self._core.open_way(connection.number, session.sockets[0].cookie)
            self._core.look_way(connection.number)  # so that its pacers read its row from the first token on
        log.event("client connected", client=session.label.label, address=peer, connection=connection.number)

    def _paced(self, route: Route) -> Paced:
        door, fd = self._doors[route.lane], route.fd
        return Paced(self._shaping, door.cookie(fd), lambda: door.unpace(fd))

    def _count(self, more: int) -> None:
        self._joined += more
        self._core.count_clients(self._joined, far=True)

    def forget(self, route: Route) -> None:
        """This route is gone."""
        if self._by_fd.get((route.lane, route.fd)) is route:
            del self._by_fd[route.lane, route.fd]
            self._doors[route.lane].shut(route.fd)
        session = self._sessions.get(route.session)
        if session and session.routes.get(route.lane.kind) is route:
            del session.routes[route.lane.kind]
            if not session.routes:
                del self._sessions[route.session]

    def dropped(self, connection: Connection) -> None:
        """A client lost its connection: the routes that are left may join again."""
        session = self._sessions.pop(connection.session, None)
        if session:
            self._count(-1)
            log.event("client gone", client=session.label.label, connection=connection.number)
        for route in connection.routes():
            route.session = ""
            route.since_ns = time.monotonic_ns()
            if route.lane.routes.get(route.routing_id) is route:
                self._relay.reply(route, protocol.Connected(protocol.VERSION, 0))

    # --- time ---

    def timeout_ns(self, longest_ns: int) -> int:
        if not self._by_fd:
            return longest_ns
        return min(longest_ns, max(0, self._sweep_ns - time.monotonic_ns()))

    def tick(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._sweep_ns:
            return
        period_ns = min(SWEEP_NS, self.keepalive_ns // 4)
        self._sweep_ns = now_ns + period_ns
        if self._allow is not None and self._allow.refresh():
            for flaw in self._allow.flaws:
                log.warning("key passed over", reason=flaw)
        for door in self._doors.values():
            door.expire(now_ns)
        self._shaping.poll()
        # One period early, so that one who fell silent is found within twice the keepalive and not later
        silent_ns = now_ns - 2 * self.keepalive_ns + period_ns
        for route in list(self._by_fd.values()):
            why = ""
            if self._allow is not None and self._allow.find(route.key) is None:
                why = "key revoked"
            elif route.heard_ns < silent_ns:
                why = "silent"
            elif not route.session and now_ns - route.since_ns >= STRANGER_NS:
                why = "did not join"
            if why:
                log.warning("tcp client dropped", reason=why, session=bool(route.session))
                self._relay.lose(route)
        for session in self._sessions.values():
            if session.connection and session.way:
                self._note(session.connection, session, session.way)

    def _note(self, connection: Connection, session: Session, way: TcpWay) -> None:
        """Whether one copy of a frame is enough on that way; and what its pacers should know where it has no row."""
        bulk = connection.bulk
        if not self._doors[bulk.lane].lives(bulk.fd):
            return
        loss_ppm = self._core.look_way(connection.number)
        if loss_ppm is None:
            told = way.look()
            if told is None:
                return
            loss_ppm = self._core.tell_way(connection.number, told)
        self._pace(connection, session.sockets)
        limit_ppm = self._loss_on_ppm // 2 if session.is_doubled else self._loss_on_ppm
        is_doubled = loss_ppm > limit_ppm
        if is_doubled != session.is_doubled:
            session.is_doubled = is_doubled
            self._core.double(connection.number, is_doubled)
            what = "way loses much, frames go on both lanes" if is_doubled else "way loses little, one lane is enough"
            log.event(what, connection=connection.number, loss_ppm=loss_ppm)

    def _pace(self, connection: Connection, sockets: list[Paced]) -> None:
        """Have the kernel send no faster than its streams need, so that what they do not need is others'."""
        if self._shaping.rows is None and not any(each.is_limited for each in sockets):
            return
        streams, unpaced, token_bytes = self._core.streams_of(connection.number)
        for each in sockets:
            each.pace(0 if unpaced else streams, token_bytes)


def _keys(directory: Path) -> tuple[Pair | None, AllowList | None]:
    """clawd's own pair and who may connect; nothing where there are no keys."""
    if not (directory / SERVER_FILE).exists():
        return None, None
    allow = AllowList(directory)
    allow.refresh()
    return read_pair(directory / SERVER_FILE), allow


def _uid(allowed: Allowed) -> int:
    return UID_BASE | zlib.crc32(allowed.public.encode()) & 0x3FFF_FFFF
