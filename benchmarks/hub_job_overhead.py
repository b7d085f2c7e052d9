"""Measure what jobs of a hub cost beside the same calls in a pool: `python benchmarks/hub_job_overhead.py --help`.

A hub with its launcher runs on this machine, as `skyward hub up` starts it. The parts:

- first line: the time from `hub.submit` to the first line of output. It takes turns with the same call in a new pool.
- queue: jobs that sleep for a second wait for 4 nodes, which are kept from job to job. The figure is the part of the
  nodes' time in which a job slept.
- resume: a job makes way for an urgent one. The figure is the time from the end of the urgent job to its open pool.
- training: a step prints a line, reports four metrics and looks for orders. The figure is the CPU time of the calling
  thread, as a part of a step of 50 ms.

The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import skyward as sky
from skyward import hub
from skyward.hub.client import capacity

NODES = 4
STEPS = 2000
STEP_S = 0.05
TARGETS = {
    "first": ("first line: a job, beyond a pool, s", 0.0, 1.0),
    "queue": ("queue: part of the nodes' time", 0.9, 1.0),
    "resume": ("resume: after the urgent job, s", 0.0, 3.0),
    "training": ("training: part of a step of 50 ms", 0.0, 0.01),
}
"""Part -> figure, least and most."""


@sky.compute
def greet() -> None:
    print("hello", flush=True)


@sky.compute
def nap(_number: int) -> None:
    time.sleep(1.0)


@sky.compute
def sleep(duration_s: float) -> None:
    print("begins", flush=True)
    time.sleep(duration_s)


@sky.compute
def report_steps(steps: int) -> float:
    """Return the CPU time of the calling thread for the reports of a step, in seconds."""
    from types import SimpleNamespace

    from skyward.training import TrainerControl, TrainerControlCallback, TrainerState

    control, state, orders = TrainerControl(), TrainerState(), TrainerControlCallback()
    arguments = SimpleNamespace(output_dir=".")
    orders.on_train_begin(args=arguments, state=state, control=control)
    spent_s = 0.0
    with hub.start_run("steps") as run:
        for step in range(steps):
            state.global_step = step
            time.sleep(0.002)  # the other threads work meanwhile, as they do beside a step
            began = time.thread_time()
            print(f"step {step}  loss {1 / (step + 1):.4f}", flush=True)
            run.log_metrics({"loss": 1 / (step + 1), "rate": 1e-3, "norm": 1.0, "epoch": step / 100}, step=step)
            orders.on_step_end(args=arguments, state=state, control=control)
            spent_s += time.thread_time() - began
    orders.on_train_end(args=arguments, state=state, control=control)
    return spent_s / steps


def first_line_of_a_job() -> float:
    began = time.perf_counter()
    job = hub.submit(greet())
    next(iter(job.logs()))
    took_s = time.perf_counter() - began
    job.result(60)
    return took_s


def first_line_of_a_pool() -> float:
    lines: queue.SimpleQueue[float] = queue.SimpleQueue()
    began = time.perf_counter()
    with sky.ComputePool(provider=sky.Local(), logs=lambda _: lines.put(time.perf_counter())) as pool:
        greet() >> pool
        return lines.get(timeout=60) - began


def first_line(rounds: int) -> float:
    pairs = [(first_line_of_a_pool(), first_line_of_a_job()) for _ in range(rounds)]
    pool_s, job_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"first line: pool {pool_s:.2f} s, job {job_s:.2f} s (median of {rounds})", flush=True)
    return float(job_s - pool_s)


def queue_of_naps(count: int) -> float:
    began = time.perf_counter()
    jobs = hub.map(nap, range(count), labels=["queue"], keep_s=60.0)
    print(f"queue: {count} jobs submitted in {time.perf_counter() - began:.1f} s", flush=True)
    for job in jobs:
        job.result()
    attempts = [attempt for job in jobs for attempt in job.attempts]
    starts = [attempt.began_at for attempt in attempts if attempt.began_at]
    ends = [attempt.ended_at for attempt in attempts if attempt.ended_at]
    span_s = (max(ends) - min(starts)) / 1000
    held_s = statistics.mean((attempt.ended_at or 0) - attempt.reserved_at for attempt in attempts) / 1000
    print(f"queue: {len(attempts)} attempts in {span_s:.1f} s, machines held for {held_s:.2f} s by each", flush=True)
    return count / NODES / span_s


def resume_after(rounds: int) -> float:
    waits = []
    for _ in range(rounds):
        victim = hub.submit(sleep(2.0), labels=["spot"], priority="low", preemptible=True)
        next(iter(victim.logs()))
        urgent = hub.submit(sleep(0.0), labels=["spot"], priority="high")
        urgent.result(120)
        victim.result(120)
        ended_at, began_at = urgent.attempts[-1].ended_at, victim.attempts[-1].began_at
        assert ended_at is not None
        assert began_at is not None
        waits.append((began_at - ended_at) / 1000)
    return statistics.median(waits)


def training() -> float:
    spent_s: float = hub.submit(report_steps(STEPS)).result(300)
    return spent_s / STEP_S


@contextmanager
def hub_of_this_machine() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:
        # The folder of the program travels with a job: a small one, as that of a user, and not all benchmarks.
        work = Path(name, "work")
        work.mkdir()
        os.chdir(work)
        sys.path[0] = str(work)
        command = [sys.executable, "-m", "skyward", "hub", "up", "--data", f"{name}/hub", "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                started = json.loads(server.stdout.readline())
                hub.connect(started["url"], token=started["token"], spool=Path(name, "spool"))
                capacity.declare("queue", {"type": "local"}, nodes=NODES, labels=["queue"])
                capacity.declare("spot", {"type": "local"}, labels=["spot"])
                yield
            finally:
                server.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument("--parts", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    options = parser.parse_args()
    load = f"load average {os.getloadavg()[0]:.0f}"
    print(f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores, {load}", flush=True)
    parts = {
        "first": lambda: first_line(options.rounds),
        "queue": lambda: queue_of_naps(options.jobs),
        "resume": lambda: resume_after(options.rounds),
        "training": training,
    }
    is_missed = False
    with hub_of_this_machine():
        for part in options.parts:
            figure = parts[part]()
            title, least, most = TARGETS[part]
            is_reached = least <= figure <= most
            is_missed |= not is_reached
            bound = f"at least {least:g}" if least else f"at most {most:g}"
            print(f"{title}: {figure:.3g} ({bound}: {'reached' if is_reached else 'missed'})", flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
