# SPDX-License-Identifier: Apache-2.0
"""Wires the gateway together: its listener, its connections, its drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import stat
from collections.abc import Iterator

from clawd import __version__, log, sd
from clawd.aconsumer import AsyncConsumer
from clawd.config import Config
from clawd.core import guard
from clawd.errors import ConfigError, HostError
from clawd.gateway import access
from clawd.gateway.connection import Server, set_options
from clawd.gateway.fan import Hub, Terms
from clawd.gateway.figures import Figures
from clawd.gateway.filter import Pipeline
from clawd.gateway.metrics import Exporter, Load
from clawd.gateway.routes import Routes
from clawd.keys import read_servers

SWEEP_S = 0.5
BACKLOG = 1024


class Gateway:
    """Serves what `config` says. Raises ConfigError for what cannot be together."""

    def __init__(self, config: Config, *, metrics_only: bool = False) -> None:
        if not access.is_local(config.listen) and config.key_file is None:
            raise ConfigError(
                f'listen "{config.listen}" is reached from other hosts, and there is no key_file',
                "make one: clawctl keys gateway make FILE, then --key-file FILE",
            )
        self._config = config
        self._keys = access.read_keys(config.key_file) if config.key_file else []
        self._servers = read_servers(config.node_servers) if config.node_servers else None
        self._metrics_only = metrics_only
        if config.stop_phrases or config.redact:
            Pipeline(config.stop_phrases, config.redact)  # to see that it can be made

    def _pipeline(self) -> Pipeline | None:
        config = self._config
        return Pipeline(config.stop_phrases, config.redact) if config.stop_phrases or config.redact else None

    def _connect(self) -> AsyncConsumer:
        config = self._config
        if not config.nodes:
            return AsyncConsumer(config.runtime_dir)
        return AsyncConsumer(endpoint=config.nodes, key=config.node_key, server_key=self._servers)

    async def run(self) -> None:
        """Until SIGTERM or SIGINT, and until streams have ended or `drain_timeout` is over. Raises HostError."""
        config, figures = self._config, Figures()
        guard()  # against a page of figures that is truncated while it is read
        terms = Terms(config.recent_bytes, config.open_wait / 1e9, config.gone_grace / 1e9, self._pipeline)
        hub = None if self._metrics_only else Hub(self._connect, terms, figures)
        exporter = Exporter(config.runtime_dir, config.metrics_prefix, figures if hub else None)
        routes = Routes(config, hub, figures, exporter.text, self._keys)
        server = Server(
            routes.serve,
            figures,
            max_connections=config.max_connections,
            max_per_address=config.max_per_address,
            header_bytes=config.header_bytes,
        )
        if hub is not None:
            exporter.load = lambda: Load(len(server.open), len(routes.readers), hub.streams, hub.attachments)
        _raise_descriptor_limit(config.max_connections)
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        # Which would end it
        loop.add_signal_handler(signal.SIGHUP, log.warning, "settings are read at a start: restart to apply new ones")
        with listener(config) as accepting:
            serving = await loop.create_server(server, sock=accepting, backlog=BACKLOG)
            sweep = loop.create_task(self._sweep(server))
            told = sd.ready(f"listening on {config.listen}")
            log.event(
                "gateway ready", version=__version__, listen=_name(accepting), tokens=bool(self._keys), notify=told
            )
            await stop.wait()
            sd.stopping()
            await self._drain(routes, server)
            serving.close()
            sweep.cancel()
            await server.shutdown(0.2)
            if hub is not None:
                hub.drop()
        log.event("gateway stopped")

    async def _sweep(self, server: Server) -> None:
        config = self._config
        while True:
            # Nobody there, nothing to do: an idle gateway sleeps
            await asyncio.sleep(SWEEP_S if server.open else 1.0)
            server.sweep(config.header_timeout / 1e9, config.stall_timeout / 1e9, config.keepalive / 1e9)

    async def _drain(self, routes: Routes, server: Server) -> None:
        """Let streams end; tell the readers of those that do not to come again."""
        routes.is_draining = True
        readers = tuple(routes.readers)
        log.event("gateway stopping", readers=len(readers))
        if readers and self._config.drain_timeout:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_timeout / 1e9):
                    await asyncio.wait([reader.done for reader in readers])
        for reader in tuple(routes.readers):
            reader.dismiss()
        await asyncio.sleep(0)


@contextlib.contextmanager
def listener(config: Config) -> Iterator[socket.socket]:
    """A socket that listens where `config` says. Raises HostError."""
    address = config.listen
    try:
        if address.startswith("unix:"):
            path = address[5:]
            made = _listen_at(path)
        else:
            path = ""
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            family, kind, number, _, where = socket.getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            made = socket.socket(family, kind, number)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for missing in set_options(made, config.stall_timeout / 1e9, fast_open=config.tcp_fastopen):
                log.warning("a socket option is not to be had", option=missing)
            made.bind(where)
    except OSError as error:
        what = "somebody listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise HostError(f'cannot listen on "{address}": {what}', "give another --listen") from error
    with made:
        yield made
    if path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _listen_at(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)  # left by one that was killed
    before = os.umask(0o117)
    try:
        made.bind(path)
    finally:
        os.umask(before)
    return made


def _name(accepting: socket.socket) -> str:
    at = accepting.getsockname()
    return f"unix:{at}" if isinstance(at, str) else f"{at[0]}:{at[1]}"


def _raise_descriptor_limit(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + 64
    if soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard), hard))
        if hard < need:
            log.warning("fewer connections than max_connections fit", descriptors=hard, needed=need)
