# SPDX-License-Identifier: Apache-2.0
"""`clawctl config`: the settings in effect, a file checked before it counts, a setting explained."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

from clawd import manual, protocol
from clawd.config import ROWS, SETTINGS
from clawd.ctl import pages, render
from clawd.ctl.client import Client
from clawd.errors import ConfigErrors
from clawd.sources import DEFAULT_FILE, Sources, nearest

HELP = "show, check and explain settings"
EXAMPLE = "clawctl config check clawd.conf"
ABOUT = (
    "show: what the running clawd has in effect, where each was set, what a reload or a restart would change."
    " check [FILE]: all that is wrong with FILE and its drop-ins. explain [KEY]: what a setting means and may be."
    " default: a clawd.conf that explains itself. All but show need no clawd."
)
VERSION = 1
VALUE_COLUMNS, FILE_COLUMNS = 20, 12
OPERANDS = {"show": 0, "check": 1, "explain": 1, "default": 0, "man": 1}
"""How many words each action takes; `man [PAGE]` is for the installer."""
ACTIONS = tuple(OPERANDS)[:-1]
WORDS = (*ACTIONS, *ROWS)
"""What a shell completes."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", default="show", metavar="ACTION", help=f"{', '.join(ACTIONS)}")
    parser.add_argument("operand", nargs="?", metavar="FILE|KEY", help="of check and explain")


def run(options: argparse.Namespace) -> int:
    action, operand = options.action, options.operand
    if action not in OPERANDS:
        near = difflib.get_close_matches(action, ACTIONS, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"there is {', '.join(ACTIONS)}"
        return _usage(f'no action "{render.cell(action)}" of config; {hint}')
    if operand is not None and not OPERANDS[action]:
        return _usage(f'config {action} takes no "{render.cell(operand)}"')
    if action == "check":
        return _check(Path(operand).absolute() if operand is not None else None, as_json=options.json)
    if action == "explain":
        return _explain(operand, as_json=options.json)
    if action == "show":
        value = collect(options)
        print(json.dumps(value) if options.json else show(value), flush=True)
    elif action == "default":
        print(manual.sample(), end="", flush=True)
    else:
        return _man(operand or "clawd.conf", options)
    return 0


def _man(page: str, options: argparse.Namespace) -> int:
    if page == "clawd.conf":
        text = manual.man_page()
    elif page in pages.PROGRAMS:
        text = pages.program_page(page)
    elif page == "clawctl":
        text = pages.clawctl_page(options.parsers())
    else:
        return _usage(
            f'no manual page "{render.cell(page)}"; there is clawd.conf, clawctl, {", ".join(pages.PROGRAMS)}'
        )
    print(text, end="", flush=True)
    return 0


def _usage(message: str) -> int:
    print(f"clawctl: {message}", file=sys.stderr)
    return 2


# --- show ---


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """What the daemon runs with, beside what its files say now."""
    with Client(options.runtime_dir) as client:
        answer = client.ask(protocol.Settings(), protocol.InEffect)
    sources = Sources(Path(answer.file) if answer.file else None, answer.flags)
    try:
        wanted, file_errors = sources.load(), []
    except ConfigErrors as errors:
        wanted, file_errors = None, [str(error) for error in errors.errors]
    rows = []
    for key, text in answer.values.items():
        row = ROWS.get(key)  # None: it is of a later clawd
        file_text = row.kind.format(getattr(wanted.config, key)) if row and wanted else None
        if row and wanted and row.variable and wanted.origins[key].is_default:
            file_text = None  # the daemon's environment decides, not ours
        rows.append(
            {
                "section": row.section if row else None,
                "key": key,
                "value": row.raw(text) if row else None,
                "text": text,
                "origin": answer.origins.get(key),
                "applied_by": row.applied if row else None,
                "file_text": file_text,
                "differs": None if file_text is None else file_text != text,
            }
        )
    state = {name: getattr(answer, name) for name in ("generation", "loaded_ns", "error", "pending_restart")}
    return {"version": VERSION, **state, "file": str(sources.main_file), "file_errors": file_errors, "settings": rows}


def show(value: dict[str, Any]) -> str:
    rows = value["settings"]
    waiting = [row for row in rows if row["differs"]]
    header = ["key", "value", "files say", "set in"] if waiting else ["key", "value", "set in"]
    texts = []
    for row in rows:
        news = [_end(row["file_text"] if row["differs"] else "", FILE_COLUMNS)] if waiting else []
        texts.append([row["key"], _end(row["text"], min(VALUE_COLUMNS, max(8, render.width() - 10))), *news])
    used = sum(
        2 + max(len(text) for text in (name, *column)) for name, *column in zip(header[:-1], *texts, strict=True)
    )
    for row, text in zip(rows, texts, strict=True):
        text.append(_end(row["origin"], max(12, render.width() - used)))
    lines = [render.table(header, texts)]
    for by, what in (("reload", "clawctl reload applies"), ("restart", "a restart is needed for")):
        keys = [row["key"] for row in waiting if by == _applied_by(row, value["pending_restart"])]
        if keys:
            lines += ["", _sentence(f"{what}: {', '.join(keys)}")]
    if value["file_errors"]:
        lines += ["", _sentence(f"the files have errors now; see: clawctl config check {value['file']}")]
    if value["error"]:
        lines += ["", _sentence(f"the last reload failed: {value['error']}")]
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return render.fold(render.cell(text), 0)


def _applied_by(row: dict[str, Any], pending: list[str]) -> str:
    # one that a reload applies waits, too, for a restart that makes it possible
    return "restart" if row["key"] in pending else str(row["applied_by"])


def _end(text: str, columns: int) -> str:
    """At most so many columns: of a long path the end tells more."""
    return text if len(text) <= columns else "…" + text[1 - columns :]


# --- check ---


def _check(file: Path | None, *, as_json: bool) -> int:
    try:
        found, errors = Sources(file).load(), []
    except ConfigErrors as error:
        found, errors = None, error.errors
    if as_json:
        value = {
            "version": VERSION,
            "ok": not errors,
            "files": [str(path) for path in found.files] if found else [],
            "errors": [
                {
                    "file": error.file,
                    "line": error.line,
                    "key": error.key,
                    "value": error.value,
                    "message": error.message,
                    "hint": error.hint,
                }
                for error in errors
            ],
        }
        print(json.dumps(value), flush=True)
    elif found:
        count = sum(origin.line is not None for origin in found.origins.values())
        files = ", ".join(render.cell(path) for path in found.files)
        where = f"in {files}" if files else f"as there is no {DEFAULT_FILE}"
        print(f"good: {count} of {len(SETTINGS)} settings set {where}", flush=True)
    else:
        print(*errors, sep="\n", file=sys.stderr)
    return 1 if errors else 0


# --- explain ---


def _explain(key: str | None, *, as_json: bool) -> int:
    if key is not None and key not in ROWS:
        return _usage(f'no setting "{render.cell(key)}"; {nearest(key, tuple(ROWS))}')
    chosen = SETTINGS if key is None else (ROWS[key],)
    if as_json:
        rows = [
            {
                "section": row.section,
                "key": row.key,
                "flag": row.flag,
                "default": manual.default(row),
                "allowed": row.allowed or None,
                "applied_by": row.applied,
                "help": row.help,
                "detail": row.detail or None,
            }
            for row in chosen
        ]
        print(json.dumps({"version": VERSION, "settings": rows}), flush=True)
    elif key is None:
        print(manual.overview(render.width()), flush=True)
    else:
        print(manual.explanation(ROWS[key], render.width()), flush=True)
    return 0
