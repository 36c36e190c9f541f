# SPDX-License-Identifier: Apache-2.0
"""Every JSON message on every socket, in one place: encode, decode, validate. The binary ones (hello, attached, data,
flow) are the structs of csrc/ring.cdef.h and csrc/frame.cdef.h. A message is checked here once; what passed is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from clawd.errors import ProtocolError, VersionMismatch
from clawd.field import checked as _checked
from clawd.field import figures as _figures
from clawd.field import flag as _flag
from clawd.field import list_of as _list
from clawd.field import number as _number
from clawd.field import one_of as _one_of
from clawd.field import or_none as _or_none
from clawd.field import place as _place
from clawd.field import record as _record
from clawd.field import table as _table
from clawd.field import text as _text
from clawd.setting import CONGESTION_CONTROLS

VERSION = 1
MESSAGE_MAX = 4096
"""Bytes of a JSON message from a peer."""
ANSWER_MAX = 1 << 17
"""Bytes of clawd's answer to `clawctl`."""
NAME_MAX = 255
"""Bytes of a stream's name, as CLAW_NAME_MAX in csrc/ring.cdef.h."""
ERROR_MAX = 8192
"""Bytes of an error of the configuration: it names files."""
CREDIT_DEFAULT = 262_144
CREDIT_MAX = 1 << 30
WAIT_MS_DEFAULT = 30_000
WAIT_MS_MAX = 3_600_000
ON_GONE = ("keep", "cancel")
GRACE_MS_DEFAULT = 30_000
GRACE_MS_MAX = 3_600_000
DRAIN_MS_MAX = 86_400_000
ROLES = ("consumer", "observer", "admin")
CONTROL_SOCKET = "control.sock"
RELAY_SOCKET = "relay.sock"
"""Both are names inside the runtime directory, so that a peer in another mount namespace finds them too."""

KERNEL_DIR = "/run/clawd-kernel"
KERNEL_SOCKET = "kernel.sock"
LANES = ("express", "bulk")
CONGESTION = ("", *CONGESTION_CONTROLS)
"""What a lane's sockets may be given; the first leaves them what the kernel gave."""
BOOSTS = ("rest", "pressure", "first")
"""Levels of a boost, by number."""
BOOST_LEASE_MS_MAX = 2000
KERNEL_MESSAGE_MAX = 512
"""Bytes of a request to clawd-kernel: a name and a few numbers."""

_id = _number(1, 2**32 - 1)


@dataclass(frozen=True)
class Hello:
    """A local client names itself on the control socket. Answered by `Welcome`."""

    op = "hello"
    version: int = _checked(_number(0, 2**31))
    role: str = _checked(_one_of(*ROLES))
    client: str = _checked(_text(64, 0), "")


@dataclass(frozen=True)
class Welcome:
    """`session` is what the client's attaches carry; it lives as long as this control connection."""

    op = "welcome"
    version: int = _checked(_number(0, 2**31))
    session: str = _checked(_text(64))
    instance: str = _checked(_text(64))


@dataclass(frozen=True)
class CancelStream:
    """End a stream for everybody, on the control socket: for root and clawd's own user. Answered by `StreamCancelled`,
    or by a `Failure` with code `denied`, `unknown` or `gone`.
    """

    op = "cancel_stream"
    stream: str = _checked(_text(NAME_MAX))


@dataclass(frozen=True)
class StreamCancelled:
    op = "stream_cancelled"
    stream: str = _checked(_text(NAME_MAX))


@dataclass(frozen=True)
class SetPace:
    """Pace a stream by `mode` (`off`, `smooth`, `steady`, `default`), or without a stream all that made no choice of
    their own, until the configuration is read again. For root and clawd's own user. Answered by `PaceSet`, or by a
    `Failure` with code `denied` or `unknown`.
    """

    op = "set_pace"
    mode: str = _checked(_text(16))
    stream: str | None = _checked(_or_none(_text(NAME_MAX)), None)


@dataclass(frozen=True)
class PaceSet:
    op = "pace_set"
    mode: str = _checked(_text(16))


@dataclass(frozen=True)
class Settings:
    """Ask which settings are in effect. Answered by `InEffect`."""

    op = "settings"


@dataclass(frozen=True)
class InEffect:
    """`values` as people write them and `origins`, by key. `file` and `flags`: what a reload reads. `error`: why the
    last one failed. `pending_restart`: keys whose new value a restart will bring.
    """

    op = "settings"
    generation: int = _checked(_number(1, 2**63 - 1))
    loaded_ns: int = _checked(_number(0, 2**63 - 1))
    error: str | None = _checked(_or_none(_text(ERROR_MAX)))
    pending_restart: Sequence[str] = _checked(_list(_text(NAME_MAX)))
    file: str | None = _checked(_or_none(_text(4096)))
    flags: Mapping[str, str] = _checked(_table)
    values: Mapping[str, str] = _checked(_table)
    origins: Mapping[str, str] = _checked(_table)


