# SPDX-License-Identifier: Apache-2.0
"""While one stream flows to the one tcp client, change the way to it; prints as JSON how many round trips later clawd's
pacers knew of each change, and how much later than the kernel. The command that makes a change counts in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(sys.argv[1])

from tests.seen import Known, Watch

PATIENCE_S = 120.0


def send(*quality: str) -> None:
    """What goes to the client."""
    subprocess.run(["tc", "qdisc", "replace", "dev", "claw-near", "root", "netem", *quality], check=True)


def lost() -> int:
    """Packets that the way to the client has lost so far."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", "claw-near", "root"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return int(told[0]["drops"])


def settled(known: Known) -> bool:
    return 900_000 <= known.rtt_us < 1_500_000 and known.jitter_us < 60_000


def main() -> None:
    rtts = {}
    with Watch(Path("/run/clawd"), PATIENCE_S) as watch:
        send("delay", "1s")
        watch.until(settled, "the way as it is")
        since_ns, before = time.monotonic_ns(), lost()
        send("delay", "1s", "loss", "100%")
        while lost() < before + 2:  # each look takes its time: a process is started
            pass
        send("delay", "1s")
        rtts["loss"] = watch.rise("loss_ppm", 3000, "the loss").rtts(since_ns)
        watch.until(settled, "the way as it was")
        since_ns = time.monotonic_ns()
        send("delay", "1s", "500ms")
        rtts["jitter"] = watch.rise("jitter_us", 40_000, "the jitter").rtts(since_ns)
        send("delay", "1s")
        watch.until(settled, "the way as it was, again")
        since_ns = time.monotonic_ns()
        send("delay", "2s")
        # The measured round trip is smoothed: it has only begun to grow
        rtts["delay"] = watch.rise("rtt_us", 60_000, "the delay")._replace(rtt_us=2_000_000).rtts(since_ns)
        lag_ms = sorted(watch.lags_ns)[len(watch.lags_ns) // 2] / 1e6
    print(json.dumps({"rtts": {name: round(value, 2) for name, value in rtts.items()}, "lag_ms": round(lag_ms)}))


main()
