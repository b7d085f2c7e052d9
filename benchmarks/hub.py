"""Compare a hub with MLflow's server: both run side by side, and the loads alternate between them.

    make bench-hub                                           # about 10 minutes
    .venv/bin/python benchmarks/hub.py --rounds 1 --only load,memory
    .venv/bin/python benchmarks/hub.py --rounds 3 --only client --hub-only

MLflow 3.17.2 runs with its defaults. The hub runs with its defaults too: tokens, validation and audit are on, and each
commit reaches the disk. Points are drained from the first call of the client until the hub has acknowledged the last
one. Other load on the machine slows both, so the ratio of processor time per request is the figure to trust. Each row
shows both medians over the rounds, their ratio, and the target.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from hub_load import Load, drive
from hub_runs import fill, make_template
from hub_servers import MLFLOW, ROOT, HubProcess, MlflowServer, Server

LOG_METRIC, LOG_BATCH = "/api/2.0/mlflow/runs/log-metric", "/api/2.0/mlflow/runs/log-batch"
POINTS, BATCH = 50_000, 1_000
IDLE_S, SEALED_S = 5.0, 30.0
PARTS = ("memory", "load", "history", "client", "search")
FILTER = {"filter": "metrics.m3 > 0.5 and params.lr = '0.1'", "order_by": ["metrics.m7 DESC"], "max_results": 100}

Samples = dict[str, dict[str, list[float]]]
Facts = dict[str, list[float]]

# figure: (title, unit, factor, whether more is better, ratio that is asked for)
FIGURES: dict[str, tuple[str, str, float, bool, float | None]] = {
    "metric_cpu": ("log-metric, 16 connections: CPU a request", "us", 1e6, False, 30),
    "metric_rate": ("log-metric, 16 connections: requests", "/s", 1, True, 20),
    "metric_p99": ("log-metric, 16 connections: p99", "ms", 1e3, False, 20),
    "one_rate": ("log-metric, 1 connection that waits", "/s", 1, True, 4),
    "batch_cpu": ("log-batch of 1,000: CPU a point", "us", 1e6, False, 30),
    "batch_rate": ("log-batch of 1,000: points", "/s", 1, True, 15),
    "write": ("50,000 points of a metric, written", "s", 1, False, 15),
    "read": ("their history, read", "s", 1, False, 10),
    "history_cpu": ("both: CPU", "s", 1, False, 25),
    "point_bytes": ("bytes a point", "", 1, False, 3),
    "http_metric": ("MLflow's client over HTTP: log_metric", "us", 1, False, 3),
    "http_batch": ("MLflow's client over HTTP: log_batch of 100", "us", 1, False, 3),
    "spool_fluent": ("mlflow.log_metric, theirs by HTTP, ours by skyward://", "us", 1, False, None),
    "spool_metric": ("MlflowClient.log_metric, the same", "us", 1, False, None),
    "memory": ("idle memory (PSS)", "MiB", 1, False, 10),
    "search_small": ("page of 100 runs, 1,000 runs", "ms", 1e3, False, None),
    "search_large": ("page of 100 runs, theirs of 10,000, ours of 100,000", "ms", 1e3, False, 10),
}


def main() -> int:
    """Measure and print. Returns exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each load (default: 4)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--hub-only", action="store_true", help="leave MLflow's server out: the hub's own targets only")
    given = parser.parse_args()
    kinds = [HubProcess] if given.hub_only else [MlflowServer, HubProcess]
    samples: Samples = defaultdict(lambda: defaultdict(list))
    facts: Facts = defaultdict(list)
    began = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skyward-hub-bench-") as folder:
        with _all(kinds, Path(folder, "loads")) as servers:
            if "memory" in given.only:
                _say("memory")
                time.sleep(IDLE_S)
                for server in servers:
                    samples["memory"][server.name].append(server.memory_mib())
            for number in range(given.rounds):
                for server in servers if number % 2 else servers[::-1]:
                    _say(f"round {number + 1}/{given.rounds}: {server.name}")
                    _round(server, given.only, given.seconds, samples, facts)
        if "search" in given.only:
            _search(kinds, Path(folder, "search"), samples)
    print(f"\n{os.cpu_count()} cores, Python {sys.version.split()[0]}, {date.today()}, {given.rounds} rounds;", end=" ")
    print(f"load average {began:.1f} before, {os.getloadavg()[0]:.1f} after\n")
    return int(not all([_print_row(key, samples) for key in FIGURES] + _print_facts(samples, facts)))


def _round(server: Server, parts: list[str], seconds: float, samples: Samples, facts: Facts) -> None:
    if "load" in parts:
        _loads(server, seconds, samples)
    if "history" in parts:
        _history(server, samples)
    if "client" in parts:
        _clients(server, samples, facts)


