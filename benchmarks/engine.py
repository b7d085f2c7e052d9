"""Measure the client's CPU time for a task by the number of nodes: `python benchmarks/engine.py --help`.

The pool is a real one, with its engine, its threads and a socket to each node. The nodes are simulated by one other
process (`simulated_nodes.py`): 8 slots each, tasks of 10 ms that return None. Three tasks for each slot are open at any
time: one runs, and two wait. The figure is the CPU time of this process, all threads, for a task: making the call,
packing, placing, sending, and the future's value.
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
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from simulated_nodes import SLOTS

import skyward as sky
from skyward.core.limits import raise_file_limit
from skyward.events import Emit
from skyward.providers.local import Local
from skyward.values.machine import Machine, Offer, PoolSpec
from skyward.values.topology import Peer

OPEN = 3
"""Open tasks for each slot."""


@dataclass(frozen=True, kw_only=True)
class Simulated(Local):
    """Provider of nodes that another process plays."""

    socket_path: str
    pid: int

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        return [
            Machine(
                node=node,
                socket_path=self.socket_path,
                folder=str(Path(self.socket_path).parent / str(node)),
                pid=self.pid,
                peer=Peer(node=node, private_ip="127.0.0.1"),
                slots=SLOTS,
                lease_s=600.0,
            )
            for node in nodes
        ]

    def terminate(self, machines: list[Machine]) -> None:
        """Do nothing: the process ends with this one."""


@sky.compute
def nothing() -> None: ...


def run(pool: sky.ComputePool, tasks: int) -> None:
    """Run that many tasks, with `OPEN` for each slot open at once."""
    futures: deque[sky.Future[None]] = deque()
    for _ in range(tasks):
        if len(futures) >= OPEN * pool.total_slots:
            futures.popleft().result()
        futures.append(nothing() > pool)
    for future in futures:
        future.result()


def measure(nodes: int, tasks: int) -> tuple[float, float]:
    """Return (CPU time, elapsed time) for a task, in microseconds."""
    with tempfile.TemporaryDirectory(prefix="sky-") as folder:
        path = str(Path(folder, "nodes.sock"))
        command = [sys.executable, str(Path(__file__).with_name("simulated_nodes.py")), path]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
        )
        assert process.stdout is not None
        process.stdout.readline()
        try:
            provider = Simulated(socket_path=path, pid=process.pid)
            with sky.ComputePool(provider=provider, nodes=nodes, concurrency=SLOTS, console=False, logs=False) as pool:
                run(pool, OPEN * pool.total_slots)  # the first tasks tell how long tasks take
                cpu, elapsed = time.process_time(), time.monotonic()
                run(pool, tasks)
                return (time.process_time() - cpu) / tasks * 1e6, (time.monotonic() - elapsed) / tasks * 1e6
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--tasks", type=int, default=1_000_000, help="tasks for each run")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    raise_file_limit()
    print(f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}")
    samples: dict[int, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for nodes in options.nodes:
            samples.setdefault(nodes, []).append(measure(nodes, options.tasks))
    print(f"{'nodes':>8} {'CPU, us':>10} {'elapsed, us':>12}   for a task: median")
    for nodes, runs in samples.items():
        cpu, elapsed = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{nodes:>8,} {cpu:>10.1f} {elapsed:>12.1f}")


if __name__ == "__main__":
    main()
