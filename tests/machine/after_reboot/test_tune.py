# SPDX-License-Identifier: Apache-2.0
"""The second boot: what the first one tuned is gone with it, and the settings' profile is there by itself."""

from __future__ import annotations

import json
from pathlib import Path

from host import entries, run


def get(key: str) -> str:
    return Path("/proc/sys", key.replace(".", "/")).read_text().strip()


def test_the_settings_profile_is_applied_and_the_first_boots_is_gone() -> None:
    told = [entry for entry in entries("_SYSTEMD_UNIT=clawd-kernel.service") if
            str(entry["MESSAGE"]).startswith("tuned ")]  # fmt: skip
    assert [(entry["PROFILE"], entry["FAILED"]) for entry in told] == [("low-latency", "0")]
    assert get("net.ipv4.tcp_fastopen") == "3"
    assert get("net.ipv4.tcp_slow_start_after_idle") == "0"
    assert get("net.ipv4.tcp_congestion_control") != "bbr"
    verified = json.loads(run("clawctl", "tune", "verify", "--json").stdout)
    assert (verified["profile"], verified["drift"], verified["notes"]) == ("low-latency", [], [])
    assert {row["live"] for row in verified["rows"] if row["place"]["kind"] == "slice"} == {"500000"}


def test_it_goes_back_to_what_the_kernel_starts_with() -> None:
    run("clawctl", "tune", "revert")
    assert (get("net.ipv4.tcp_fastopen"), get("net.ipv4.tcp_tw_reuse")) == ("1", "2")
    assert not Path("/var/lib/clawd-kernel/tune.journal").exists()
