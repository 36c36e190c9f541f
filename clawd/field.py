# SPDX-License-Identifier: Apache-2.0
"""What a field of a message may hold: for protocol.py, whose rows are made of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any

Check = Callable[[Any], bool]


def number(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def text(longest: int, shortest: int = 1) -> Check:
    # UTF-8 length, as the C side counts; a lone surrogate has none and is refused
    def check(value: Any) -> bool:
        if type(value) is not str:
            return False
        try:
            return shortest <= len(value.encode()) <= longest
        except UnicodeEncodeError:
            return False

    return check


def one_of(*allowed: str) -> Check:
    return lambda value: type(value) is str and value in allowed


def flag(value: Any) -> bool:
    return type(value) is bool


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(check(each) for each in value)


def figures(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str and type(figure) is int for key, figure in value.items())


def record(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str and type(part) in (int, str) for key, part in value.items())


def place(value: Any) -> bool:
    return type(value) is list and [type(part) for part in value] == [str, int, int]


def table(value: Any) -> bool:
    return type(value) is dict and all(type(text) is str for pair in value.items() for text in pair)


def checked(check: Check, default: Any = MISSING) -> Any:
    if default is MISSING:
        return field(metadata={"check": check})
    return field(default=default, metadata={"check": check})
