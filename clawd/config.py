# SPDX-License-Identifier: Apache-2.0
"""Every setting of clawd: one row each, from which flags, help, checks, `clawd.conf`, its manual and the README's table
follow. Reads no file: sources.py does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from clawd.errors import ConfigError
from clawd.setting import (
    CONGESTION,
    COUNT,
    DIRECTORY,
    DSCP,
    ENDPOINTS,
    FILE,
    LISTEN,
    NAMES,
    NODES,
    ORIGINS,
    PACE,
    PACES,
    PREFIX,
    RATE,
    SIZE,
    SWITCH,
    TEXTS,
    TIME,
    WORD,
    Kind,
    Setting,
)

__all__ = ["AT_MOST", "DAEMON_SETTINGS", "DIRECTORY", "PACES", "ROWS", "SETTINGS", "SIZE", "TIME", "Config", "Kind",
           "Setting", "conflicts", "default_runtime_dir"]  # fmt: skip


def default_runtime_dir() -> Path:
    """$CLAWD_RUNTIME_DIR, else /run/clawd: where daemon, producers and clients meet."""
    return Path(os.environ.get("CLAWD_RUNTIME_DIR") or "/run/clawd")


def _row(section: str, kind: Kind, default: str | Callable[[], Any], help: str, detail: str = "", **rest: Any) -> Any:
    row = Setting(section, "", kind, default, help, detail, **rest)
    return field(default_factory=row.default_value, metadata={"row": row})


_SHARE = "A user at this limit leaves room for others; more than the limit for all is no more than that."


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a clawd runs with: sizes in bytes, times in ns. Checked when made; raises ConfigError."""

    runtime_dir: Path = _row(  # noqa: RUF009 - a field, made anew each time
        "daemon",
        DIRECTORY,
        default_runtime_dir,
        "directory of the lock and the sockets",
        "Producers and clients must see the same directory.",
        variable="CLAWD_RUNTIME_DIR",
    )
    buffer_size: int = _row(
        "stream",
        SIZE,
        "128k",
        "ring of a producer that asks for no size",
        "Shared memory, allocated when a producer attaches; a reload counts for those that attach after it. A larger"
        " ring lets an engine write further ahead of clawd.",
        low="4k",
        high="64M",
        power_of_two=True,
        reload=True,
    )
    spool_bytes: int = _row(
        "stream",
        SIZE,
        "64M",
        "memory for the tokens of all streams",
        "Shared memory, allocated at the start; it may be a quarter of what is free. When it is full, what ended"
        " longest ago goes first.",
        low="1M",
        high="1T",
        multiple="4k",
    )
    stream_bytes: int = _row(
        "stream",
        SIZE,
        "4M",
        "memory one stream may hold for late or slow readers",
        "Beyond it a stream's oldest tokens go, and a reader that had not got them is told so by a gap. A stream that"
        " holds more after a reload lets go of it as it writes on.",
        low="16k",
        high="1T",
        reload=True,
    )
    keep: int = _row(
        "stream",
        TIME,
        "60s",
        "how long an ended stream can still be read",
        "A reload counts for streams that have ended already, too.",
        high="24h",
        reload=True,
    )
    max_streams: int = _row("stream", COUNT, "16384", "streams at once, ended ones included", low="1", high="1048576")
    user_streams: int = _row(
        "stream", COUNT, "12288", "live streams of one user's producers", _SHARE, low="1", high="1048576"
    )
    max_producers: int = _row("stream", COUNT, "64", "producers at once", low="1", high="4096")
    user_producers: int = _row("stream", COUNT, "48", "producers of one user", _SHARE, low="1", high="4096")
    max_ring_bytes: int = _row(
        "stream",
        SIZE,
        "1G",
        "memory of all producers' rings",
        "Shared memory, allocated as producers attach. One that would go beyond it is refused.",
        low="4k",
        high="1T",
    )
    user_ring_bytes: int = _row("stream", SIZE, "768M", "memory of one user's rings", _SHARE, low="4k", high="1T")
    max_clients: int = _row("stream", COUNT, "1024", "connections of clients at once", low="1", high="65536")
    user_clients: int = _row("stream", COUNT, "768", "clients of one user", _SHARE, low="1", high="65536")
    max_attachments: int = _row("stream", COUNT, "65536", "readings at once, over all clients", low="1", high="1048576")
    user_attachments: int = _row(
        "stream", COUNT, "49152", "readings of one user's clients", _SHARE, low="1", high="1048576"
    )
    prefetch_window: int = _row(
        "stream",
        COUNT,
        "3",
        "how far the pacer looks ahead",
        "In arrivals when smooth, in tokens of a window when steady.",
        low="1",
        high="8",
        reload=True,
    )
    timeout: int = _row(
        "stream",
        TIME,
        "50ms",
        "how long a token may wait for its window when steady",
        "The window is full with prefetch_window tokens.",
        low="1ms",
        high="10s",
        reload=True,
    )
    pace: str = _row(
        "pace",
        PACE,
        "smooth",
        "how tokens of a stream are spread over time",
        "off: as they come. smooth: as fast as the producer makes them, without its jitter; several that come at once"
        " leave one by one. steady: at a bounded rate, whatever the producer does. An engine may choose for a stream as"
        " it opens it; `clawctl pace` changes it while it runs.",
        reload=True,
    )
    max_delay: int = _row(
        "pace",
        TIME,
        "200ms",
        "how long smooth may hold a token",
        "An even stream is not held at all.",
        low="1ms",
        high="10s",
        reload=True,
    )
    bucket: int = _row(
        "pace",
        COUNT,
        "50",
        "tokens a stream may have saved up when steady",
        "Full at the start. From a fifth down the rate falls to refill_rate.",
        low="5",
        high="100000",
        reload=True,
    )
    refill_rate: int = _row(
        "pace",
        RATE,
        "30",
        "tokens a second that a steady stream settles on",
        "Less with what the way to the reader loses and with its jitter.",
        low="1",
        high="100000",
        reload=True,
    )
    leak_rate: int = _row(
        "pace",
        RATE,
        "45",
        "tokens a second that a steady stream makes from what it saved",
        low="1",
        high="100000",
        reload=True,
    )
    burst_rate: int = _row(
        "pace",
        RATE,
        "80",
        "tokens a second in a burst when steady",
        "While its send buffer of five is nearly full, and burst tokens long.",
        low="1",
        high="100000",
        reload=True,
    )
    burst: int = _row("pace", COUNT, "8", "tokens a burst may have when steady", low="1", high="10000", reload=True)
    tcp_listen: tuple[tuple[str, int], ...] = _row(
        "network",
        ENDPOINTS,
        "off",
        "where clients of other hosts connect",
        "Each takes two ports: the one that is named for the bulk lane, and the next one for the express lane. Beyond"
        " 127.0.0.1 clawd starts only when there are keys: clawctl keys relay.",
    )
    keys_dir: Path = _row(  # noqa: RUF009 - a field, made anew each time
        "network",
        DIRECTORY,
        "/etc/clawd/keys",
        "keys of the tcp lanes, and who may connect",
        "relay.key is clawd's own, below allow/ are those of clients, each looked at as it connects and every second:"
        " one that is taken away cuts its clients off.",
    )
    loss_threshold: int = _row(
        "network",
        COUNT,
        "2",
        "percent of loss above which a tcp client gets all twice",
        "Of the segments that were sent to it: then every frame goes on both of its lanes, until the loss is less than"
        " half of that.",
        low="1",
        high="100",
        reload=True,
    )
    express_dscp: int = _row(
        "network",
        DSCP,
        "off",
        "DSCP that packets of the express lane carry",
        "For networks that go by it. clawd-kernel writes it where a default route leaves; a reload counts for clients"
        " that connect after it.",
        reload=True,
    )
    congestion: str = _row(
        "network",
        CONGESTION,
        "kernel",
        "how fast tcp clients are sent to",
        "Their congestion control, set by clawd-kernel; kernel: as net.ipv4.tcp_congestion_control has it. A reload"
        " counts for clients that connect after it.",
        reload=True,
    )
    tcp_fastopen: bool = _row(
        "network",
        SWITCH,
        "on",
        "TCP Fast Open on tcp listeners",
        "Of clawd and of the gateway: a client that comes again sends its request with the first packet. ZeroMQ's own"
        " clients do not. The kernel must allow it, too: net.ipv4.tcp_fastopen.",
        reload=True,
    )
    keepalive: int = _row(
        "network",
        TIME,
        "15s",
        "how often both ends of a silent tcp connection are heard",
        "A tcp client that was silent for twice as long is gone; a reload counts for those that connect after it. The"
        " gateway says something as often, so that no proxy takes a silent stream for a dead one.",
        low="1s",
        high="1h",
        reload=True,
    )
    producers: tuple[str, ...] = _row(
        "access",
        NAMES,
        "any",
        "who may attach as a producer",
        "Of those who come as far as clawd's sockets, which are for its group. Root and clawd's own user always may.",
        reload=True,
    )
    consumers: tuple[str, ...] = _row(
        "access",
        NAMES,
        "any",
        "who may read streams and cancel them",
        "On this host; by tcp it is decided by keys. Root and clawd's own user always may.",
        reload=True,
    )
    observers: tuple[str, ...] = _row(
        "access",
        NAMES,
        "any",
        "who may read streams and do nothing else",
        "Who may be a consumer may be an observer, too.",
        reload=True,
    )
    admins: tuple[str, ...] = _row(
        "access",
        NAMES,
        "none",
        "who may cancel, pace, reload and stop",
        "Besides root and clawd's own user.",
        reload=True,
    )
    tune: bool = _row(
        "kernel",
        SWITCH,
        "off",
        "clawd-kernel tunes the kernel, once a boot",
        "As `clawctl tune apply` does, and `clawctl tune revert` takes it back. clawd itself takes the slice that the"
        " profile gives its threads, for which it needs no clawd-kernel.",
    )
    profile: str = _row(
        "kernel",
        WORD,
        "low-latency",
        "what tune asks for: low-latency, wan, shared-host or your own",
        "One of your own is a file in /etc/clawd/profiles; see clawctl tune show.",
    )
    boost: bool = _row(
        "kernel",
        SWITCH,
        "off",
        "clawd-kernel lets first tokens go before other work",
        "From a stream's OPEN to its first token sent, half a second at most, clawd.slice weighs more and"
        " clawd_background.slice less, and while this host is short of processor time. clawd's threads take the slice"
        " that the profile has. Without it the weights of the units hold.",
        reload=True,
    )
    pressure: bool = _row(
        "kernel",
        SWITCH,
        "on",
        "engines are told when this host is short of processor time",
        "As far as clawd itself waits for it: then hints ask them for cheaper answers.",
        reload=True,
    )
    listen: str = _row(
        "gateway",
        LISTEN,
        "127.0.0.1:8080",
        "where the gateway listens",
        "Beyond this host (anything but loopback and a Unix socket) key_file is required.",
    )
    nodes: tuple[str, ...] = _row(
        "gateway",
        NODES,
        "off",
        "the clawds whose streams it serves",
        "By tcp, or by their runtime directories, with spaces between; off: the one of runtime_dir. Each reader gets"
        " the stream of the one that has it.",
    )
    node_key: Path | None = _row(  # noqa: RUF009 - a field, made anew each time
        "gateway", FILE, "off", "the key it shows to nodes", "As made by clawctl keys relay new on one of them."
    )
    node_servers: Path | None = _row(  # noqa: RUF009 - a field, made anew each time
        "gateway",
        FILE,
        "off",
        "public keys of the nodes",
        "A line tcp://HOST:PORT = KEY for each; clawctl keys relay list shows a clawd's own.",
    )
    key_file: Path | None = _row(  # noqa: RUF009 - a field, made anew each time
        "gateway",
        FILE,
        "off",
        "keys that readers' tokens are signed with",
        "Made by: clawctl keys gateway make FILE. With it every reader needs a token, on loopback too.",
    )
    allow_origin: tuple[str, ...] = _row(
        "gateway",
        ORIGINS,
        "off",
        "web pages of other origins that may read",
        "Pages of the gateway's own origin always may.",
    )
    max_connections: int = _row("gateway", COUNT, "4096", "connections to the gateway at once", low="1", high="1048576")
    max_per_address: int = _row(
        "gateway",
        COUNT,
        "1024",
        "connections of one address at once",
        "Behind a proxy all readers have the proxy's address.",
        low="1",
        high="1048576",
    )
    header_bytes: int = _row("gateway", SIZE, "8k", "longest line of a request", low="1k", high="64k")
    header_timeout: int = _row(
        "gateway", TIME, "10s", "how long a connection may be without a whole request", low="100ms", high="10min"
    )
    recent_bytes: int = _row(
        "gateway",
        SIZE,
        "64k",
        "a stream's recent events, kept once for all of its readers",
        "A reader that is further behind reads for itself from clawd, at its own pace, until it has caught up.",
        low="16k",
        high="64M",
    )
    stall_timeout: int = _row(
        "gateway",
        TIME,
        "60s",
        "how long a reader may take nothing before it is cut off",
        "It can go on from where it was with Last-Event-ID.",
        low="1s",
        high="1h",
    )
    open_wait: int = _row("gateway", TIME, "30s", "how long a stream that is not open yet is waited for", high="1h")
    gone_grace: int = _row(
        "gateway",
        TIME,
        "30s",
        "how long after its last reader a stream is cancelled",
        "Also before it opened. Whoever comes back in time goes on with it.",
        high="1h",
    )
    drain_timeout: int = _row(
        "gateway",
        TIME,
        "10s",
        "how long streams may go on after SIGTERM",
        "Readers are then told to come back.",
        high="1h",
    )
    stop_phrases: tuple[str, ...] = _row(
        "gateway",
        TEXTS,
        "[]",
        "texts that end a stream where they begin",
        "They may span tokens. The stream is cancelled; readers see the end reason stop.",
    )
    redact: tuple[str, ...] = _row(
        "gateway",
        TEXTS,
        "[]",
        "patterns whose matches readers see as [redacted]",
        "Regular expressions; needs the module regex. Text that may become a match is held back, at most 1,024"
        " characters of it.",
    )
    metrics_prefix: str = _row("gateway", PREFIX, "clawd_", "what names of metrics begin with")

    def __post_init__(self) -> None:
        for row in SETTINGS:
            row.check(getattr(self, row.key), row.key)
        for error in conflicts(vars(self)):
            raise error


