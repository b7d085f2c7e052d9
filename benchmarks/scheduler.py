"""Measure the scheduler's cost for a task by the number of nodes: `python benchmarks/scheduler.py --help`.

The pure state machine runs alone, in this thread, against simulated nodes: no engine, no processes, no clock. Each node
has 8 slots, tasks take 10 ms, and twice as many tasks as there are slots wait, besides those sent in advance. A task
costs two events, `submit` and `finished`, and the figure is the CPU time of both. Each size runs several times, in
turns, and its line shows the median with the fastest and the slowest run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from skyward.schedule.scheduler import Action, Scheduler, Send, StartGang

SLOTS = 8
TASK_NS = 10_000_000
BACKLOG = 2
"""Waiting tasks for each slot, besides those that nodes were sent in advance."""
GANG = 2
"""Nodes of a gang."""


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


def measure(nodes: int, tasks: int, *, with_gangs: bool) -> float:
    """Return the CPU time for a task, in microseconds. `with_gangs`: one task in 100 is a gang of two nodes."""
    scheduler, simulated = Scheduler(), SimulatedNodes(nodes)
    for node in range(nodes):
        scheduler.node_up(node, SLOTS)
    number = 0
    clock, spent = time.thread_time_ns, 0

    def submit() -> None:
        nonlocal number, spent
        number += 1
        is_gang = with_gangs and number % 100 == 0
        members = tuple((number // 100 + offset) % nodes for offset in range(GANG))
        began = clock()
        actions = scheduler.submit_gang(number, nodes=members, places=1) if is_gang else scheduler.submit(number)
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
    print(f"{'nodes':>8} {'tasks':>24} {'tasks and gangs':>24}   us of CPU time for a task: median (fastest - slowest)")
    samples: dict[tuple[int, bool], list[float]] = {}
    for _ in range(options.rounds):
        for nodes in options.nodes:
            for with_gangs in (False, True):
                cost = measure(nodes, options.tasks, with_gangs=with_gangs)
                samples.setdefault((nodes, with_gangs), []).append(cost)
    for nodes in options.nodes:
        row = [samples[nodes, with_gangs] for with_gangs in (False, True)]
        texts = [f"{statistics.median(costs):.1f} ({min(costs):.1f} - {max(costs):.1f})" for costs in row]
        print(f"{nodes:>8,} {texts[0]:>24} {texts[1]:>24}")


if __name__ == "__main__":
    main()
