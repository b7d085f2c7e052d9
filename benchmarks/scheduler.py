"""Measure the scheduler's cost for a task by the number of nodes: `python benchmarks/scheduler.py --help`.

The pure state machine runs alone, in this thread, against simulated nodes: no engine, no processes, no clock. Each node
has 8 slots, tasks take 10 ms, and twice as many tasks as there are slots wait, besides those sent in advance. A task
costs two events, `submit` and `finished`, and the figure is the CPU time of both. With resources, each node has 8 GPUs
and 32 CPUs, and every task needs one of four amounts. Each size runs several times, in turns, and its line shows the
median with the fastest and the slowest run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from skyward.schedule.actions import Action, Send, StartGang
from skyward.schedule.resources import Need, Supply
from skyward.schedule.scheduler import Scheduler

SLOTS = 8
TASK_NS = 10_000_000
BACKLOG = 2
"""Waiting tasks for each slot, besides those that nodes were sent in advance."""
GANG = 2
"""Nodes of a gang."""
SUPPLY = Supply(cpus=32, memory_gib=256, devices=("NVIDIA A100-SXM4-80GB",) * 8)
NEEDS = (Need(devices=1000), Need(devices=500, cpus=2000), Need(cpus=2000, devices=0), Need(devices=2000))
KINDS = ("tasks", "tasks and gangs", "tasks with resources")


@dataclass
class SimulatedNodes:
    """Nodes that run their tasks in the order in which they were sent; all take the same time."""

    count: int
    idle: list[int] = field(init=False)
    ahead: list[deque[int]] = field(init=False)
    running: deque[tuple[int, int]] = field(default_factory=deque)
    """Tasks and gangs in the order in which they end, each with its node; -1 for a gang."""

    def __post_init__(self) -> None:
        self.idle = [SLOTS] * self.count
        self.ahead = [deque() for _ in range(self.count)]

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartGang):
                self.running.append((action.gang, -1))
            elif isinstance(action, Send):
                if self.idle[action.node]:
                    self.idle[action.node] -= 1
                    self.running.append((action.task, action.node))
                else:
                    self.ahead[action.node].append(action.task)

    def end_one(self) -> tuple[int, int]:
        task, node = self.running.popleft()
        if node >= 0:
            if self.ahead[node]:
                self.running.append((self.ahead[node].popleft(), node))
            else:
                self.idle[node] += 1
        return task, node


def measure(nodes: int, tasks: int, kind: str) -> float:
    """Return the CPU time for a task, in microseconds. With gangs, one task in 100 is a gang of two nodes."""
    with_gangs, needs = kind == KINDS[1], NEEDS if kind == KINDS[2] else ()
    scheduler, simulated = Scheduler(), SimulatedNodes(nodes)
    for node in range(nodes):
        scheduler.node_up(node, SLOTS, SUPPLY if needs else None)
    number = 0
    clock, spent = time.thread_time_ns, 0

    def submit() -> None:
        nonlocal number, spent
        number += 1
        is_gang = with_gangs and number % 100 == 0
        members = tuple((number // 100 + offset) % nodes for offset in range(GANG))
        need = needs[number % len(needs)] if needs else None
        began = clock()
        if is_gang:
            actions = scheduler.submit_gang(number, nodes=members, places=1)
        else:
            actions = scheduler.submit(number, need=need)
        spent += clock() - began
        simulated.take(actions)

    scheduler.submit(0)
    scheduler.finished(0, TASK_NS)  # now tasks are known to be short, so they are sent in advance
    while scheduler.queued < BACKLOG * SLOTS * nodes:
        submit()
    spent = 0
    for _ in range(tasks):
        task, node = simulated.end_one()
        began = clock()
        actions = scheduler.gang_finished(task) if node < 0 else scheduler.finished(task, TASK_NS)
        spent += clock() - began
        simulated.take(actions)
        submit()
    return spent / tasks / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--tasks", type=int, default=20_000, help="tasks for each run")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}")
    titles = " ".join(f"{kind:>24}" for kind in KINDS)
    print(f"{'nodes':>8} {titles}   us of CPU time for a task: median (fastest - slowest)")
    samples: dict[tuple[int, str], list[float]] = {}
    for _ in range(options.rounds):
        for nodes in options.nodes:
            for kind in KINDS:
                samples.setdefault((nodes, kind), []).append(measure(nodes, options.tasks, kind))
    for nodes in options.nodes:
        row = [samples[nodes, kind] for kind in KINDS]
        texts = [f"{statistics.median(costs):.1f} ({min(costs):.1f} - {max(costs):.1f})" for costs in row]
        print(f"{nodes:>8,} " + " ".join(f"{text:>24}" for text in texts))


if __name__ == "__main__":
    main()