@dataclass(frozen=True)
class Reload:
    """Have clawd read its configuration again: for root and clawd's own user, else `denied`. Answered by `Reloaded`."""

    op = "reload"


@dataclass(frozen=True)
class Reloaded:
    """With `errors` nothing changed."""

    op = "reload"
    generation: int = _checked(_number(1, 2**63 - 1))
    changed: Sequence[str] = _checked(_list(_text(NAME_MAX)))
    pending_restart: Sequence[str] = _checked(_list(_text(NAME_MAX)))
    errors: Sequence[str] = _checked(_list(_text(ERROR_MAX)))


@dataclass(frozen=True)
class Stop:
    """Have clawd end as SIGTERM does: for root and clawd's own user, else `denied`. Answered by `Stopping` at once.

    With `drain_ms` it ends when no stream is live any more, or that much later: until then streams and clients go on,
    and new streams and new producers are refused with `stopping`. With `discard` it leaves nothing for a next start:
    tokens are gone and producers learn that their ring is.
    """

    op = "stop"
    drain_ms: int = _checked(_number(0, DRAIN_MS_MAX), 0)
    discard: bool = _checked(_flag, False)


@dataclass(frozen=True)
class Stopping:
    """`streams` live ones are waited for."""

    op = "stop"
    streams: int = _checked(_number(0, 2**32 - 1))


@dataclass(frozen=True)
class Attach:
    """Read `stream` from after sequence `after` (null: from its first token).

    `id` is the client's own number for this reading and comes back in every segment. `incarnation` must be given with
    `after`. `wait_ms` bounds how long a stream that is not open yet is waited for. `cancel` cancels at once: a cancel
    said before a connection was lost is said again so.

    `on_gone` says what is to become of the stream when this was its last reader and is gone: "keep" it, or "cancel" it
    when nobody has come `grace_ms` later, also before it opened. An observer says "keep": it does not count.
    """

    op = "attach"
    session: str = _checked(_text(64))
    id: int = _checked(_id)
    stream: str = _checked(_text(NAME_MAX))
    after: int | None = _checked(_or_none(_number(-1, 2**63 - 1)), None)
    incarnation: int | None = _checked(_or_none(_number(0, 2**32 - 1)), None)
    credit: int = _checked(_number(1, CREDIT_MAX), CREDIT_DEFAULT)
    wait_ms: int = _checked(_number(0, WAIT_MS_MAX), WAIT_MS_DEFAULT)
    cancel: bool = _checked(_flag, False)
    on_gone: str = _checked(_one_of(*ON_GONE), "keep")
    grace_ms: int = _checked(_number(0, GRACE_MS_MAX), GRACE_MS_DEFAULT)


@dataclass(frozen=True)
class Join:
    """A client on another host says on each lane whose it is: `session` is a secret of its own, the same on both. With
    both lanes joined clawd answers `Connected`. What it may do is decided by the key it came with.
    """

    op = "join"
    version: int = _checked(_number(0, 2**31))
    role: str = _checked(_one_of(*ROLES))
    session: str = _checked(_text(64, 16))
    client: str = _checked(_text(64, 0), "")


@dataclass(frozen=True)
class Detach:
    """Stop reading; the stream itself goes on."""

    op = "detach"
    id: int = _checked(_id)


@dataclass(frozen=True)
class Cancel:
    """End the stream of this attachment for everybody, also before it opened. Idempotent."""

    op = "cancel"
    id: int = _checked(_id)


@dataclass(frozen=True)
class Ping:
    op = "ping"


@dataclass(frozen=True)
class Pong:
    op = "pong"


@dataclass(frozen=True)
class Capabilities:
    """Ask clawd-kernel what it may do. Answered by `Abilities`; like `Ping`, for root and clawd's own user."""

    op = "capabilities"
    version: int = _checked(_number(0, 2**31))


@dataclass(frozen=True)
class Abilities:
    """`abilities` by name: empty when it may, else why not."""

    op = "capabilities"
    version: int = _checked(_number(0, 2**31))
    abilities: Mapping[str, str] = _checked(_table)