def _settings() -> tuple[Setting, ...]:
    named = []
    for column in fields(Config):
        row: Setting = column.metadata["row"]
        named.append(Setting(**{**row.__dict__, "key": column.name}))
    return tuple(named)


SETTINGS = _settings()
"""Every row, in the order of help and README."""
ROWS = {row.key: row for row in SETTINGS}
DAEMON_SETTINGS = tuple(row for row in SETTINGS if "clawd" in row.programs)
"""Those that clawd itself goes by."""
AT_MOST = (
    ("stream_bytes", "spool_bytes"),
    ("refill_rate", "leak_rate"),
    ("leak_rate", "burst_rate"),
)
"""Pairs of keys of which the first may not be more than the second."""


def conflicts(values: Mapping[str, Any], origins: Mapping[str, object] | None = None) -> Iterator[ConfigError]:
    """What cannot be together, each good by itself: names both keys and, from `origins`, where they were set."""

    def told(key: str) -> str:
        origin = f" ({origins[key]})" if origins else ""
        return f'{key} "{ROWS[key].kind.format(values[key])}"{origin}'

    for low, high in AT_MOST:
        if values[low] > values[high]:
            yield ConfigError(
                f"{told(low)} is more than {told(high)}",
                "lower the first or raise the second",
                key=low,
                value=ROWS[low].kind.format(values[low]),
            )
