"""Measure the scheduler's cost for a task by the number of nodes: `python benchmarks/scheduler.py --help`.

The pure state machine runs alone, in this thread, against simulated nodes: no engine, no processes, no clock. Each node
has 8 slots, tasks take 10 ms, and twice as many tasks as there are slots wait, besides those sent in advance. A task
costs two events, `submit` and `finished`. All events are recorded first, and copied, so that they lie in their order in
memory. The figure is the CPU time of feeding them to a new scheduler, without the garbage collector, whose cost depends
on the program (`engine.py` includes it).

With gangs, one task in 100 is a gang of two nodes. With resources, each node has 8 GPUs and 32 CPUs, and every task
needs one of four amounts. With refs, every second task prefers the node of its value. Each size runs several times, in
turns, and its line shows the median with the fastest and the slowest run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import pickle
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyward.schedule.actions import Action, Send, StartGang
from skyward.schedule.resources import Need, Supply
from skyward.schedule.scheduler import Scheduler

SLOTS = 8
TASK_NS = 10_000_000
BACKLOG = 2
"""Waiting tasks for each slot, besides those that nodes were sent in advance."""
GANG = 2
"""Nodes of a gang."""
GANG_EVERY = 100
"""Tasks, one of which is a gang."""
SUPPLY = Supply(cpus=32, memory_gib=256, devices=("NVIDIA A100-SXM4-80GB",) * 8)
NEEDS = (Need(devices=1000), Need(devices=500, cpus=2000), Need(cpus=2000, devices=0), Need(devices=2000))
KINDS = ("tasks", "tasks and gangs", "tasks with resources", "all, with refs")
Event = tuple[Callable[..., list[Action]], tuple[int, ...], dict[str, Any]]
"""Method of the scheduler, with its arguments."""


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


def new_scheduler(nodes: int, kind: str) -> Scheduler:
    scheduler = Scheduler()
    for node in range(nodes):
        scheduler.node_up(node, SLOTS, SUPPLY if kind in KINDS[2:] else None)
    return scheduler


def record(nodes: int, tasks: int, kind: str) -> tuple[list[Event], int]:
    """Run tasks on simulated nodes. Return all events, and how many of them fill the nodes."""
    with_gangs, with_refs, needs = kind in KINDS[1::2], kind == KINDS[3], NEEDS if kind in KINDS[2:] else ()
    scheduler, simulated = new_scheduler(nodes, kind), SimulatedNodes(nodes)
    events: list[Event] = []

    def feed(event: Event) -> None:
        method, arguments, options = event
        events.append(event)
        simulated.take(method(scheduler, *arguments, **options))

    def submit(number: int) -> None:
        near = number // GANG_EVERY * 7919 % nodes
        need = {"need": needs[number % len(needs)]} if needs else {}
        if with_gangs and number % GANG_EVERY == 0:
            members = tuple((near + offset) % nodes for offset in range(GANG))
            feed((Scheduler.submit_gang, (number,), {"nodes": members, "places": 1, **need}))
        else:
            prefer = {"prefer": (near,)} if with_refs and number % 2 else {}
            feed((Scheduler.submit, (number,), {**need, **prefer}))

    feed((Scheduler.submit, (0,), {}))
    feed((Scheduler.finished, (0, TASK_NS), {}))  # now tasks are known to be short, so they are sent in advance
    numbers = itertools.count(1)
    while scheduler.queued < BACKLOG * SLOTS * nodes:
        submit(next(numbers))
    fill = len(events)
    for _ in range(tasks):
        task, node = simulated.end_one()
        feed((Scheduler.gang_finished, (task,), {}) if node < 0 else (Scheduler.finished, (task, TASK_NS), {}))
        submit(next(numbers))
    return events, fill


def measure(nodes: int, tasks: int, kind: str) -> float:
    """Return the CPU time for a task, in microseconds: that of its two events, which were recorded before."""
    recorded, fill = record(nodes, tasks, kind)
    copied = pickle.dumps(recorded)
    # They lie wherever the recorder had room, which costs up to 0.6 us a task among 10,000 nodes.
    del recorded
    events: list[Event] = pickle.loads(copied)
    del copied
    scheduler = new_scheduler(nodes, kind)
    gc.collect()
    gc.disable()
    for method, arguments, options in events[:fill]:
        method(scheduler, *arguments, **options)
    began = time.thread_time_ns()
    for method, arguments, options in events[fill:]:
        method(scheduler, *arguments, **options)
    spent = time.thread_time_ns() - began
    gc.enable()
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
