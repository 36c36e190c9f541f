# SPDX-License-Identifier: Apache-2.0
"""Keys of the relay: clawd's own pair, and the public halves of those who may connect by tcp, one file each. CURVE keys
as ZeroMQ writes them: 40 characters of Z85.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from clawd.errors import ClawdError, HostError

SERVER_FILE = "relay.key"
ALLOW_DIR = "allow"
ROLES = ("consumer", "observer")
"""What a key may be for."""
UID_BASE = 0x8000_0000
"""A key counts as a user of its own, with a number beyond those of this host's users."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_FILE_MAX = 4096


@dataclass(frozen=True)
class Pair:
    public: str
    secret: str


@dataclass(frozen=True)
class Allowed:
    """Who may connect: a name for people, the public key, and as what."""

    name: str
    public: str
    role: str


def make_pair() -> Pair:
    """Raises ClawdError where libzmq was built without CURVE."""
    import zmq  # an engine's environment has none, and needs none

    try:
        public, secret = zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise ClawdError("this libzmq has no CURVE", "pip install a pyzmq wheel, which has") from error
    return Pair(public.decode(), secret.decode())


def _read(path: Path) -> dict[str, str]:
    """The `word = value` lines of a key file."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read(_FILE_MAX)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise HostError(f'cannot read the key "{path}": {reason}') from error
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {word.strip(): value.strip() for word, equals, value in pairs if equals}


def _key(values: dict[str, str], word: str, path: Path) -> str:
    value = values.get(word, "")
    if not _KEY.fullmatch(value):
        raise HostError(f'"{path}" has no {word} key', "make one: clawctl keys relay new NAME")
    return value


def read_pair(path: Path) -> Pair:
    """A secret key's file. Raises HostError, also when others may read it."""
    values = _read(path)
    pair = Pair(_key(values, "public", path), _key(values, "secret", path))
    mode = path.stat().st_mode & 0o077
    if mode:
        raise HostError(f'"{path}" can be read by others', f"chmod 600 {path}")
    return pair


def read_public(given: str | os.PathLike[str]) -> str:
    """A public key, given as it is or as a file that has it. Raises HostError."""
    text = os.fspath(given)
    if _KEY.fullmatch(text) and not os.path.exists(text):
        return text
    return _key(_read(Path(text)), "public", Path(text))


def read_servers(path: Path) -> dict[str, str]:
    """Public keys of clawds by their endpoints: lines `tcp://HOST:PORT = KEY`. Raises HostError."""
    values = _read(path)
    return {endpoint: _key(values, endpoint, path) for endpoint in values}


def write_pair(path: Path, pair: Pair, comment: str) -> None:
    """A new file, for its owner only. Raises HostError when there is one already."""
    _write(path, f"# {comment}\npublic = {pair.public}\nsecret = {pair.secret}\n", 0o600)


def _write(path: Path, text: str, mode: int) -> None:
    new = path.with_name(f".{path.name}.new")
    try:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        with open(new, "x", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
        if os.geteuid() == 0:  # root writes them for the user who runs clawd: the one whose directory it is
            owner = path.parent.stat()
            os.chown(new, owner.st_uid, owner.st_gid)
        os.link(new, path)  # whole or not at all, and never over another
    except OSError as error:
        raise HostError(f'cannot write "{path}": {error.strerror}') from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def allow(directory: Path, allowed: Allowed) -> None:
    """Raises HostError when the name is taken or is none."""
    if not NAME.fullmatch(allowed.name):
        raise HostError(f'"{allowed.name}" is no name for a key', "use letters, digits, '.', '_' and '-'")
    _write(directory / ALLOW_DIR / allowed.name, f"public = {allowed.public}\nrole = {allowed.role}\n", 0o640)


def make_server(directory: Path) -> Pair:
    """clawd's own pair, made when there is none."""
    path = directory / SERVER_FILE
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        (directory / ALLOW_DIR).mkdir(mode=0o750, exist_ok=True)
        if os.geteuid() == 0:
            owner = directory.stat()
            os.chown(directory / ALLOW_DIR, owner.st_uid, owner.st_gid)
    except OSError as error:
        raise HostError(f'cannot use "{directory}": {error.strerror}') from error
    if not path.exists():
        write_pair(path, make_pair(), "clawd's own key: secret")
    return read_pair(path)


class AllowList:
    """The keys in `directory`, read again when something changed there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / ALLOW_DIR
        self._seen: object = None
        self._by_public: dict[str, Allowed] = {}
        self.flaws: list[str] = []
        """Files that say nothing that could be believed, each as one line."""

    def refresh(self) -> bool:
        """True: something changed. A directory that cannot be read allows nobody."""
        try:
            with os.scandir(self._directory) as entries:
                found = sorted((entry.name, _stamp(entry)) for entry in entries if not entry.name.startswith("."))
        except OSError:
            found = []
        if found == self._seen:
            return False
        self._seen = found
        self._by_public, self.flaws = {}, []
        for name, _ in found:
            try:
                values = _read(self._directory / name)
                public, role = _key(values, "public", self._directory / name), values.get("role", "consumer")
                if role not in ROLES:
                    raise HostError(f'"{self._directory / name}" has no such role: {role[:20]}')
                self._by_public[public] = Allowed(name, public, role)
            except HostError as error:
                self.flaws.append(str(error))
        return True

    def find(self, public: str) -> Allowed | None:
        return self._by_public.get(public)

    def all(self) -> list[Allowed]:
        return sorted(self._by_public.values(), key=lambda allowed: allowed.name)


def _stamp(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    try:
        status = entry.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size
