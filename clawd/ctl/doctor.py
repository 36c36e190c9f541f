# SPDX-License-Identifier: Apache-2.0
"""`clawctl doctor`: what is wrong with this host or this clawd, and the command that puts it right. Changes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from clawd import stats
from clawd.ctl import render
from clawd.ctl.check import Finding, find_daemon, find_host
from clawd.ctl.features import find_features
from clawd.ctl.hardware import find_hardware
from clawd.ctl.helper import check_helper, find_wishes
from clawd.ctl.symptoms import find_symptoms
from clawd.ctl.tuned import find_tuned

HELP = "check this host and this clawd, and say what to do"
ABOUT = (
    "Each line is ok, info, warn or fail, for what it matters, what was found, and what to do about it. relay is what"
    " clawd is, the other features are extras. Exit 0 when all is ok or info, 4 when something only warns, 1 when"
    " something fails. Run it as root or as clawd's own user to see everything."
)
EXAMPLE = "clawctl doctor --json | jq '.checks[] | select(.fix)'"
_CODE = {"ok": 0, "warn": 4, "fail": 1}


def collect(options: argparse.Namespace) -> dict[str, Any]:
    findings = list(_findings(options))
    levels = {finding.level for finding in findings}
    result = "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"
    return {"version": stats.VERSION, "result": result, "checks": [vars(finding) for finding in findings]}


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from find_daemon(options.runtime_dir)
    yield from find_symptoms(options.runtime_dir)
    yield from find_host(options.runtime_dir)
    yield from find_features(options.runtime_dir)
    yield check_helper(wishes=find_wishes(options.runtime_dir))
    yield from find_tuned()
    yield from find_hardware()


def show(value: dict[str, Any]) -> str:
    lines = []
    for row in value["checks"]:
        fix = f"; {row['fix']}" if row["fix"] else ""
        lines.append(render.fold(f"{row['level']:<6}{row['feature']:<10}{render.cell(row['what'] + fix)}", 16))
    return "\n".join(lines)


def code(value: dict[str, Any]) -> int:
    return _CODE[value["result"]]
