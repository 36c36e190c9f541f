# SPDX-License-Identifier: Apache-2.0
"""The exception tree. Each message is one line; `hint` says what to do about it."""

import errno


class ClawdError(Exception):
    """Base of every error clawd raises on purpose."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(ClawdError):
    """A setting has a value it must not have; where known, `file`, `line`, `key` and `value` say which."""

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        file: str | None = None,
        line: int | None = None,
        key: str | None = None,
        value: str | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.file = file
        self.line = line
        self.key = key
        self.value = value


class ConfigErrors(ConfigError):
    """All that is wrong with a configuration, in `errors`; as text, one line each."""

    def __init__(self, errors: list[ConfigError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


class HostError(ClawdError):
    """The host lacks something clawd needs: memory, a directory, a permission."""


class CoreError(ClawdError):
    """A call into the C core failed; `errno` says how."""

    def __init__(self, message: str, errno: int, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.errno = errno


class ControlError(ClawdError):
    """The daemon cannot be reached, answered nonsense, or speaks another version."""


class AlreadyRunning(ClawdError):
    """Another clawd serves this runtime directory."""


class ProtocolError(ClawdError):
    """A peer sent something that no message allows."""


class VersionMismatch(ProtocolError):
    """A peer speaks version `theirs` of the protocol, this side `ours`."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(f"version {theirs} is not spoken here, {ours} is", "upgrade the older one")
        self.theirs = theirs
        self.ours = ours


class ProducerError(ClawdError):
    """A producer's call cannot be carried out."""


class AttachRefused(ProducerError):
    """clawd refused the producer; `code` is `layout`, `denied`, `limit`, `no_space`, `bad_request`, `stopping` or
    `lost`.
    """

    def __init__(self, message: str, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.code = code


class RingFull(ProducerError):
    """Neither ring nor overflow has room. What was dropped is covered by a GAP. `written` counts what went in before:
    0, unless a call longer than either had to go in parts; then it is bytes for `write`, items for `write_many`.
    """

    def __init__(self, message: str, hint: str | None = None, written: int = 0) -> None:
        super().__init__(message, hint)
        self.written = written


class ForkedError(ProducerError):
    """The producer belongs to the process this one was forked from; attach one of its own."""


class RingLost(ProducerError):
    """clawd has let go of this ring (quarantined or closed), or a new one does not have it; attach a new producer."""


class StreamRefused(ProducerError):
    """clawd refused to open the stream; `code` is `exists`, `limit`, `no_space` or `stopping`."""

    def __init__(self, message: str, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.code = code


class StreamClosed(ProducerError):
    """The stream or its producer was closed before."""


class AttachError(ClawdError):
    """A reader's attach failed; `code` is `unknown`, `gone`, `lost`, `limit`, `denied` or `bad_request`."""

    def __init__(self, message: str, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.code = code


class ReadTimeout(ClawdError, TimeoutError):
    """Nothing came within the time given to a read; the reading itself goes on."""


class ReadingClosed(ClawdError):
    """The reading or its consumer was closed, or belongs to the process before a fork."""


def hint_unreachable(number: int | None, otherwise: str) -> str:
    """What to do when clawd's directory or socket cannot be reached, by errno."""
    if number == errno.EACCES:
        return "this user is not of clawd's group: usermod -aG clawd USER, then log in again"
    return otherwise
