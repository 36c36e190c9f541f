# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench`: clawd beside plain pyzmq and beside today's engine pattern, interleaved, medians of all rounds."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from typing import Any

import zmq

from clawd import __version__
from clawd.ctl import render
from tests.bench import firsts, gateway, network, pacing, preempt, producer, recovery, text, trace
from tests.bench.run import PATHS, Load, harness_cpu_s, measure

STREAMS = 100
HELD_S = 60.0
"""How long the gateway's connections are held."""
FIGURES = ("p50_us", "p99_us", "held_p50_us", "held_p99_us", "producer_cpu_us", "relay_cpu_us", "receiver_cpu_us")

RATIOS = {
    "p50": "p50_us",
    "p99": "p99_us",
    "tokens/s": "tokens_per_s",
    "held p50": "held_p50_us",
    "cpu recv": "receiver_cpu_us",
}


def loads(seconds: float) -> dict[str, Load]:
    """The shapes of design §12."""
    return {
        "poisson": Load(rate=28_000, count=int(28_000 * seconds), step=1, streams=STREAMS),
        "steps": Load(rate=28_000, count=int(28_000 * seconds) // 100 * 100, step=100, streams=STREAMS),
        "sparse": Load(rate=200, count=max(100, int(200 * seconds)), step=1, streams=10),
        "throughput": Load(rate=0, count=int(400_000 * seconds) // 100 * 100, step=100, streams=STREAMS),
    }


def compare(load: Load, paths: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Every path once a round, in turn, so that a machine that drifts does so for all."""
    runs: dict[str, list[dict[str, float]]] = {path: [] for path in paths}
    pace = [harness_cpu_s(load) for _ in range(min(rounds, 3))] if load.rate else [0.0]
    pace_us = statistics.median(pace) * 1e6 / load.count
    for _ in range(rounds):
        for path in paths:
            figures = measure(path, load)
            figures["producer_cpu_us"] = max(0.0, figures["producer_cpu_us"] - pace_us)
            runs[path].append(figures)
    result: dict[str, Any] = {}
    for path, all_figures in runs.items():
        result[path] = {name: statistics.median(each[name] for each in all_figures) for name in all_figures[0]}
        for name in ("p50_us", "p99_us"):
            values = [each[name] for each in all_figures]
            result[path][f"{name}_spread"] = [min(values), max(values)]
        result[path]["lost"] = sum(each["lost"] for each in all_figures)
    return result


def show(name: str, result: dict[str, Any]) -> str:
    header = (
        "path",
        "p50",
        "p99",
        "spread of p50",
        "of p99",
        "held p50",
        "held p99",
        "cpu prod",
        "relay",
        "recv",
        "tokens/s",
    )
    rows = []
    for path, each in result.items():
        spreads = ["{:.0f}-{:.0f}".format(*each[f"{figure}_spread"]) for figure in ("p50_us", "p99_us")]
        micro = [f"{each[figure]:.1f}" if each[figure] < 100 else f"{each[figure]:.0f}" for figure in FIGURES]
        rows.append((path, *micro[:2], *spreads, *micro[2:], f"{each['tokens_per_s']:.0f}"))
    lines = [f"{name} (microseconds; cpu in us a token)", render.table(header, rows, 130)]
    for path, other in ((path, other) for path in ("clawd", "clawd-tasks") for other in ("pyzmq", "engine")):
        if path in result and other in result:
            lines.append(f"{path} / {other}: {ratios(result[path], result[other])}")
    return "\n".join(lines) + "\n"


def ratios(ours: dict[str, Any], other: dict[str, Any]) -> str:
    """Of the medians, and of the processor time of all processes and of the receiving one."""
    shares = {name: (ours[figure], other[figure]) for name, figure in RATIOS.items()}
    every = [sum(each[figure] for figure in FIGURES[4:]) for each in (ours, other)]
    shares["cpu of all"] = (every[0], every[1])
    return ", ".join(f"{name} {mine / theirs if theirs else 0.0:.2f}x" for name, (mine, theirs) in shares.items())


def show_costs(costs: dict[str, Any]) -> str:
    rows = []
    for name, each in costs.items():
        bound = "-" if each["bound_us"] is None else f"{each['bound_us']:g}"
        rows.append((name, f"{each['p50_us']:.3f}", f"{each['p99_us']:.3f}", bound))
    return "producer (microseconds)\n" + render.table(("what", "p50", "p99", "bound"), rows, 110) + "\n"


def cpu_list(text: str) -> set[int]:
    """The CPUs of "0,2"; raises ValueError, which argparse shows, unless this process may use each."""
    cpus = {int(word) for word in text.split(",")}
    if not cpus <= os.sched_getaffinity(0):
        raise ValueError
    return cpus


def through_gateway(seconds: float, rounds: int, options: argparse.Namespace) -> int:
    result = gateway.compare(seconds, rounds)
    if options.json:
        print(json.dumps({"version": 1, "seconds": seconds, "rounds": rounds, "gateway": result}))
    else:
        print(gateway.show(result, seconds))
    return 1 if result["clawd"]["errors"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure clawd beside plain pyzmq PUSH/PULL and beside today's engine pattern (msgspec batches into"
        " asyncio queues). Needs a quiet machine; every figure is a median over rounds, interleaved.",
    )
    what = "relay: written to read; producer: what a write costs; text: what a token's class costs; pacing: even gaps"
    what += " (default: all these); gateway: events over HTTP, for a minute; recovery: kill -9 to the next token;"
    what += " trace: what shaping and tracing cost, as root; network: first tokens over bad ways, and tcp beside ipc;"
    what += " preempt: first tokens beside busy processes, as root"
    kinds = ("relay", "producer", "text", "pacing", "gateway", "recovery", "trace", "network", "preempt")
    parser.add_argument("what", nargs="?", choices=kinds, help=what)
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="of clawd, for recovery (default 100)")
    parser.add_argument("--pin", type=cpu_list, metavar="CPUS", help='run everything on these, as "0,2" (default: all)')
    parser.add_argument("--load", choices=tuple(loads(1)), action="append", help="only this load; may be repeated")
    parser.add_argument("--path", choices=tuple(PATHS), action="append", help="only this path; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times each path runs (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="length of a run (default 2)")
    parser.add_argument("--smoke", action="store_true", help="one short round: only that all of it works")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    options = parser.parse_args()
    if options.pin:
        os.sched_setaffinity(0, options.pin)  # inherited by every process of the benchmark
    rounds, seconds = (1, 0.3) if options.smoke else (options.rounds, options.seconds)
    if options.what == "trace":
        measured = trace.compare(smoke=options.smoke)
        print(json.dumps({"version": 1, "trace": measured}) if options.json else trace.show(measured))
        return 0
    if options.what == "preempt":
        return preempt.run(10 if options.smoke else 200, rounds, as_json=options.json)
    if options.what == "gateway":
        return through_gateway(
            2.0 if options.smoke else max(options.seconds, HELD_S), 1 if options.smoke else 3, options
        )
    chosen = loads(seconds)
    paths = tuple(options.path or PATHS)
    if "clawd" not in paths:
        parser.error("--path clawd is what the others are compared with")
    results: dict[str, Any] = {}
    costs = producer.measure(min(seconds, 1.0), min(rounds, 3)) if options.what in (None, "producer") else {}
    if costs and not options.json:
        print(show_costs(costs), flush=True)
    classes = text.compare(40 if options.smoke else 400) if options.what in (None, "text") else {}
    if classes and not options.json:
        print(text.show(classes), flush=True)
    paces = (
        pacing.run(2 if options.smoke else 10, min(rounds, 3), smoke=options.smoke)
        if options.what in (None, "pacing")
        else {}
    )
    beside = firsts.run(min(rounds, 3), 20 if options.smoke else 1000) if options.what in (None, "pacing") else {}
    if paces and not options.json:
        print(pacing.show(paces), firsts.show(beside), sep="\n", flush=True)
    ends = {}
    if options.what == "recovery":
        ends = recovery.measure(5 if options.smoke else options.kills, rounds, 1 << (24 if options.smoke else 30))
        if not options.json:
            print(recovery.show(ends), flush=True)
    ways = {}
    if options.what == "network":
        ways = network.run(1, 3, 20_000) if options.smoke else network.run(min(rounds, 3), 60, 1_000_000)
    if ways and not options.json:
        print(network.show(ways), flush=True)
    for name in (options.load or chosen) if options.what in (None, "relay") else ():
        results[name] = compare(chosen[name], paths, rounds)
        if not options.json:
            print(show(name, results[name]), flush=True)
    about = {
        "clawd": __version__,
        "python": platform.python_version(),
        "pyzmq": zmq.pyzmq_version(),
        "libzmq": zmq.zmq_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "pinning": ",".join(map(str, sorted(options.pin))) if options.pin else "none",
        "load": round(os.getloadavg()[0], 2),
        "rounds": rounds,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if options.json:
        print(
            json.dumps(
                {
                    "version": 1,
                    "about": about,
                    "producer": costs,
                    "text": classes,
                    "pacing": paces,
                    "first_tokens": beside,
                    "recovery": ends,
                    "network": ways,
                    "loads": results,
                }
            )
        )
    else:
        print("  ".join(f"{key} {value}" for key, value in about.items()))
    lost = sum(each["lost"] for result in (*results.values(), *paces.values()) for each in result.values())
    if lost:
        print(f"scripts/bench: {lost:.0f} tokens did not arrive", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