@dataclass(frozen=True)
class SetLane:
    """Have clawd-kernel shape what is accepted on `port`, as long as this connection lasts. `pacing` in bytes a second,
    `lowat` in bytes; zero leaves an option as the kernel has it. Answered by `Shaping`.
    """

    op = "set_lane"
    port: int = _checked(_number(1, 65535))
    lane: str = _checked(_one_of(*LANES))
    pacing: int = _checked(_number(0, 2**40), 0)
    lowat: int = _checked(_number(0, 2**30), 0)
    priority: int = _checked(_number(0, 15), 0)
    dscp: int = _checked(_number(0, 63), 0)
    thin: bool = _checked(_flag, False)
    congestion: str = _checked(_one_of(*CONGESTION), "")


@dataclass(frozen=True)
class Shape:
    """Ask clawd-kernel what it shapes. Answered by `Shaping`."""

    op = "shape"


@dataclass(frozen=True)
class Shaping:
    """`state` is `attached`, or `off` with the `reason`. `policies`: what lanes ask for, and `missing` what of
    it this kernel has not. `others`: ids of programs that run beside it. `unpinned`: why it
    would end with a clawd-kernel that is killed. `devices` on which packets are marked, `unmarked` why not on more,
    `ahead` what runs there before it; `pacers` who holds paced packets back, by device: `fq`, or the sockets' `tcp`;
    `classes` which class of its queue express packets go to. `unshaped`: sockets that are older than it.
    """

    op = "shaping"
    state: str = _checked(_text(16))
    reason: str | None = _checked(_or_none(_text(ERROR_MAX)))
    cgroup: str = _checked(_text(4096))
    since_ns: int | None = _checked(_or_none(_number(0, 2**63 - 1)))
    is_proved: bool = _checked(_flag)
    unpinned: str | None = _checked(_or_none(_text(ERROR_MAX)))
    headers: str | None = _checked(_or_none(_text(256)))
    lanes: int = _checked(_number(0, 65535))
    others: Sequence[int] = _checked(_list(_number(0, 2**32 - 1)))
    devices: Sequence[str] = _checked(_list(_text(64)))
    unmarked: str | None = _checked(_or_none(_text(ERROR_MAX)))
    ahead: Sequence[str] = _checked(_list(_text(256)))
    pacers: Mapping[str, str] = _checked(_table)
    counters: Mapping[str, int] = _checked(_figures)
    policies: Sequence[Mapping[str, int | str]] = _checked(_list(_record), ())
    missing: Sequence[str] = _checked(_list(_text(ERROR_MAX)), ())
    classes: Mapping[str, str] | None = _checked(_or_none(_table), None)
    unshaped: int = _checked(_number(0, 2**31), 0)


@dataclass(frozen=True)
class Rows:
    """Ask clawd-kernel for what the shaper knows of each socket. Answered by `SocketRows`."""

    op = "rows"


@dataclass(frozen=True)
class SocketRows:
    """With two descriptors when there are `entries`: arrays to be mapped, of rows and of what is wanted for the socket
    of the same place, which the receiver writes. The layouts are name, offset and bytes of each number.
    """

    op = "rows"
    entries: int = _checked(_number(0, 2**20))
    row_bytes: int = _checked(_number(0, 4096), 0)
    want_bytes: int = _checked(_number(0, 4096), 0)
    row: Sequence[Sequence[Any]] = _checked(_list(_place), ())
    want: Sequence[Sequence[Any]] = _checked(_list(_place), ())


@dataclass(frozen=True)
class SetBoost:
    """Have clawd-kernel weigh clawd's slices by `level` of BOOSTS for `lease_ms` from now on, while this connection
    lasts. The rest is why: so many first tokens waited for, so short of processor time. Answered by `Boosting`.
    """

    op = "set_boost"
    level: int = _checked(_number(0, 2))
    lease_ms: int = _checked(_number(0, BOOST_LEASE_MS_MAX))
    waiting: int = _checked(_number(0, 2**32 - 1), 0)
    pressure: int = _checked(_number(0, 3), 0)


@dataclass(frozen=True)
class Boosts:
    """Ask clawd-kernel how clawd's slices weigh, answered by `Boosting`; ask clawd what it asks for: `Urgency`."""

    op = "boosts"


@dataclass(frozen=True)
class Boosting:
    """`state` is one of BOOSTS, or `off` with the `reason`. `weights` by slice as they are, `resting` what they go back
    to, `kept` by slice why it is left alone. `asked`: pid, uid, level, waiting, pressure of whose lease runs.
    `limited`: times a change was put off, as too many would have been written in a second.
    """

    op = "boosts"
    state: str = _checked(_text(16))
    reason: str | None = _checked(_or_none(_text(ERROR_MAX)))
    weights: Mapping[str, int] = _checked(_figures)
    resting: Mapping[str, int] = _checked(_figures)
    kept: Mapping[str, str] = _checked(_table)
    asked: Sequence[Sequence[int]] = _checked(_list(_list(_number(0, 2**63 - 1))))
    writes: int = _checked(_number(0, 2**63 - 1))
    limited: int = _checked(_number(0, 2**63 - 1))


