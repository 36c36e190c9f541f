# SPDX-License-Identifier: Apache-2.0
"""How `clawctl tune` tells people what it found and did, and its exit code, from the value that --json prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clawd.ctl import render

TAKEN = {"done": "is now", "kept": "keeps", "gone": "is gone", "elsewhere": "stays", "failed": "FAILED"}


def code(value: dict[str, Any]) -> int:
    """1 when a place could not be brought to what was asked for, 4 when one has drifted."""
    if any(outcome["result"] == "failed" for outcome in value.get("outcomes", ())):
        return 1
    return 4 if value.get("drift") else 0


def text(value: dict[str, Any]) -> str:
    parts = [*_head(value), *_PART[value["action"]](value), *_notes(value)]
    lines = [line for part in parts for line in part.split("\n")]
    return "\n".join(render.fold(line, 4) if len(line) > render.width() else line for line in lines)


def _head(value: dict[str, Any]) -> Iterator[str]:
    found = value["netns"]
    whose = {True: " (the host's)", False: " (not the host's)", None: ""}[found["is_host"]]
    about = f"profile {value['profile']}: {render.cell(value['about'])}; " if "profile" in value else ""
    yield f"{about}network namespace {found['inode']}{whose}"


def _show(value: dict[str, Any]) -> Iterator[str]:
    header = ("name", "now", "wanted", "state", "reaches", "scope")
    rows = [_cells(row) for row in value["rows"]]
    wide = [2 + max(len(render.cell(cell)) for cell in column) for column in zip(header, *rows, strict=True)]
    # names are worth more than the last columns
    kept = max([4, *(count for count in (5, 6) if sum(wide[:count]) <= render.width() + 2)])
    yield render.table(header[:kept], [row[:kept] for row in rows])
    yield from _remarks(value["rows"])


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    values = (_value(row, "live"), _value(row, "wanted"))
    return (_name(row), *values, row["state"], row["takes"], row["scope"].replace("network namespace", "netns"))


def _remarks(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What a table has no room for."""
    for row in rows:
        for told in (row["why"], row["moot"], row["boot"] and f"at the next boot {row['boot']}"):
            if told:
                yield f"  {_name(row)}: {render.cell(told)}"


def _name(row: dict[str, Any]) -> str:
    place = row["place"]
    return place["name"] if place["kind"] == "sysctl" else f"{place['kind']} {place['name']}"


def _value(row: dict[str, Any], key: str) -> str | None:
    found: str | None = row[key]
    is_time = row["place"]["kind"] == "slice" and found
    return render.duration(int(found)) if is_time and found else found


def _plan(value: dict[str, Any]) -> Iterator[str]:
    changes = value["changes"]
    if not changes:
        yield "nothing to change"
        return
    reasons = {_name(row): row["reason"] for row in value.get("rows", ())}
    yield "would do:"
    for change in changes:
        yield from _operations(change["operations"], is_disruptive=change["is_disruptive"])
        if reasons.get(_name(change)):
            yield f"    # {render.cell(reasons[_name(change)])}"
    yield "and take it back by:"
    for change in reversed(changes):
        yield from _operations(change["undo"], is_disruptive=change["is_disruptive"])


def _operations(operations: list[str], *, is_disruptive: bool) -> Iterator[str]:
    for operation in operations:
        yield f"  {operation}"
    if is_disruptive:
        yield "    # disruptive: drops what is queued there, and halts the device for a moment"


def _apply(value: dict[str, Any]) -> Iterator[str]:
    yield from _outcomes(value)
    if not value["outcomes"]:
        yield "nothing to change"
    yield from _remarks([row for row in value["rows"] if row["state"] == "n/a"])


def _revert(value: dict[str, Any]) -> Iterator[str]:
    yield from _outcomes(value)
    if not value["outcomes"]:
        yield "nothing to take back"


def _outcomes(value: dict[str, Any]) -> Iterator[str]:
    for outcome in value["outcomes"]:
        told = TAKEN[outcome["result"]]
        if outcome["result"] in ("done", "kept"):
            told += f" {outcome['value']}"
        why = f": {render.cell(outcome['why'])}" if outcome["why"] else ""
        yield f"  {_name(outcome)} {told}{why}"


def _verify(value: dict[str, Any]) -> Iterator[str]:
    drifts = value["drift"]
    for drift in drifts:
        by = f"; {render.cell(drift['by'])}" if drift["by"] else ""
        yield (
            f"  {_name(drift)} is {drift['live']} and not {drift['wanted']}: {drift['what']}{by}"
            if (drift["live"] != drift["wanted"])
            else f"  {_name(drift)} is {drift['live']}, but {drift['what']}{by}"
        )
    good = sum(row["state"] == "ok" for row in value["rows"]) - sum(d["live"] == d["wanted"] for d in drifts)
    yield f"{good} as asked for, {len(drifts)} not" + ("; clawctl tune apply" if drifts else "")
    yield from _remarks([row for row in value["rows"] if row["state"] == "n/a"])


def _notes(value: dict[str, Any]) -> Iterator[str]:
    yield from (f"note: {render.cell(note)}" for note in value.get("notes", ()))


_PART = {"show": _show, "plan": _plan, "apply": _apply, "revert": _revert, "verify": _verify}
