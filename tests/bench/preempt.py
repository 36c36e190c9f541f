# SPDX-License-Identifier: Apache-2.0
"""How long first tokens take through clawd beside processes that want every processor: without weights, with static
ones, with ones that are flipped, each beside an idle host, interleaved. In cgroups of its own, for which it needs root
and cgroup v2 with the cpu controller.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from clawd import Consumer, Producer
from clawd.core import lib
from clawd.ctl import helper as ctl_helper
from clawd.ctl import render
from clawd.errors import HostError
from clawd.kernel import tree
from clawd.kernel.weight import find_mount
from clawd.page import Page, read_instance
from clawd.server import memory
from clawd.server.pressure import read_delay

ARMS = ("idle", "nothing", "static", "flipping")
HOGS_PER_CPU = 4
PLAIN = 100
"""What the kernel gives a cgroup, and what those have that want every processor."""
THINK_S = 0.1
"""From an OPEN to its first token: an engine's prefill, and time for a boost to come."""
PAUSE_S = (0.0, 0.5)
"""Between two streams: now and then long enough for a boost to end."""
ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


class Groups:
    """`clawd.slice` and `clawd_background.slice` beside `hogs` and `peers`, in a cgroup of its own."""

    NAMES = (*(branch.name for branch in tree.load()), "hogs", "peers")

    def __init__(self) -> None:
        self.root = find_mount() / f"clawd-bench-{os.getpid()}"

    def __enter__(self) -> Groups:
        if os.geteuid() != 0:
            raise HostError("cgroups are root's to make", "run it as root")
        parent = self.root.parent / "cgroup.subtree_control"
        if "cpu" not in parent.read_text().split():
            raise HostError(
                f'the cpu controller is not on for children of "{self.root.parent}"', f'echo +cpu >"{parent}"'
            )
        self.root.mkdir()
        (self.root / "cgroup.subtree_control").write_text("+cpu")
        for name in self.NAMES:
            (self.root / name).mkdir()
        # only the path through clawd is measured: who writes and who reads is never late
        self.weigh("peers", tree.WEIGHTS[1])
        return self

    def __exit__(self, *_: object) -> None:
        for path in (*(self.root / name for name in self.NAMES), self.root):
            for _try in range(200):  # a process that was killed leaves it a moment later
                try:
                    path.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)

    def weigh(self, name: str, weight: int) -> None:
        (self.root / name / "cpu.weight").write_text(str(weight))

    def command(self, name: str, *words: str) -> list[str]:
        return ["sh", "-c", ENTER, str(self.root / name), *words]

    @contextmanager
    def started(
        self, name: str, *words: str, environment: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """A process in that cgroup, once it says ready; killed at the end."""
        process = subprocess.Popen(
            self.command(name, *words), stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        try:
            assert process.stderr
            said = []
            for line in process.stderr:
                said.append(line)
                if " ready " in line:
                    break
            else:
                raise HostError(f"{words[2]} did not start: {''.join(said)}")
            yield process
        finally:
            process.terminate()
            process.wait()
            if process.stderr:
                process.stderr.close()

    @contextmanager
    def hogs(self, count: int) -> Iterator[None]:
        made = [subprocess.Popen(self.command("hogs", sys.executable, "-c", "while True: pass")) for _ in range(count)]
        try:
            while not all((Path(f"/proc/{each.pid}/comm").read_text() != "sh\n") for each in made):
                time.sleep(0.01)
            yield
        finally:
            for process in made:
                process.kill()
                process.wait()


def run_arm(groups: Groups, arm: str, streams: int, seed: int) -> dict[str, float]:
    rest = {branch.name: branch.weights[0] for branch in tree.load()}
    for name, weight in rest.items():
        groups.weigh(name, weight if arm in ("static", "flipping") else PLAIN)
    with tempfile.TemporaryDirectory(prefix="clawd-") as directory, ExitStack() as stack:
        place = Path(directory)
        relay, kernel = place / "run", place / "kernel"
        slices = next(iter(rest))
        environment = {"CLAWD_KERNEL_DIR": str(kernel)}
        if arm == "flipping":
            command = ["clawd.kernel", "--dir", str(kernel), "--state-dir", str(place / "state"), "--user", "root"]
            command += ["--config", os.devnull, "--cgroup", str(groups.root / slices)]
            stack.enter_context(groups.started(slices, sys.executable, "-m", *command))
        flags = ["--boost", "on" if arm == "flipping" else "off", "--pressure", "off", "--pace", "off"]
        command = ["clawd", "--config", os.devnull, "--runtime-dir", str(relay), *flags]
        daemon = stack.enter_context(groups.started(slices, sys.executable, "-m", *command, environment=environment))
        stack.callback(lambda: memory.sweep(read_instance(relay)))
        page = stack.enter_context(Page(relay))
        if arm != "idle":
            stack.enter_context(groups.hogs(HOGS_PER_CPU * (os.cpu_count() or 1)))
        before = read_delay(Path(f"/proc/{daemon.pid}/task"))
        traffic = [sys.executable, "-m", "tests.bench.preempt", "--traffic", str(relay)]
        traffic += ["--streams", str(streams), "--seed", str(seed)]
        subprocess.run(groups.command("peers", *traffic), check=True)
        waited_ns, runs = (
            after - earlier for after, earlier in zip(read_delay(Path(f"/proc/{daemon.pid}/task")), before, strict=True)
        )
        count, (p50, p90, p99, most) = page.quantiles(lib.CLAW_HIST_SEND, (0.5, 0.9, 0.99, 1.0))
        boosting = ctl_helper.look(kernel)["boosting"] if arm == "flipping" else None
        return {
            "p50_us": p50 / 1000,
            "p90_us": p90 / 1000,
            "p99_us": p99 / 1000,
            "max_us": most / 1000,
            "wait_us": waited_ns / max(1, runs) / 1000,
            "lost": streams - count,
            "writes": boosting["writes"] if boosting else 0,
        }


def traffic(directory: str, streams: int, seed: int) -> None:
    """One stream after the other, each of one token, which is its first."""
    rng = random.Random(seed)
    with Producer(name="bench", runtime_dir=directory) as producer, Consumer(runtime_dir=directory) as consumer:
        for number in range(streams):
            reading = consumer.attach(f"s{number}")
            stream = producer.open(f"s{number}")
            time.sleep(THINK_S)
            stream.write("a token")
            reading.read(60)
            stream.close("stop")
            time.sleep(rng.uniform(*PAUSE_S))


def compare(streams: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Every arm once a round. Medians over rounds; `ratio` is p99 ÷ that of the idle host in the same round, `spread`
    the least and the most of it.
    """
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with Groups() as groups:
        for number in range(rounds):
            for arm in ARMS:
                found[arm].append(run_arm(groups, arm, streams, number))
    result: dict[str, dict[str, Any]] = {}
    for arm, rows in found.items():
        ratios = [row["p99_us"] / max(1.0, idle["p99_us"]) for row, idle in zip(rows, found["idle"], strict=True)]
        medians = {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}
        result[arm] = {
            **medians,
            "lost": sum(row["lost"] for row in rows),
            "ratio": round(statistics.median(ratios), 2),
        }
        result[arm]["spread"] = [round(min(ratios), 2), round(max(ratios), 2)]
    return result


def show(result: dict[str, dict[str, Any]]) -> str:
    header = ("first tokens", "p50", "p90", "p99", "max", "p99 / idle", "spread", "a wait", "writes")
    rows = [
        (arm, *(f"{row[name]:.0f}" for name in ("p50_us", "p90_us", "p99_us", "max_us")), f"{row['ratio']:.2f}",
         "{:.2f}-{:.2f}".format(*row["spread"]), f"{row['wait_us']:.0f}", f"{row['writes']:.0f}")
        for arm, row in result.items()
    ]  # fmt: skip
    static, flipping = result["static"], result["flipping"]
    beats = flipping["spread"][1] < static["spread"][0]
    verdict = (
        "flipping beats static weights" if beats else "flipping does not beat static weights by more than the spread"
    )
    head = f"written to sent, beside {HOGS_PER_CPU} busy processes a processor (microseconds)"
    return f"{head}\n{render.table(header, rows, 120)}\n{verdict}\n"


def run(streams: int, rounds: int, *, as_json: bool) -> int:
    try:
        result = compare(streams, rounds)
    except HostError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"version": 1, "preempt": result}) if as_json else show(result))
    return 1 if sum(row["lost"] for row in result.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--traffic", metavar="DIR")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.traffic:
        traffic(options.traffic, options.streams, options.seed)
        return 0
    return run(options.streams, options.rounds, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
