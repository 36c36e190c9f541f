# SPDX-License-Identifier: Apache-2.0
"""Figures for Prometheus: right, named as they should be, and enough for the dashboard and the rules of a real one."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from clawd.core import ffi, lib
from clawd.gateway.figures import SECONDS, Histogram
from clawd.gateway.metrics import bucket_middle, hist_buckets, is_fault
from clawd.producer import Producer
from tests.daemon import PATIENCE_S, Daemon, until
from tests.gateway import Gateway

pytestmark = pytest.mark.plain

MONITORING = Path(str(files("clawd.gateway"))) / "monitoring"
RULES, DASHBOARD = MONITORING / "clawd.rules.yml", MONITORING / "dashboard.json"


def test_a_buckets_middle_is_the_cores() -> None:
    for value in [0, 1, 31, 32, 63, 64, 100, 1000, 12345, 10**6, 987654321, 10**10, 2**40]:
        hist = ffi.new("struct claw_hist *")
        lib.claw_hist_add(hist, value)
        [index] = [at for at in range(lib.CLAW_HIST_BUCKETS) if hist.bucket[at]]
        assert bucket_middle(index) == lib.claw_hist_quantile(hist, 0.5)


def test_a_histogram_of_the_page_keeps_its_counts(dice) -> None:
    hist = ffi.new("struct claw_hist *")
    values = [int(10 ** dice.uniform(3, 11)) for _ in range(2000)]
    for value in values:
        lib.claw_hist_add(hist, value)
    rows = hist_buckets(hist)
    assert rows[-1] == ("+Inf", 2000.0)
    assert [count for _, count in rows] == sorted(count for _, count in rows)
    for (bound, count), seconds in zip(rows, SECONDS, strict=False):
        assert float(bound) == seconds
        # a bucket of the page is 3.2 % wide
        low, high = (sum(value <= seconds * 1e9 * edge for value in values) for edge in (0.968, 1.032))
        assert low <= count <= high


def test_a_histogram_of_ours_is_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.add(value, times)
    assert histogram.buckets() == [("1.0", 3.0), ("2.0", 4.0), ("+Inf", 7.0)]
    assert histogram.sum == 0.5 + 2 + 1.5 + 27


def test_figures_follow_what_happens(gateway: Gateway, daemon: Daemon) -> None:
    assert gateway.metrics()["clawd_up"] == 1
    with Producer("engine", daemon.runtime_dir) as engine:
        told = engine.open("told", requested_ns=time.monotonic_ns() - 300_000_000)
        plain = engine.open("plain")
        with gateway.read("/v1/streams/told") as one, gateway.read("/v1/streams/plain") as other:
            for stream, events in ((told, one), (plain, other)):
                for word in ("a", "b", "c"):
                    stream.write(word)
                    events.next()
                    time.sleep(0.02)
            figures = gateway.metrics()
            assert figures["clawd_gateway_readers"] == figures["clawd_gateway_attachments"] == 2
            assert figures['clawd_streams{state="live"}'] == 2
            first = "clawd_first_token_duration_seconds"
            for origin in ("requested", "opened"):
                assert figures[f'{first}_count{{origin="{origin}"}}'] == 1
            assert figures[f'{first}_bucket{{le="0.2",origin="requested"}}'] == 0
            assert figures[f'{first}_bucket{{le="2.0",origin="requested"}}'] == 1
            assert figures[f'{first}_sum{{origin="requested"}}'] >= 0.3
            for side in ("raw", "released", "sent", "delivered"):
                assert figures[f'clawd_token_gap_seconds_count{{side="{side}"}}'] == 4
                assert figures[f'clawd_token_gap_seconds_bucket{{le="0.01",side="{side}"}}'] == 0
            assert figures['clawd_added_delay_seconds_count{by="all"}'] == 6
            assert figures['clawd_added_delay_seconds_count{by="pacer"}'] == 6
            assert figures["clawd_gateway_tokens_total"] == 6
            told.close("stop")
            plain.close("error: out of memory")
            assert [one.next().kind, other.next().kind] == ["end", "end"]
        gateway.ask("GET", "/v1/streams/none?wait=0")
        figures = gateway.metrics()
        assert figures['clawd_gateway_ends_total{reason="stop"}'] == 1
        assert figures['clawd_gateway_ends_total{reason="error: out of memory"}'] == 1
        assert figures['clawd_gateway_requests_total{code="404",kind="stream"}'] == 1
        assert figures["clawd_gateway_faults_total"] == 1
    daemon.stop()
    assert gateway.metrics()["clawd_up"] == 0


def test_what_counts_as_a_fault() -> None:
    for reason in ("stop", "length", "eos", "cancelled", "unknown", "gone"):
        assert not is_fault(reason)
    for reason in ("error", "error:quarantined", "error: why", "producer_lost", "lost"):
        assert is_fault(reason)


def test_reasons_that_engines_make_up_do_not_grow_for_ever(gateway: Gateway, daemon: Daemon) -> None:
    with Producer("engine", daemon.runtime_dir) as engine:
        for number in range(100):
            engine.open(f"s{number}").close(f"reason {number}")
            with gateway.read(f"/v1/streams/s{number}") as events:
                assert events.next().json()["reason"] == f"reason {number}"
    ends = {name: value for name, value in gateway.metrics().items() if name.startswith("clawd_gateway_ends_total")}
    assert len(ends) == 65
    assert ends['clawd_gateway_ends_total{reason="other"}'] == 36


def test_alone_and_under_another_prefix(daemon: Daemon) -> None:
    with Gateway(daemon.runtime_dir, "--metrics-only", "--metrics-prefix", "weclaw_") as gateway:
        figures = gateway.metrics()
        assert figures["weclaw_up"] == 1
        assert any(name.startswith("weclaw_first_token_duration_seconds_bucket{") for name in figures)
        assert not any(name.startswith("clawd_") or "gateway" in name for name in figures)
        gateway.ask("GET", "/v1/streams/s").check_problem(404, "not_found")
        assert gateway.ask("GET", "/").status == 404
        assert gateway.ask("GET", "/readyz").status == 200


def test_a_scrape_does_not_hold_up_readers_for_long(gateway: Gateway) -> None:
    gateway.metrics()
    took = []
    for _ in range(20):
        before = time.perf_counter()
        gateway.metrics()
        took.append(time.perf_counter() - before)
    print(f"{1000 * min(took):.1f} ms a scrape")
    assert min(took) < 0.2


# --- a real Prometheus ---


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: apt-get install prometheus")
    return found


def test_promtool_likes_the_rules_and_the_metrics(gateway: Gateway) -> None:
    promtool = _program("promtool")
    run = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True)
    assert (run.returncode, "12 rules found" in run.stdout) == (0, True), run.stdout + run.stderr
    text = gateway.ask("GET", "/metrics").body
    run = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (run.returncode, run.stdout + run.stderr) == (0, b"")


class Prometheus:
    """A real one that scrapes a gateway twice a second."""

    def __init__(self, directory: Path, gateway: Gateway, rules: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 500ms, evaluation_interval: 500ms}\n"
            f"rule_files: ['{rules}']\n"
            "scrape_configs:\n"
            f"- {{job_name: clawd, static_configs: [{{targets: ['127.0.0.1:{gateway.port}']}}]}}\n"
        )
        command = [_program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
        command.append(f"--web.listen-address=127.0.0.1:{self.port}")
        with open(directory / "log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def query(self, expression: str) -> list[Any]:
        answer = self.get("query", query=expression)
        return answer["result"] if answer else []


def _expressions() -> dict[str, str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"].replace("$__rate_interval", "1m")
        for panel in panels
        for target in panel["targets"]
    }


def test_every_expression_of_dashboard_and_rules_has_data(gateway: Gateway, daemon: Daemon, tmp_path: Path) -> None:
    over = threading.Event()

    def work() -> None:
        number = 0
        with Producer("engine", daemon.runtime_dir) as engine:
            while not over.is_set():
                number += 1
                stream = engine.open(f"s{number}", requested_ns=time.monotonic_ns() if number % 2 else None)
                with gateway.read(f"/v1/streams/s{number}") as events:
                    for word in ("a", "b", "c"):
                        stream.write(word)
                        events.next()
                    stream.close("stop")
                    events.next()

    rules = tmp_path / "rules.yml"
    shutil.copy(RULES, rules)
    worker = threading.Thread(target=work)
    with Prometheus(tmp_path, gateway, rules) as prometheus:
        worker.start()
        try:
            expressions = _expressions()
            assert len(expressions) > 25
            for name, expression in expressions.items():
                until(lambda expression=expression: prometheus.query(expression), f"data of {name}: {expression}")
            for record in re.findall(r"record: (\S+)", RULES.read_text()):
                until(lambda record=record: prometheus.query(record), record)
            groups = prometheus.get("rules")["groups"]
            assert [rule["health"] for group in groups for rule in group["rules"]] == ["ok"] * 12
            down = [rule for group in groups for rule in group["rules"] if rule["name"] == "ClawdDown"]
            assert down[0]["state"] == "inactive"
        finally:
            over.set()
            worker.join()
        daemon.stop()
        until(lambda: prometheus.query("clawd_up == 0"), "clawd's end")
        until(lambda: "pending" in json.dumps(prometheus.get("rules")), "the alert")


def test_dashboard_and_rules_name_only_what_is_exported(gateway: Gateway) -> None:
    text = gateway.ask("GET", "/metrics").body.decode()
    exported = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    named = set(re.findall(r"\bclawd_[a-z_]+", RULES.read_text() + json.dumps(_expressions())))
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in named} <= exported
