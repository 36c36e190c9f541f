# SPDX-License-Identifier: Apache-2.0
"""`clawctl keys relay ACTION [NAME]`: who may connect by tcp. Files only: clawd looks at them by itself."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from clawd import keys, stats
from clawd.ctl import render
from clawd.errors import ControlError, HostError
from clawd.sources import Sources

ABOUT = (
    "relay new NAME: make a key for a client, and let it in; its secret goes to NAME.key, for the client's host alone."
    " relay list: who may connect, and clawd's own public key, which every client needs."
    " relay allow NAME KEY: let in a key that was made elsewhere, by its public half."
    " relay revoke NAME: no more, and its clients are cut off within a second. clawd need not run."
)
ACTIONS = {"new": 1, "list": 0, "allow": 2, "revoke": 1}
"""How many words each takes after it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys-dir", type=Path, metavar="DIR", help="where they are (default: as clawd.conf says)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of new: where the secret goes (default NAME.key)")
    parser.add_argument("--role", choices=keys.ROLES, default="consumer", help="of new and allow (default consumer)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and leave it")


def run(options: argparse.Namespace) -> int:
    if options.action not in ACTIONS:
        print(
            f'clawctl: no action "{render.cell(options.action)}" of keys relay; there is {", ".join(ACTIONS)}',
            file=sys.stderr,
        )
        return 2
    value = collect(options)
    print(json.dumps(value) if options.json else show(value), flush=True)
    return 0


def collect(options: argparse.Namespace) -> dict[str, Any]:
    action, operands = options.action, options.operands
    if len(operands) != ACTIONS[action]:
        words = {0: "no name", 1: "one NAME", 2: "NAME and KEY"}[ACTIONS[action]]
        raise ControlError(f"keys relay {action} takes {words}", "clawctl keys --help has an example")
    directory = options.keys_dir or Sources().load().config.keys_dir
    value = {"version": stats.VERSION, "action": action, "keys_dir": str(directory), "dry_run": options.dry_run}
    if action == "list":
        return value | _list(directory)
    name = operands[0]
    if not keys.NAME.fullmatch(name):
        raise ControlError(f'"{render.cell(name)}" is no name for a key', "use letters, digits, '.', '_' and '-'")
    if action == "revoke":
        return value | {"name": name} | _revoke(directory, name, options.dry_run)
    if (directory / keys.ALLOW_DIR / name).exists():
        raise ControlError(
            f'there is a key "{name}" already', f"clawctl keys relay revoke {name}, or take another name"
        )
    if action == "allow":
        public = keys.read_public(operands[1])
        if not options.dry_run:
            keys.make_server(directory)
            keys.allow(directory, keys.Allowed(name, public, options.role))
        return value | {"name": name, "public": public, "role": options.role}
    return value | _new(directory, name, options)


def _new(directory: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    out = (options.out or Path(f"{name}.key")).absolute()
    made = {"name": name, "role": options.role, "file": str(out)}
    if options.dry_run:
        return made
    server, pair = keys.make_server(directory), keys.make_pair()
    keys.write_pair(out, pair, f"relay key {name}: secret, for the client's host alone")
    try:
        keys.allow(directory, keys.Allowed(name, pair.public, options.role))
    except HostError:
        out.unlink()
        raise
    return made | {"public": pair.public, "server_public": server.public}


def _list(directory: Path) -> dict[str, Any]:
    path = directory / keys.SERVER_FILE
    if not path.exists():
        raise ControlError(f'there are no keys in "{directory}"', "make one: clawctl keys relay new NAME")
    allow = keys.AllowList(directory)
    allow.refresh()
    return {
        "server_public": keys.read_public(path),
        "keys": [{"name": each.name, "role": each.role, "public": each.public} for each in allow.all()],
        "flaws": allow.flaws,
    }


def _revoke(directory: Path, name: str, dry_run: bool) -> dict[str, Any]:
    path = directory / keys.ALLOW_DIR / name
    try:
        if dry_run:
            path.stat()
        else:
            os.unlink(path)
    except OSError as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else error.strerror
        raise ControlError(
            f'cannot revoke "{name}": {reason}', "clawctl keys relay list shows what there is"
        ) from error
    return {}


def show(value: dict[str, Any]) -> str:
    action, name = value["action"], value.get("name", "")
    would = "would " if value["dry_run"] else ""
    if action == "list":
        rows = [(each["name"], each["role"], each["public"]) for each in value["keys"]]
        flaws = "".join(f"\npassed over: {flaw}" for flaw in value["flaws"])
        return f"server key {value['server_public']}\n\n{render.table(('name', 'role', 'public key'), rows)}{flaws}"
    if action == "revoke":
        return f"{would}revoke{'' if would else 'd'} {name}"
    if action == "allow":
        return f"{would}allow{'' if would else 'ed'} {name} as {value['role']}"
    if would:
        return f"would make a key for {name} as {value['role']}, its secret in {value['file']}"
    return (
        f"made a key for {name} as {value['role']}: take {value['file']} to its host\n"
        f"server key {value['server_public']}"
    )
