"""Measure a head's processor time and memory for a task, by the number of nodes: `python benchmarks/head.py --help`.

The head is the real process, with its scheduler, its links and its word to the agents. `--detached` gives it the
journal of a detached pool. The client is a real pool in this process. Only the nodes are simulated, by one other
process (`simulated_nodes.py`): 8 slots each, tasks of 10 ms that return None. The head's links lead to sockets of that
process, which stand for those of Ray's driver. Three tasks for each slot are open at any time: one runs, and two wait.
The figures are the processor time of the head and of the client for a task, all threads, and the head's memory.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import processes
from engine import OPEN, Simulated, run
from simulated_nodes import SLOTS

import skyward as sky
from skyward.core.limits import raise_file_limit
from skyward.engine.engine import Engine
from skyward.engine.head.main import order_of
from skyward.engine.head.messages import HeadConfig
from skyward.engine.head.place import LocalHead
from skyward.engine.hosted import HostedEngine
from skyward.node.agent import attach
from skyward.pool.engines import Way
from skyward.values.machine import Machine

_HERE = Path(__file__).resolve().parent


class Cost(NamedTuple):
    """Microseconds for a task, and MiB of the head."""

    head_us: float
    client_us: float
    elapsed_us: float
    idle_mib: float
    """Before the first task."""
    open_mib: float
    """With all tasks open, at the end."""


class SimulatedHead(LocalHead):
    """Place of a head that dials the simulated nodes."""

    def start(self, config: HeadConfig) -> tuple[str, ...]:
        command = [sys.executable, str(_HERE / "simulated_head.py")]
        environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order_of(config))
        process.stdin.flush()
        self.process = self._process = process
        return attach.command(sys.executable, str(_HERE.parent), process.stdout.readline().decode().strip())


@contextmanager
def simulated_nodes() -> Iterator[Simulated]:
    """Start the process of the nodes."""
    with tempfile.TemporaryDirectory(prefix="sky-") as folder:
        path = str(Path(folder, "nodes.sock"))
        command = [sys.executable, str(_HERE / "simulated_nodes.py"), path]
        environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield Simulated(socket_path=path, pid=process.pid)
        finally:
            process.kill()
            process.wait()


def measure(nodes: int, tasks: int, *, is_detached: bool) -> Cost:
    with tempfile.TemporaryDirectory(prefix="sky-") as folder, simulated_nodes() as provider:
        pool = sky.ComputePool(provider=provider, nodes=nodes, concurrency=SLOTS, console=False, logs=False)
        place, life = SimulatedHead(), pool._life  # users have no option for it

        def make(initializer: bytes | None, launched: list[Machine]) -> Engine:
            config = HeadConfig(
                pool=life.name,
                folder=str(Path(folder, "head")),
                cancel_grace_s=1.0,
                lease_s=600.0,
                starter=os.getpid(),
                initializer=initializer,
                detached_for_s=600.0 if is_detached else 0.0,
            )
            return HostedEngine(config, place, emit=life.announcer.emit)

        life.way = Way.LENT
        life._make_engine = make  # type: ignore[method-assign]
        with pool:
            head = place.process.pid
            idle_mib = processes.pss_mib([head])
            run(pool, OPEN * pool.total_slots)  # the first tasks tell how long tasks take
            before, cpu, elapsed = processes.all_cpu_seconds(head), time.process_time(), time.monotonic()
            run(pool, tasks)
            after, own, end = processes.all_cpu_seconds(head), time.process_time(), time.monotonic()
            return Cost(
                (after - before) / tasks * 1e6,
                (own - cpu) / tasks * 1e6,
                (end - elapsed) / tasks * 1e6,
                idle_mib,
                processes.pss_mib([head]),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--tasks", type=int, default=1_000_000, help="tasks for each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--detached", action="store_true", help="with the journal of a detached pool")
    options = parser.parse_args()
    raise_file_limit()
    print(f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}")
    samples: dict[int, list[Cost]] = {}
    for _ in range(options.rounds):
        for nodes in options.nodes:
            samples.setdefault(nodes, []).append(measure(nodes, options.tasks, is_detached=options.detached))
    print(f"{'nodes':>8} {'head, us':>10} {'client, us':>11} {'elapsed, us':>12} {'idle, MiB':>10} {'then, MiB':>10}")
    for nodes, runs in samples.items():
        columns = [statistics.median(column) for column in zip(*runs, strict=True)]
        head, client, elapsed, idle, then = columns
        print(f"{nodes:>8,} {head:>10.1f} {client:>11.1f} {elapsed:>12.1f} {idle:>10.1f} {then:>10.1f}")


if __name__ == "__main__":
    main()
