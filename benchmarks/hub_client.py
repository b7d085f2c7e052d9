"""Measure what logging to a hub costs the thread that trains: CPU for each call, and its share of a step.

    .venv/bin/python benchmarks/hub_client.py             # some seconds
    .venv/bin/python benchmarks/hub_client.py --rounds 9

A server in another process answers every batch, so the sender thread of the measured process works as it does in a real
run. The CPU of the calling thread is measured (CLOCK_THREAD_CPUTIME_ID). Other load of the machine cannot add to it
except by cold caches, so the figure is the best of several rounds. The whole process's CPU, sender included, is printed
too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from skyward import hub

CALL_TARGET_US = 20.0
STEP_S, STEP_TARGET = 10e-3, 0.005
METRICS = 20
POINTS = 50_000


class Answering(BaseHTTPRequestHandler):
    """Accept every batch without keeping it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_POST(self) -> None:
        batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        accepted = batch["first"] + len(batch["records"]) - 1
        body = json.dumps({"accepted": accepted, "state": "running", "commands": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(ports: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    ports.put(server.server_address[1])
    server.serve_forever()


@contextmanager
def own_server() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=serve, args=(ports,), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=60)}"
    finally:
        server.terminate()
        server.join()


def cpu_us(call: Callable[[int], object], calls: int) -> tuple[float, float]:
    """Return CPU microseconds of a call: of this thread, and of the whole process."""
    thread, process = time.thread_time_ns(), time.process_time_ns()
    for step in range(calls):
        call(step)
    spent = time.thread_time_ns() - thread, time.process_time_ns() - process
    return spent[0] / calls / 1e3, spent[1] / calls / 1e3


def measure(rounds: int, calls: int) -> dict[str, float]:
    """Return CPU of the calls, and points a second from the first call of `log_metric` to the last acknowledgement."""
    run = hub.start_run(run_name="benchmark")
    many = {f"metric_{number}": number / 7 for number in range(METRICS)}

    def one_step(step: int) -> None:
        run.log_metrics(many, step=step)

    def one_by_one(step: int) -> None:
        for key, value in many.items():
            run.log_metric(key, value, step)

    run.log_metrics(many, step=0)
    single = [cpu_us(lambda step: run.log_metrics({"loss": 0.123456789}, step=step), calls) for _ in range(rounds)]
    together = [cpu_us(one_step, calls // 4) for _ in range(rounds)]
    apart = [cpu_us(one_by_one, calls // 20) for _ in range(rounds)]
    if not run.flush(120):
        raise SystemExit("the records were not sent within 120 s")
    began, cpu = time.perf_counter(), time.process_time()
    for step in range(POINTS):
        run.log_metric("many", step / 7, step)
    if not run.flush(120):
        raise SystemExit("the points were not sent within 120 s")
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    run.end()
    return {
        "call_us": min(single)[0],
        "process_us": min(single)[1],
        "step_us": min(together)[0],
        "apart_us": min(apart)[0],
        "drained_per_s": POINTS / spent,
        "drained_cpu_us": cpu / POINTS * 1e6,
    }


def show(figures: dict[str, float]) -> bool:
    """Print the figures. Returns whether the targets are reached."""
    share = figures["step_us"] / 1e6 / STEP_S
    call, process = figures["call_us"], figures["process_us"]
    print(f"log_metrics, 1 metric          {call:7.2f} us of the thread, {process:7.2f} of the process")
    print(f"log_metrics, {METRICS} metrics        {figures['step_us']:7.2f} us of the thread = {share:.2%} of 10 ms")
    print(f"log_metric, {METRICS} calls           {figures['apart_us']:7.2f} us of the thread")
    drained, cpu = figures["drained_per_s"], figures["drained_cpu_us"]
    print(
        f"{POINTS:,} points, logged one by one and acknowledged: {drained:,.0f} a second, {cpu:.2f} us of the process"
    )
    is_reached = call <= CALL_TARGET_US and share <= STEP_TARGET
    targets = f"{CALL_TARGET_US:.0f} us a call, {STEP_TARGET:.1%} of a step of 10 ms with {METRICS} metrics"
    print(f"targets: {targets}: {'reached' if is_reached else 'MISSED'}")
    return is_reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--hub", help="address of a hub to use in place of the server that keeps nothing")
    parser.add_argument("--json", action="store_true", help="print the figures only, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as spool, own_server() if given.hub is None else nullcontext(given.hub) as url:
        hub.connect(url, spool=spool)
        figures = measure(given.rounds, given.calls)
    if given.json:
        print(json.dumps(figures))
        return
    sys.exit(0 if show(figures) else 1)


if __name__ == "__main__":
    main()