# Parts ----------------------------------------------------------------------------------------------------------------


def _loads(server: Server, seconds: float, samples: Samples) -> None:
    run = _new_run(server)

    def point(number: int) -> dict[str, Any]:
        return {"run_id": run, "run_uuid": run, "key": "loss", "value": number / 7, "timestamp": number, "step": number}

    def batch(number: int) -> dict[str, Any]:
        steps = range(number * BATCH // 10, (number + 1) * BATCH // 10)
        return {
            "run_id": run,
            "metrics": [
                {"key": f"m{k}", "value": step / 7, "timestamp": step, "step": step}
                for step in steps
                for k in range(10)
            ],
        }

    load, cpu = _measured(server, lambda: _drive(server, LOG_METRIC, point, 16, seconds))
    _keep(samples, server, metric_cpu=cpu / len(load.latencies_s), metric_rate=load.per_s, metric_p99=load.p99_s)
    load, _ = _measured(server, lambda: _drive(server, LOG_METRIC, point, 1, seconds))
    _keep(samples, server, one_rate=load.per_s)
    load, cpu = _measured(server, lambda: _drive(server, LOG_BATCH, batch, 2, seconds))
    points = len(load.latencies_s) * BATCH
    _keep(samples, server, batch_cpu=cpu / points, batch_rate=points / load.seconds)


def _history(server: Server, samples: Samples) -> None:
    run = _new_run(server)
    _wait_until_small(server)  # the loads before
    before, cpu = server.bytes_used(), server.cpu_s()
    with server.client() as client:
        began = time.perf_counter()
        for first in range(0, POINTS, BATCH):
            metrics = [
                {"key": "loss", "value": n / 7, "timestamp": 1_700_000_000_000 + n, "step": n}
                for n in range(first, first + BATCH)
            ]
            client.post("/runs/log-batch", json={"run_id": run, "metrics": metrics}).raise_for_status()
        written = time.perf_counter() - began
        client.post("/runs/update", json={"run_id": run, "status": "FINISHED", "end_time": 1}).raise_for_status()
        _wait_until_small(server)
        began, points, token = time.perf_counter(), 0, None
        while points == 0 or token:
            asked = {"run_id": run, "metric_key": "loss", "max_results": 25_000} | (
                {"page_token": token} if token else {}
            )
            page = client.get("/metrics/get-history", params=asked).raise_for_status().json()
            points, token = points + len(page["metrics"]), page.get("next_page_token")
        read = time.perf_counter() - began
    if points != POINTS:
        raise SystemExit(f"{server.name}: {points} points came back")
    spent, size = server.cpu_s() - cpu, server.bytes_used() - before
    _keep(samples, server, write=written, read=read, history_cpu=spent, point_bytes=size / POINTS)


def _wait_until_small(server: Server) -> None:
    """Wait until the hub has sealed the points: the size of its database stays the same."""
    size, deadline = -1, time.monotonic() + SEALED_S
    while server.name == "hub" and size != server.bytes_used() and time.monotonic() < deadline:
        size = server.bytes_used()
        time.sleep(0.5)


def _clients(server: Server, samples: Samples, facts: Facts) -> None:
    figures = _client(server, server.url, calls=100, batches=20)
    _keep(samples, server, http_metric=figures["client_metric_us"], http_batch=figures["batch_us"])
    spooled = figures
    if server.name == "hub":
        spooled = _client(server, server.url.replace("http://", "skyward://"), calls=5_000, batches=200, points=POINTS)
        for name, figure in {"drained": spooled["drained_per_s"], **_own_client(server)}.items():
            facts[name].append(figure)
    _keep(samples, server, spool_fluent=spooled["metric_us"], spool_metric=spooled["client_metric_us"])


def _client(server: Server, uri: str, *, calls: int, batches: int, points: int = 0) -> dict[str, float]:
    packages = [next(path for path in sys.path if path.endswith("site-packages"))] if uri.startswith("skyward") else []
    command = [str(MLFLOW / "python"), str(Path(__file__).with_name("hub_mlflow_client.py"))]
    with tempfile.TemporaryDirectory() as spool:
        environment = os.environ | {
            "MLFLOW_TRACKING_URI": uri,
            "MLFLOW_REGISTRY_URI": uri,  # without it, each call looks for Spark: 160 us of MLflow's own time
            "MLFLOW_TRACKING_TOKEN": server.token,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "SKYWARD_HUB_SPOOL": spool,
        }
        ended = subprocess.run(
            [*command, str(calls), str(batches), str(points), *packages],
            env=environment, cwd=spool, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"the client failed: {ended.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def _own_client(server: Server) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).with_name("hub_client.py")), "--json", "--hub", server.url]
    ended = subprocess.run(
        command, env=os.environ | {"SKYWARD_HUB_TOKEN": server.token},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"skyward's client failed: {ended.stderr[-3000:]}")
    figures = json.loads(ended.stdout)
    return {
        "own_call": figures["call_us"],
        "own_step": figures["step_us"],
        "own_drained": figures["drained_per_s"],
    }


def _search(kinds: Sequence[type[Server]], folder: Path, samples: Samples) -> None:
    large = {MlflowServer: 10_000, HubProcess: 100_000}
    for key, sizes in {"search_small": dict.fromkeys(large, 1_000), "search_large": large}.items():
        for make in kinds:
            runs = sizes[make]
            _say(f"search: {make.name}, {runs:,} runs")
            server = make(folder / key / make.name)
            with server:
                experiment, run = make_template(server)
            fill(server, run, runs)
            with server, server.client() as client:
                for number in range(8):
                    began = time.perf_counter()
                    answer = client.post("/runs/search", json={"experiment_ids": [experiment], **FILTER})
                    if len(answer.raise_for_status().json()["runs"]) != FILTER["max_results"]:
                        raise SystemExit(f"{server.name}: the page is not full")
                    if number:  # the first reads the file
                        samples[key][server.name].append(time.perf_counter() - began)


# Within ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _all(kinds: Sequence[type[Server]], folder: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(make(folder / make.name)) for make in kinds]


def _new_run(server: Server) -> str:
    with server.client() as client:
        body = {"experiment_id": "0", "user_id": "me", "start_time": int(time.time() * 1000)}
        return str(client.post("/runs/create", json=body).raise_for_status().json()["run"]["info"]["run_id"])


def _drive(server: Server, path: str, body: Callable[[int], dict[str, Any]], connections: int, seconds: float) -> Load:
    def data(number: int) -> bytes:
        return json.dumps(body(number)).encode()

    return drive(server.port, server.headers, path, data, connections=connections, seconds=seconds)


def _measured(server: Server, load: Callable[[], Load]) -> tuple[Load, float]:
    before = server.cpu_s()
    return load(), server.cpu_s() - before


def _keep(samples: Samples, server: Server, **figures: float) -> None:
    for name, value in figures.items():
        samples[name][server.name].append(value)


def _print_row(key: str, samples: Samples) -> bool:
    """Print one figure. Returns whether its target is reached, or it has none."""
    title, unit, factor, is_rate, target = FIGURES[key]
    if not samples[key]["mlflow"] or not samples[key]["hub"]:
        return True
    theirs, ours = (median(samples[key][name]) * factor for name in ("mlflow", "hub"))
    ratio = ours / theirs if is_rate else theirs / ours
    verdict = "" if target is None else f"{target:5g} x  {'reached' if ratio >= target else 'MISSED'}"
    print(f"{title:55}{theirs:12,.1f}{ours:12,.1f} {unit:4}{ratio:8,.1f} x  {verdict}")
    return target is None or ratio >= target


def _print_facts(samples: Samples, facts: Facts) -> list[bool]:
    """Print the figures of the hub that have targets of their own."""
    rows: list[tuple[str, float, bool]] = []
    if facts:
        call, drained = median(samples["spool_metric"]["hub"]), median(facts["drained"])
        fluent = median(samples["spool_fluent"]["hub"])
        rows += [("MlflowClient.log_metric through skyward://, us (at most 50)", call, call <= 50)]
        rows += [("mlflow.log_metric through skyward://, us (at most 50)", fluent, fluent <= 50)]
        rows += [("points drained through skyward://, /s (at least 50,000)", drained, drained >= 50_000)]
        call, step, drained = (median(facts[name]) for name in ("own_call", "own_step", "own_drained"))
        rows += [("hub.start_run().log_metrics: CPU of its thread, us (at most 20)", call, call <= 20)]
        rows += [("log_metrics of 20 metrics: CPU, us (at most 50: 0.5 % of a step of 10 ms)", step, step <= 50)]
        rows += [("points drained through hub.start_run, /s (at least 50,000)", drained, drained >= 50_000)]
    if samples["search_large"]["hub"]:
        grown = median(samples["search_large"]["hub"]) / median(samples["search_small"]["hub"])
        rows += [("page at 100,000 runs beside 1,000 (at most 2)", grown, grown <= 2)]
    for title, value, is_reached in rows:
        print(f"{title:79}{value:12,.1f}  {'reached' if is_reached else 'MISSED'}")
    return [is_reached for _, _, is_reached in rows]


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if not (MLFLOW / "mlflow").exists():
        raise SystemExit(f"{MLFLOW.relative_to(ROOT)} is missing: `make mlflow` makes it")
    sys.exit(main())
