# SPDX-License-Identifier: Apache-2.0
"""Wires the daemon together and turns it: wait, turn, send, receive."""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clawd import __version__, log, protocol, sd
from clawd.config import PACES, Config
from clawd.core import Core, Limits, Pace, guard, lib, page_bytes, text
from clawd.descriptors import RELAY_SLACK, files_needed
from clawd.errors import HostError
from clawd.page import stats_name
from clawd.server import memory, recovery
from clawd.server.far import Far
from clawd.server.instance import Instance
from clawd.server.registry import Registry
from clawd.server.relay import Relay
from clawd.server.settings import Settings
from clawd.server.urgency import Urgency
from clawd.signals import caught
from clawd.sources import Configuration, Sources
from clawd.units import format_bytes

SPOOL_OBJECT_BYTES = 256 << 20
"""A larger spool is cut into objects of this size."""
SPOOL_SHARE = 4
"""The spool may take one part in so many of the shared memory that is free."""
FEWEST_CONNECTIONS = 8
"""Of clients, also where there are not the descriptors for them."""
STOP_NS = 1_000_000_000
"""How long the last pass over the rings may take."""
BEAT_NS = 1_000_000_000
"""A turn comes at least so often: readers of the page know by it that clawd lives."""
STOP_QUIET_NS = 300_000_000
"""How long clients get to take what was sent, and to ack it: libzmq drops what they have not read from a connection
that ends.
"""

ABNORMAL = ("cancelled", "producer_lost")
"""Ends that clawd gave a stream; the engine's own errors start with "error"."""
REFUSED = {
    lib.CLAW_STOPPED_EXISTS: "exists",
    lib.CLAW_STOPPED_LIMIT: "limit",
    lib.CLAW_STOPPED_NO_SPACE: "no_space",
    lib.CLAW_STOPPED_DRAINING: "stopping",
}


def serve(configuration: Configuration, sources: Sources) -> int:
    """Run the daemon until SIGTERM or SIGINT. Raises ClawdError when it cannot start."""
    config = configuration.config
    with Instance(config.runtime_dir) as instance:
        raise_descriptor_limit(config)
        left = recovery.find(instance)
        if left.spool_bytes > config.spool_bytes:
            log.warning(
                "spool is larger than configured, going on",
                spool_bytes=format_bytes(left.spool_bytes),
                hint="to make it smaller: clawctl stop --discard, then start",
            )
        check_room(config.spool_bytes - left.spool_bytes)
        limits = Limits(
            spool_bytes=max(config.spool_bytes, left.spool_bytes),
            stream_bytes=config.stream_bytes,
            keep_ns=config.keep,
            max_streams=config.max_streams,
            max_rings=max(config.max_producers, len(left.rings)),
            max_connections=config.max_clients,
            max_attachments=config.max_attachments,
            user_streams=config.user_streams,
            user_attachments=config.user_attachments,
        )
        epoch = memory.random_id()
        with shown(instance.id, limits) as core:
            recovery.make_spool(core, instance, left, limits.spool_bytes, SPOOL_OBJECT_BYTES)
            adopted = recovery.recover(core, left, epoch)
            loop = Loop(core, Settings(configuration, sources), instance, epoch, adopted)
            loop.run()
        if loop.is_discarding:
            log.event("discarded", objects=recovery.discard(instance.id))
    return 0


@contextmanager
def shown(instance: str, limits: Limits) -> Iterator[Core]:
    """A core whose figures others can read as long as it runs."""
    page = memory.create(f"/{stats_name(instance)}", page_bytes(limits), mode=0o640, setting="max_streams")
    try:
        core = Core(limits, page.fd)
        try:
            yield core
        finally:
            core.close()
    finally:
        page.close()
        page.unlink()


def raise_descriptor_limit(config: Config) -> None:
    """As far as the host allows. One below what the settings may need is said: libzmq ends clawd when it is met."""
    need = files_needed(config.max_producers, config.max_clients, len(config.tcp_listen))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < need:
        log.warning("too few descriptors, going on", limit=soft, need=need, hint="lower max_clients or raise ulimit -n")


