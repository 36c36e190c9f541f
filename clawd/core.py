# SPDX-License-Identifier: Apache-2.0
"""The only importer of the built core. Long calls go through cffi, which gives up the GIL; the short producer calls go
through `held`, the same library by ctypes.PyDLL, which keeps it: giving it up costs up to a 5 ms switch interval.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clawd._core import ffi as ffi  # type: ignore[import-not-found]
from clawd._core import lib as lib
from clawd.errors import CoreError

TAGS_MAX = 64
"""Readable descriptors told at once."""
OPAQUE = {"claw_core", "claw_producer", "claw_view"}
"""Structs that Python knows by pointer only."""


def _sweep() -> None:
    # cffi compares a struct's layout with the compiler's only at first use; a mismatch must stop the import instead
    for name in ffi.list_types()[1]:
        if name not in OPAQUE:
            ffi.sizeof(f"struct {name}")


_sweep()

held: Any = ctypes.PyDLL(__import__("clawd._core", fromlist=["__file__"]).__file__)


def check(result: int, what: str) -> int:
    """Pass a count through; turn -errno into a CoreError that says what was tried."""
    if result < 0:
        raise CoreError(f"cannot {what}: {os.strerror(-result)} ({errno.errorcode.get(-result, result)})", -result)
    return result


def guard() -> None:
    """Survive producers that truncate their rings: a SIGBUS handler, tried once. Raises CoreError when it fails.

    Call it last: a `faulthandler.enable()` after it would take its place.
    """
    check(lib.claw_guard_install(), "guard against truncated rings")


@dataclass(frozen=True)
class Limits:
    """What a core holds at most; the names are those of struct claw_limits."""

    spool_bytes: int
    stream_bytes: int
    keep_ns: int
    max_streams: int
    max_rings: int
    max_connections: int
    max_attachments: int
    user_streams: int = 0
    """Live ones; 0: as many as there may be."""
    user_attachments: int = 0


def page_bytes(limits: Limits) -> int:
    """How large the page of such a core is. Raises CoreError when it would be too large."""
    size = int(lib.claw_page_bytes(limits.max_streams, limits.max_rings, limits.max_connections))
    return size or check(-errno.EFBIG, "show so many streams")


@dataclass(frozen=True)
class Label:
    """Who is at the other end of a ring or a connection, for the page. `label` is what the peer says of itself."""

    label: str
    pid: int
    uid: int
    role: int

    def row(self) -> Any:
        label = self.label.encode()
        room = int(lib.claw_page_cut(label, len(label), lib.CLAW_PAGE_LABEL))
        return ffi.new(
            "struct claw_page_peer *",
            {
                "since_ns": time.monotonic_ns(),
                "pid": max(self.pid, 0),  # 0: in a namespace that cannot be seen from here
                "uid": self.uid,
                "role": self.role,
                "label_len": room,
                "label": label[:room],
            },
        )


PACE_MODES = {
    "default": lib.CLAW_PACE_DEFAULT,
    "off": lib.CLAW_PACE_OFF,
    "smooth": lib.CLAW_PACE_SMOOTH,
    "steady": lib.CLAW_PACE_STEADY,
}


@dataclass(frozen=True)
class Pace:
    """How to pace: a struct claw_pace. Times in ns, rates in tokens a 1,000 s."""

    max_delay_ns: int
    timeout_ns: int
    prefetch: int
    bucket: int
    refill_rate: int
    leak_rate: int
    burst_rate: int
    burst: int


class Told(NamedTuple):
    """What the kernel says of a connection at some time: its round trip and that one's mean deviation, smoothed; how
    many segments it sent, and how many of them again. The names are those of struct claw_told.
    """

    at_ns: int
    rtt_us: int
    jitter_us: int
    segments: int
    again: int


class Core:
    """The daemon's half of the core: rings, spool, outbox, one turn at a time. Not thread-safe."""

    def __init__(self, limits: Limits, page_fd: int = -1) -> None:
        """`page_fd` is an object of `page_bytes(limits)` for the figures; it may be closed after."""
        error = ffi.new("int *")
        self._core = lib.claw_core_create(ffi.new("struct claw_limits *", vars(limits)), page_fd, error)
        if not self._core:
            check(error[0], "make the core")
        self._clients = [0, 0]
        self._tags = ffi.new("uint32_t[]", TAGS_MAX)
        self._frames = lib.claw_frames(self._core)
        self._events = lib.claw_events(self._core)
        self._row = ffi.new("struct claw_stream_row *")
        self._unmet = ffi.new("struct claw_unmet[64]")
        self.out = memoryview(ffi.buffer(lib.claw_out(self._core), lib.CLAW_OUT_BYTES))
        """The frames of the last turn."""
        self.outcome = lib.claw_outcome(self._core)
        """struct claw_outcome of the last turn."""

    def close(self) -> None:
        """Unmap everything. The objects in shared memory stay."""
        core, self._core = self._core, None
        if core:
            self.out.release()
            lib.claw_core_destroy(core)

    def publish(self, epoch: int, started_ns: int, version: str, runtime_dir: str | os.PathLike[str]) -> None:
        """From now on others can read the page."""
        where = os.fsencode(os.path.abspath(runtime_dir))
        lib.claw_core_publish(self._core, os.getpid(), epoch, started_ns, version.encode(), where)

    def label_ring(self, ring: int, peer: Label) -> None:
        check(lib.claw_ring_label(self._core, ring, peer.row()), "name a producer")

    def label_connection(self, connection: int, peer: Label) -> None:
        check(lib.claw_connection_label(self._core, connection, peer.row()), "name a client")

    def count_clients(self, count: int, *, far: bool = False) -> None:
        """How many there are: of this host, or `far`, of others."""
        self._clients[far] = count
        lib.claw_core_clients(self._core, sum(self._clients))

    def map_spool(self, fd: int, size: int) -> None:
        check(lib.claw_core_map_spool(self._core, fd, size), "map the spool")

    def recover(self) -> Any:
        """Take over what the spool's objects hold, once all are mapped: a struct claw_recovered."""
        found = ffi.new("struct claw_recovered *")
        check(lib.claw_core_recover(self._core, time.monotonic_ns(), found), "take over the spool")
        return found

    def limit(self, *, stream_bytes: int, keep_ns: int) -> None:
        """Change these two while it runs, also for the streams that are there."""
        check(lib.claw_core_limit(self._core, stream_bytes, keep_ns), "change the limits")

    def pace(self, mode: str, pace: Pace) -> None:
        """Pace streams so from now on: `mode` those that made no choice of their own."""
        row = ffi.new("struct claw_pace *", vars(pace))
        check(lib.claw_core_pace(self._core, PACE_MODES[mode], row), "pace streams so")

    def pace_stream(self, name: bytes, mode: str) -> bool:
        """Pace one stream so, `default` as all others. False: there is none of this name."""
        return bool(lib.claw_core_pace_stream(self._core, name, len(name), PACE_MODES[mode]) == 0)

    def pressure(self, level: int) -> None:
        """Tell every engine how short the host is of processor time: 0 not … 3 most."""
        check(lib.claw_core_pressure(self._core, level), "tell the pressure")

    def boost(self, level: int, run_delay_ns: int) -> None:
        """Show the CLAW_BOOST_ level that is asked for, and how long clawd's threads waited for a processor so far."""
        lib.claw_core_boost(self._core, level, run_delay_ns)

    def map_rows(self, fd: int, layout: dict[str, int]) -> None:
        """Read what the kernel says of sockets there, laid out as a struct claw_rows_layout says."""
        row = ffi.new("struct claw_rows_layout *", layout)
        check(lib.claw_rows_map(self._core, fd, row), "map the rows of sockets")

    def unmap_rows(self) -> None:
        lib.claw_rows_unmap(self._core)

    def open_way(self, connection: int, cookie: int = 0) -> None:
        """This connection goes to another host, by the socket of this cookie."""
        check(lib.claw_way_open(self._core, connection, cookie), "note a client's way")

    def look_way(self, connection: int) -> int | None:
        """How many of a million segments to it were sent again lately, by its row; None: it has none."""
        found = lib.claw_way_look(self._core, connection, time.monotonic_ns())
        return None if found == -errno.ENODATA else check(found, "look at a client's way")

    def tell_way(self, connection: int, told: Told) -> int:
        """The same, by what somebody else knows."""
        row = ffi.new("struct claw_told *", told)
        return check(lib.claw_way_tell(self._core, connection, row, time.monotonic_ns()), "note a client's way")

    def streams_of(self, connection: int) -> tuple[int, int, int]:
        """How many live streams a client reads, how many of them no pacer spreads, and what a token of each takes in a
        frame, in bytes, all together.
        """
        unpaced, size = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        streams = check(lib.claw_connection_streams(self._core, connection, unpaced, size), "count its streams")
        return streams, unpaced[0], size[0]

    def drain(self) -> None:
        """From now on no stream opens: the engine is told `stopping`. Those that live go on."""
        lib.claw_core_drain(self._core)

    def watch(self, fd: int, tag: int) -> None:
        """Have `wait` return `tag`, above 0, while `fd` is readable."""
        check(lib.claw_core_watch(self._core, fd, tag), "watch a descriptor")

    def unwatch(self, fd: int) -> None:
        check(lib.claw_core_unwatch(self._core, fd), "stop watching a descriptor")

    def wait(self, timeout_ns: int) -> list[int]:
        """Sleep until there is something to do, at most `timeout_ns`. Returns the tags of readable descriptors."""
        return self._told(lib.claw_wait(self._core, timeout_ns, self._tags, TAGS_MAX))

    def next(self, timeout_ns: int) -> Sequence[int]:
        """As `wait`; returns nothing when a turn was made, or when a signal cut the sleep short."""
        count = lib.claw_next(self._core, timeout_ns, self._tags, TAGS_MAX)
        return self._told(count) if count else ()

    def _told(self, count: int) -> list[int]:
        if count == -errno.EINTR:
            return []
        return list(self._tags[0 : check(count, "wait")])

    def turn(self, now_ns: int | None = None) -> bool:
        """One turn, as of now unless told otherwise. True: there is more to do at once."""
        return bool(lib.claw_turn(self._core, time.monotonic_ns() if now_ns is None else now_ns))

    def frames(self) -> list[tuple[int, int, int]]:
        """What to send after a turn: (connection, offset in `out`, length)."""
        count = self.outcome.frame_count
        if count == 1:  # the usual case between two tokens
            frame = self._frames
            return [(frame.connection, frame.offset, frame.len)]
        return [(frame.connection, frame.offset, frame.len) for frame in self._frames[0:count]] if count else []

    def events(self) -> list[tuple[int, int, int, int]]:
        """What to log since it was last asked, of turns and of calls between them: (kind, stream, ring, detail)."""
        count = self.outcome.event_count
        if not count:
            return []
        self.outcome.event_count = 0
        return [(event.kind, event.stream, event.ring, event.detail) for event in self._events[0:count]]

    def sent(self, frame: memoryview | bytes, sent_ns: int) -> None:
        """Account the tokens of a frame that went out."""
        lib.claw_sent(self._core, ffi.from_buffer(frame), len(frame), sent_ns)

    def sent_frame(self, number: int, sent_ns: int) -> None:
        """As `sent`, for the frame that stands there in `frames()`."""
        lib.claw_sent_frame(self._core, number, sent_ns)

    def add_ring(self, data_fd: int, ctl_fd: int, event_fd: int, ring_bytes: int, ring_id: int, epoch: int) -> int:
        ring = lib.claw_ring_add(self._core, data_fd, ctl_fd, event_fd, ring_bytes, ring_id, epoch)
        return check(ring, "map a ring")

    def adopt_ring(self, data_fd: int, ctl_fd: int, ring_bytes: int, ring_id: int, epoch: int) -> int:
        """Take over a ring of an earlier clawd, and the streams from it that `recover` found."""
        now_ns = time.monotonic_ns()
        ring = lib.claw_ring_adopt(self._core, data_fd, ctl_fd, ring_bytes, ring_id, epoch, now_ns)
        return check(ring, "take over a ring")

    def hear_ring(self, ring: int, event_fd: int) -> None:
        """The producer of an adopted ring attached again, and signals there from now on."""
        check(lib.claw_ring_hear_again(self._core, ring, event_fd), "listen to a ring")

    def end_orphans(self, ring_id: int, reason: str) -> int:
        """End the streams that wait for this ring; 0: for any, because no more are adopted. Returns how many."""
        return int(lib.claw_orphans_end(self._core, ring_id, reason.encode(), time.monotonic_ns()))

    def leave_ring(self, ring: int) -> None:
        """Its producer is gone: take what is left, then end its streams."""
        check(lib.claw_ring_leave(self._core, ring), "leave a ring")

    def drop_ring(self, ring: int) -> None:
        check(lib.claw_ring_drop(self._core, ring), "drop a ring")

    def ring_row(self, ring: int) -> Any:
        """A struct claw_ring_row."""
        row = ffi.new("struct claw_ring_row *")
        check(lib.claw_ring_row(self._core, ring, row), "look at a ring")
        return row

    def connect(self) -> int:
        """A new connection's number, 0 when there is no room."""
        return int(lib.claw_connect(self._core))

    def open_lanes(self, connection: int) -> None:
        """This new connection has an express lane, too."""
        check(lib.claw_lanes_open(self._core, connection), "open lanes")

    def double(self, connection: int, on: bool) -> None:
        """Have all its frames go on both lanes, or no more."""
        check(lib.claw_lanes_double(self._core, connection, on), "send on both lanes")

    def express_flow(self, connection: int, message: bytes) -> bool:
        """Take a flow message that came by the express lane. False: it breaks a rule."""
        return bool(lib.claw_lanes_flow(self._core, connection, message, len(message)) == 0)

    def lanes(self, number: int) -> int:
        """CLAW_LANE_… of the frame that stands there in `frames()`."""
        return int(self._frames[number].lanes)

    def disconnect(self, connection: int) -> None:
        check(lib.claw_disconnect(self._core, connection, time.monotonic_ns()), "disconnect")

    def block(self, connection: int, blocked: bool) -> None:
        """Say whether the connection's socket takes frames."""
        check(lib.claw_block(self._core, connection, blocked), "block a connection")

    def flow(self, connection: int, message: bytes) -> bool:
        """Take a flow message. False: it breaks a rule."""
        return bool(lib.claw_flow(self._core, connection, message, len(message)) == 0)

    def attach(
        self,
        connection: int,
        id: int,
        name: bytes,
        *,
        after: int = -1,
        incarnation: int | None = None,
        credit: int,
        deadline_ns: int = 0,
        cancel: bool = False,
        observes: bool = False,
        grace_ms: int = 0,
        admitted: bool = False,
    ) -> int:
        """0 reads, 1 awaits the stream's opening, or -errno as told at claw_attach_stream in turn.cdef.h."""
        buffer = ffi.from_buffer(name)
        attach = ffi.new(
            "struct claw_attach *",
            {
                "name": buffer,
                "name_len": len(name),
                "id": id,
                "after": after,
                "credit": credit,
                "incarnation": incarnation or 0,
                "has_incarnation": incarnation is not None,
                "cancel": cancel,
                "observes": observes,
                "grace_ms": grace_ms,
                "admitted": admitted,
                "deadline_ns": deadline_ns,
            },
        )
        return int(lib.claw_attach_stream(self._core, connection, attach, time.monotonic_ns()))

    def readers(self, name: bytes) -> str | None:
        """Whom a stream is for; None: for everybody, or there is none to be read."""
        return self._readers_of(lib.claw_stream_index(self._core, name, len(name)))

    def _readers_of(self, stream: int) -> str | None:
        room = ffi.new("uint8_t[]", lib.CLAW_READERS_MAX)
        length = lib.claw_stream_readers(self._core, stream, room)
        return text(room, length) if length else None

    def unproven(self) -> list[tuple[int, int, str]]:
        """Attachments that came before their stream opened, with whom that is for: admit or deny each."""
        rows = ffi.new("struct claw_unproven[64]")
        found = []
        for row in rows[0 : lib.claw_unproven(self._core, rows, len(rows))]:
            found.append((int(row.connection), int(row.id), self._readers_of(row.stream) or "none"))
        return found

    def admit(self, connection: int, id: int, allowed: bool) -> None:
        """Whether this attachment may read its stream. One that may not is gone."""
        verdict = lib.claw_admit if allowed else lib.claw_deny
        check(verdict(self._core, connection, id, time.monotonic_ns()), "admit a reader")

    def detach(self, connection: int, id: int) -> bool:
        return bool(lib.claw_detach(self._core, connection, id, time.monotonic_ns()))

    def cancel(self, connection: int, id: int) -> bool:
        """False: there is no such attachment (any more)."""
        return bool(lib.claw_cancel(self._core, connection, id, time.monotonic_ns()) == 0)

    def cancel_stream(self, name: bytes) -> int:
        """End a stream for everybody. 0, or -ENOENT: none is open, -ESTALE: it ended before."""
        return int(lib.claw_cancel_stream(self._core, name, len(name), time.monotonic_ns()))

    def unmet(self) -> list[tuple[int, int]]:
        """Attachments, as (connection, id), that waited in vain and were taken out."""
        if not self.outcome.unmet_ns:
            return []
        count = lib.claw_unmet(self._core, time.monotonic_ns(), self._unmet, len(self._unmet))
        return [(self._unmet[i].connection, self._unmet[i].id) for i in range(count)]

    def refresh_totals(self) -> Any:
        """The struct claw_totals, all of its counters up to date."""
        return lib.claw_totals(self._core)

    def quantiles(self, which: int, shares: tuple[float, ...]) -> tuple[int, list[int]]:
        """(count, values in ns) of one of the CLAW_HIST_ histograms."""
        hist = lib.claw_hist(self._core, which)
        return int(hist.count), [int(lib.claw_hist_quantile(hist, share)) for share in shares]

    def stream_row(self, stream: int) -> Any:
        """The struct claw_stream_row of a slot, until the next call; None when it is free."""
        return self._row if lib.claw_stream_at(self._core, stream, self._row) == 0 else None

    def stream_name(self, stream: int) -> str:
        """The name of a stream in an event, empty when the slot is free again."""
        row = self.stream_row(stream)
        return "" if row is None else text(row.name, row.name_len)


def text(field: Any, length: int) -> str:
    """A name or reason from a struct: UTF-8 as the core checked it, though a page may hold anything."""
    return bytes(ffi.buffer(field, length)).decode(errors="replace")
