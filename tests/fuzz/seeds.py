# SPDX-License-Identifier: Apache-2.0
"""Inputs to start from: programs for fuzz_core in its operations' numbers, frames for fuzz_frame."""

from __future__ import annotations

import struct
from pathlib import Path

RAW, RECORD, ODD, OPEN, HEAD, TURN, ATTACH, GRANT, FLOW, CANCEL, DETACH, BLOCK, RECONNECT, LEAVE = range(14)
TOKEN_KIND, OPEN_KIND, CLOSE_KIND, GAP_KIND = range(1, 5)


def record(kind: int, handle: int, size: int, count: int = 1, urgent: int = 0, text: bytes = b"") -> bytes:
    # fuzz_core takes kind and length modulo what they may be
    return struct.pack("<BBBBBH", RECORD, kind - 1, handle, urgent, count, size) + text


def opened(name: int, handle: int, meta: int = 2) -> bytes:
    return bytes([OPEN, meta, name, handle])


def attach(name: int, client: int = 0, credit: int = 60000, wait: int | None = None, cancel: bool = False) -> bytes:
    flags = client | (4 if cancel else 0) | (8 if wait is not None else 0)
    return struct.pack("<BBBH", ATTACH, name, flags, credit) + (b"" if wait is None else bytes([wait]))


def grant(client: int = 0, *limits: int) -> bytes:
    return struct.pack("<BB8H", GRANT, client, *(limits + (0,) * 8)[:8])


def turns(number: int = 1) -> bytes:
    return bytes([TURN, 0]) * number


def core_programs() -> dict[str, bytes]:
    token = record(TOKEN_KIND, 0, 20)
    big = record(TOKEN_KIND, 0, 1024)
    half = record(TOKEN_KIND, 0, 500)
    close = record(CLOSE_KIND, 0, 4, 0, 0, b"aaaa")
    gap = record(GAP_KIND, 0, 3, 4, 0, b"aaa")
    start = opened(0, 0) + turns() + attach(0)
    return {
        "stream": start + token * 3 + turns() + record(TOKEN_KIND, 0, 9, 1, 1) + close + turns(2),
        "gap": start + token + gap + token + turns() + close + turns(2),
        "evicted": opened(0, 0) + turns() + (big * 3 + turns()) * 6 + attach(0) + turns(3) + close + turns(2),
        "evicted-while-read": start + token + turns() + (big * 3 + turns()) * 6 + grant(0, 9000) + turns(3),
        "no-credit": opened(0, 0) + turns() + attach(0, 0, 1) + (big * 3 + turns()) * 4 + grant(0, 500) + turns(),
        "behind": opened(0, 0) + turns() + attach(0, 0, 4300) + (big * 3 + turns()) * 6 + grant(0, 9000) + turns(3),
        "window": start + (big * 3 + turns()) * 22 + grant(0, 9000) + turns(4),
        "two-readers": opened(0, 0) + turns() + attach(0) + attach(0, 1) + token * 4 + turns() + close + turns(),
        "awaited": attach(1, 0, 900, 200) + turns() + opened(1, 0) + token + close + turns(2),
        "awaited-cancelled": attach(1, 0, 900, 200, True) + turns() + opened(1, 0) + token + turns(2),
        "cancelled": start + token + turns() + bytes([CANCEL, 0]) + turns() + token + close + turns(),
        "detached": start + token + turns() + bytes([DETACH, 0]) + turns() + token + turns(),
        "left": start + token + bytes([LEAVE]) + turns(3),
        "exists": opened(0, 0) + opened(0, 1) + record(TOKEN_KIND, 1, 5) + turns(2),
        "reconnect": start + token * 2 + turns() + bytes([RECONNECT, 0]) + attach(0) + turns() + token + turns(),
        "blocked": start + bytes([BLOCK, 2]) + token + turns() + bytes([BLOCK, 0]) + turns(),
        "spool-full": b"".join(opened(n, n) + (record(TOKEN_KIND, n, 1024) * 3 + turns()) * 3 for n in range(4)),
        "bad-len": start + bytes([ODD, 0, 0, 0, 1, 20, 0, 0]) + struct.pack("<Q", 0xFFFFFFFF) + turns(2),
        "long-len": start + bytes([ODD, 0, 0, 0, 1, 20, 0, 0]) + struct.pack("<Q", 3600) + big * 2 + half + turns(2),
        "bad-head": start + bytes([HEAD, 1]) + struct.pack("<Q", 1 << 63) + turns(2),
        "raw": start + bytes([RAW, 64]) + bytes(range(64)) + turns(2),
        "flow": start + bytes([FLOW, 0, 65]) + bytes(range(65)) + turns(2),
        "flow-cut": start + bytes([FLOW, 0, 18, 0, 0, 9]) + bytes(15) + turns(2),
    }


def spooled(kind: int, payload: bytes, count: int = 0, klass: int = 2) -> bytes:
    raw = struct.pack("<HBBIQQ", len(payload), kind, klass, count, 1, 99) + payload
    return raw + bytes(-len(raw) % 8)


def segment(*records: bytes) -> bytes:
    body = b"".join(records)
    return struct.pack("<IIQII", 5, 7, 3, len(body), len(records)) + body


def frame(*segments: bytes) -> bytes:
    body = b"".join(segments)
    return struct.pack("<BBHIII", 0xDA, 1, len(segments), 11, 16 + len(body), 0) + body


def frames() -> dict[str, bytes]:
    token, close = spooled(1, b"token", 1), spooled(3, b"stop")
    found = {
        "tokens": frame(segment(token, token, token, close)),
        "open": frame(segment(spooled(2, b"{}"), token, spooled(4, b"evicted", 9), token)),
        "segments": frame(segment(token), segment(token, token), segment(spooled(1, b""), close)),
        "long": frame(segment(spooled(1, b"x" * 1800))),
        "cut": frame(segment(token))[:-3],
    }
    return {name: bytes([3, 0]) + data for name, data in found.items()}


def changes() -> dict[str, bytes]:
    """Of fuzz_restore: kind and width, block, offset, value."""

    def field(block: int, at: int, width: int, value: int) -> bytes:
        return bytes([1 | width << 3, block, at]) + value.to_bytes(1 << width, "little")

    found = {
        "nothing": b"",
        "drained again": bytes([6, 0, 0, 0]),
        "drained again in part": bytes([6, 0, 9, 0]),
        "free": field(5, 0, 3, 0),
        "copied": bytes([4, 9, 0]),
        "cut": bytes([5, 0, 100]),
        "magic": field(1, 8, 2, 7),
        "other stream": field(3, 16, 3, 5),
        "serial": field(2, 72, 3, 1 << 61),
        "next_seq": field(0, 64, 3, 1 << 40),
        "ended": field(0, 104, 3, 77),
        "flags": field(4, 63, 0, 1),
        "record": bytes([3 | 1 << 3, 2, 0]) + b"\xff\xff",
        "record's kind": bytes([3, 3, 2, 9]),
        "ack": bytes([7 | 3 << 3, 0, 128, 0]) + (64).to_bytes(8, "little"),
    }
    return found | {f"{name} again": data + bytes([6, 0, 0, 0]) for name, data in found.items()}


SEEDS = {"fuzz_core": core_programs, "fuzz_restore": changes, "fuzz_frame": frames}


def write(target: str, directory: Path) -> Path:
    """Write the seeds of a target, and return their directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in SEEDS[target]().items():
        (directory / name).write_bytes(data)
    return directory
