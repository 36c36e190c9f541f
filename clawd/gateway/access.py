# SPDX-License-Identifier: Apache-2.0
"""Who may read: keys, the tokens signed with them, and the origins of web pages."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from clawd.errors import ConfigError, HostError

RIGHTS = {"r": "read a stream", "rc": "read and cancel a stream", "m": "read the metrics"}
_KEY = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"([a-z]{1,2})\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})", re.ASCII)
_FILE_MAX = 1 << 16


def make_key_file(path: Path) -> None:
    """Write a new key to `path`, for its owner and group. Raises HostError; never replaces a file."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    except FileExistsError as error:
        raise HostError(
            f'"{path}" is there already', "its tokens would end: name another, or add a line to it"
        ) from error
    except OSError as error:
        raise HostError(f'cannot make "{path}": {error.strerror}') from error
    with open(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read_keys(path: Path) -> list[bytes]:
    """The keys in `path`, one a line; the first one signs. Raises ConfigError."""
    hint = f"make one: clawctl keys gateway make {path}"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f'key_file "{path}" is no file', hint)
            text = file.read(_FILE_MAX + 1).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f'cannot read key_file "{path}": {error.strerror}', hint) from error
    if mode & 0o007:
        raise ConfigError(f'everybody may use key_file "{path}"', f"run: chmod o= {path}")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or not all(_KEY.fullmatch(line) for line in lines):
        raise ConfigError(f'key_file "{path}" has a line that is no key', "a key is 64 hexadecimal digits, " + hint)
    return [bytes.fromhex(line) for line in lines]


def _mac(key: bytes, rights: str, expiry: int, stream: str) -> bytes:
    # The name comes last: all before it has no line's end, so that no two messages are the same
    message = f"clawd-gateway 1\n{rights}\n{expiry}\n".encode() + stream.encode()
    return hmac.new(key, message, hashlib.sha256).digest()


def make_token(key: bytes, stream: str, rights: str, expiry: int) -> str:
    """What lets its bearer do `rights` (a key of RIGHTS) with `stream` until `expiry`, in seconds since 1970."""
    mac = base64.urlsafe_b64encode(_mac(key, rights, expiry, stream)).rstrip(b"=").decode()
    return f"{rights}.{expiry}.{mac}"


def rights_of(keys: Sequence[bytes], token: str, stream: str, now: float | None = None) -> str | None:
    """What `token` lets its bearer do with `stream`; None: nothing, it is forged, of another stream, or too old."""
    match = _TOKEN.fullmatch(token)
    if match is None or match[1] not in RIGHTS:
        return None
    try:
        mac = base64.b64decode(match[3] + "=", b"-_", validate=True)
    except binascii.Error:
        return None
    expiry = int(match[2])
    # Every key is tried to the end: how long it takes says nothing of which fits
    good = [hmac.compare_digest(mac, _mac(key, match[1], expiry, stream)) for key in keys]
    if not any(good) or expiry < (time.time() if now is None else now):
        return None
    return match[1]


def is_local(listen: str) -> bool:
    """Whether an address as in `listen` is of this host alone."""
    host = listen.rpartition(":")[0].strip("[]")
    return (
        listen.startswith("unix:") or host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.[0-9]{1,3}){3}", host))
    )


def allowed_origin(origin: str | None, host: str | None, allowed: Sequence[str]) -> str | None:
    """What Access-Control-Allow-Origin says to a page of `origin`: "" for the gateway's own, and for what is no page;
    None when it may not read.
    """
    if origin is None or origin.partition("://")[2] == host:
        return ""
    if "*" in allowed:
        return "*"
    return origin if origin in allowed else None