@dataclass(frozen=True)
class Urgency:
    """What clawd asks clawd-kernel for, `level` of BOOSTS; `reason`: why that comes to nothing. `some_permille` of its
    time this host had work that waited for a processor, and each of clawd's threads waited `wait_us` each time, lately;
    None: not known, `unseen` says why. `pressure` is what became of it.
    """

    op = "urgency"
    level: int = _checked(_number(0, 2))
    waiting: int = _checked(_number(0, 2**32 - 1))
    pressure: int = _checked(_number(0, 3))
    reason: str | None = _checked(_or_none(_text(ERROR_MAX)))
    some_permille: int | None = _checked(_or_none(_number(0, 1000)))
    wait_us: int | None = _checked(_or_none(_number(0, 2**63 - 1)))
    unseen: str | None = _checked(_or_none(_text(ERROR_MAX)))


@dataclass(frozen=True)
class Connected:
    """clawd's answer to a relay connection that announced itself: attach (again) now. By tcp a lane that announced
    itself gets `connection` 0: join now. `keepalive_ms`: say something on each lane at least so often; 0: no need.
    """

    op = "connected"
    version: int = _checked(_number(0, 2**31))
    connection: int = _checked(_number(0, 2**32 - 1))
    keepalive_ms: int = _checked(_number(0, 2**31), 0)


@dataclass(frozen=True)
class Failure:
    """A request was refused. `id` names the attachment it is about; 0 = the connection."""

    op = "error"
    code: str = _checked(_text(64))
    text: str = _checked(_text(1024, 0))
    id: int = _checked(_number(0, 2**32 - 1), 0)


Message = (
    Hello
    | Welcome
    | CancelStream
    | StreamCancelled
    | SetPace
    | PaceSet
    | Settings
    | InEffect
    | Reload
    | Reloaded
    | Stop
    | Stopping
    | Attach
    | Join
    | Detach
    | Cancel
    | Ping
    | Pong
    | Capabilities
    | Abilities
    | SetLane
    | Shape
    | Shaping
    | Rows
    | SocketRows
    | SetBoost
    | Boosts
    | Boosting
    | Urgency
    | Connected
    | Failure
)
M = TypeVar("M", bound=Message)

CONTROL_REQUESTS: tuple[type[Message], ...] = (Hello, CancelStream, SetPace, Settings, Boosts, Reload, Stop)
RELAY_REQUESTS: tuple[type[Message], ...] = (Attach, Detach, Cancel, Ping)
KERNEL_REQUESTS: tuple[type[Message], ...] = (Ping, Capabilities, SetLane, Shape, Rows, SetBoost, Boosts)
JOIN_REQUESTS: tuple[type[Message], ...] = (Join, Ping)
RELAY_REPLIES: tuple[type[Message], ...] = (Connected, Failure, Pong)


def encode(message: Message) -> bytes:
    """The message as one JSON object."""
    values = {row.name: getattr(message, row.name) for row in fields(message)}
    return json.dumps({"op": message.op, **values}, separators=(",", ":")).encode()


def decode(packet: bytes, allowed: tuple[type[M], ...], longest: int = MESSAGE_MAX) -> M:
    """Parse and check one JSON message. Raises ProtocolError naming the first thing that is wrong, VersionMismatch when
    the message says that its sender has another version: then nothing else of it is looked at.
    """
    if len(packet) > longest:
        raise ProtocolError(f"message of {len(packet)} bytes is longer than {longest}")
    try:
        values = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("message is not JSON") from error
    if type(values) is not dict:
        raise ProtocolError("message is not a JSON object")
    op = values.pop("op", None)
    kind = next((kind for kind in allowed if kind.op == op), None)
    if kind is None:
        raise ProtocolError(f"no such operation here: {str(op)[:40]!r}")
    rows = {row.name: row for row in fields(kind)}
    theirs = values.get("version") if "version" in rows else VERSION
    if type(theirs) is int and theirs != VERSION and 0 <= theirs < 2**31:
        raise VersionMismatch(theirs, VERSION)
    for name in values:
        if name not in rows:
            raise ProtocolError(f'"{op}" has no field {name[:40]!r}')
    for name, row in rows.items():
        if name not in values:
            if row.default is MISSING:
                raise ProtocolError(f'"{op}" lacks field "{name}"')
        elif not row.metadata["check"](values[name]):
            raise ProtocolError(f'"{op}" has a bad value for "{name}"')
    return kind(**values)