def relay_room(config: Config) -> tuple[int, int]:
    """Connections that the relay's socket may have, of one user and in all: less where descriptors are few."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    missing = max(0, files_needed(config.max_producers, config.max_clients, len(config.tcp_listen)) - limit)
    total = max(FEWEST_CONNECTIONS, config.max_clients + RELAY_SLACK - missing)
    return min(config.user_clients + RELAY_SLACK, total), total


def check_room(size: int) -> None:
    """Raise HostError when the host has not four times the memory that the spool still needs."""
    free = memory.room()
    if size > free // SPOOL_SHARE:
        raise HostError(
            f"a spool of {format_bytes(size)} is more than a quarter of the shared memory that is free,"
            f" {format_bytes(free)}",
            f"lower spool_bytes or make {memory.SHM} larger",
        )


class Loop:
    """The one thread of the daemon."""

    def __init__(
        self, core: Core, settings: Settings, instance: Instance, epoch: int, adopted: recovery.Adopted
    ) -> None:
        self._core = core
        self._settings = settings
        self._instance = instance
        self._stopping = False
        self.is_discarding = False
        """The one who had it stopped wants nothing to be left."""
        self._drain_until_ns = 0
        self._received = False
        self._epoch = epoch
        core.pace(settings.config.pace, pace_of(settings.config))
        self._registry = Registry(core, settings.config, instance, epoch, adopted, self._answer)
        self._relay = Relay(core, self._registry.sessions, *relay_room(settings.config))
        self._far: Far | None = None
        self._urgency = Urgency(core, settings.config)

    def run(self) -> None:
        """Serve until a signal says stop."""
        with self._signals():
            self._relay.listen(self._instance.relay_path)
            if self._settings.config.tcp_listen:
                self._far = Far(self._core, self._relay, self._settings.config)
                self._relay.add_far(self._far, self._far.lanes)
                for fd, ready in self._far.watches():
                    self._registry.watch(fd, ready)
            self._registry.listen(self._instance.control_path)
            self._registry.watch(self._relay.fd, lambda: None)
            self._registry.watch(self._relay.door_fd, self._relay.wake)
            self._core.publish(self._epoch, time.monotonic_ns(), __version__, self._instance.runtime_dir)
            log.event("ready", runtime_dir=self._instance.runtime_dir, instance=self._instance.id, pid=os.getpid())
            guard()  # the last handler to be installed
            reason = sd.ready()
            if reason:
                log.warning("systemd not told, going on without", reason=reason)
            heart = sd.Heart()
            while not self._stopping:
                if not self._drain_until_ns:
                    self._once(BEAT_NS)
                else:
                    self._drain()
                heart.turned()
            self._stop()

    def _once(self, longest_ns: int) -> bool:
        """One pass. True: it left something to do at once."""
        core, registry, relay = self._core, self._registry, self._relay
        tags = core.next(0 if self._received else relay.timeout_ns(self._urgency.timeout_ns(longest_ns)))
        if tags:
            for tag in tags:
                registry.dispatch(tag)
            core.turn()
        # Before all else: this is what somebody waits for
        if core.outcome.frame_count:
            relay.send_frames()
        self._urgency.step()
        more = bool(core.outcome.more)
        if core.outcome.event_count:
            self._log_events()
        registry.settle_rings()
        relay.tick(registry.ended_sessions)
        # Last before sleeping: a send may have swallowed the wake-up for what came in meanwhile
        self._received = relay.receive()
        return more or self._received

    def _drain(self) -> None:
        """One pass that stops clawd when no stream is live any more, or time is up."""
        left_ns = self._drain_until_ns - time.monotonic_ns()
        more = self._once(max(0, min(BEAT_NS, left_ns)))
        if left_ns <= 0 or not (more or self._core.refresh_totals().streams_live):
            self._stopping = True

    def _log_events(self) -> None:
        for kind, stream, ring, detail in self._core.events():
            owned = self._registry.rings.get(ring)
            values: dict[str, Any] = {
                "stream": self._core.stream_name(stream) or None,
                "producer": owned and owned.owner.label,
            }
            if kind == lib.CLAW_EVENT_REFUSED:
                log.warning("stream refused", **values, reason=REFUSED.get(detail, detail))
            elif kind == lib.CLAW_EVENT_OPENED:
                log.event("stream opened", logging.DEBUG, **values)
            elif kind == lib.CLAW_EVENT_UNREAD:
                log.event("stream cancelled", **values, why="nobody reads it")
            else:
                row = self._core.stream_row(stream)
                reason = text(row.reason, row.reason_len) if row else ""
                # what an engine ended as it should is many a second, and nobody's trouble
                level = logging.INFO if reason in ABNORMAL or reason.startswith("error") else logging.DEBUG
                log.event("stream ended", level, **values, reason=reason or None)

    def _answer(self, request: protocol.Message) -> protocol.Message:
        """To what the registry has found allowed."""
        if isinstance(request, protocol.SetPace):
            return self._set_pace(request)
        if isinstance(request, protocol.Stop):
            self.is_discarding = self.is_discarding or request.discard
            return self._stop_later(request.drain_ms)
        if isinstance(request, protocol.Boosts):
            return self._urgency.told()
        return self._reload() if isinstance(request, protocol.Reload) else self._settings.in_effect()

    def _stop_later(self, drain_ms: int) -> protocol.Stopping:
        if drain_ms:
            self._drain_until_ns = time.monotonic_ns() + drain_ms * 1_000_000
            self._registry.is_draining = True
            self._core.drain()
            sd.status("draining")
        else:
            self._stopping = True
        return protocol.Stopping(self._core.refresh_totals().streams_live if drain_ms else 0)

    def _set_pace(self, request: protocol.SetPace) -> protocol.Message:
        if request.mode not in (*PACES, "default") or (request.stream is None and request.mode == "default"):
            return protocol.Failure(code="bad_request", text=f'"{request.mode}" is no way to pace')
        if request.stream is None:
            self._core.pace(request.mode, pace_of(self._settings.config))
            self._settings.set_for_now("pace", request.mode, "clawctl pace")
        elif not self._core.pace_stream(request.stream.encode(), request.mode):
            return protocol.Failure(code="unknown", text=f'no stream "{request.stream}" is open or kept')
        log.event("pace set", mode=request.mode, stream=request.stream)
        return protocol.PaceSet(request.mode)

    def _reload(self) -> protocol.Reloaded:
        """Read the configuration again, and change what can be changed while running."""
        sd.reloading()
        outcome = self._settings.reload(self._apply)
        sd.ready(self._settings.error or "")
        return outcome

    def _apply(self, config: Config) -> None:
        self._core.limit(stream_bytes=config.stream_bytes, keep_ns=config.keep)
        self._core.pace(config.pace, pace_of(config))
        self._registry.config = config
        if self._far:
            self._far.apply(config)
        self._urgency.apply(config)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop, SIGHUP reloads."""

        def stop() -> None:
            self._stopping = True

        def reload() -> None:
            """Its number is in the descriptor."""

        def woke() -> None:
            if signal.SIGHUP in woken.numbers() and not self._stopping:
                self._reload()

        with caught({signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}) as woken:
            self._registry.watch(woken.fileno(), woke)
            yield

    def _stop(self) -> None:
        """Accept nothing new, one last pass over every ring, leave rings and spool."""
        sd.stopping()
        self._registry.close()
        now_ns = last_ns = time.monotonic_ns()
        deadline_ns = now_ns + STOP_NS
        quiet_ns = STOP_QUIET_NS if self._relay.connection_count else 0
        while now_ns < deadline_ns:
            busy = self._once(max(0, last_ns + quiet_ns - now_ns))
            now_ns = time.monotonic_ns()
            if busy:
                last_ns = now_ns
            elif now_ns - last_ns >= quiet_ns:
                break
        self._relay.close()
        self._urgency.close()
        log.event("stopped")


def pace_of(config: Config) -> Pace:
    """The pacer's settings as the core takes them: its rates are tokens in 1,000 s."""
    return Pace(
        max_delay_ns=config.max_delay,
        timeout_ns=config.timeout,
        prefetch=config.prefetch_window,
        bucket=config.bucket,
        refill_rate=1000 * config.refill_rate,
        leak_rate=1000 * config.leak_rate,
        burst_rate=1000 * config.burst_rate,
        burst=config.burst,
    )
