"""Measure the quality of the hub's scheduler on simulated traces: `python benchmarks/hub_jobs.py --help`.

Five seeded traces of 5,000 jobs go to 64 nodes with 8 devices each. Jobs arrive in bursts, from 1 device to gangs of 32
nodes, from three projects with equal weights and unequal demand. A fifth of the jobs may be preempted, and estimates
are up to three times too long. Three schedulers run each trace:

- skyward: `skyward.hub.schedule.decide` with fair shares;
- EASY: first come, first served, and later jobs pass the first one that waits only if they do not delay it;
- best effort: first come, first served, and whatever fits begins.

Utilisation is the time of devices that did useful work until the last arrival. Jain's index compares the service of the
projects while each of them waits for at least its part of the machines. One decision over 10,000 waiting and 1,000
running jobs is timed by itself. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from skyward.hub.schedule import (
    AttemptState,
    HubJob,
    JobAttempt,
    JobPlacement,
    JobsSnapshot,
    MachineSet,
    Priority,
    ProjectState,
    Shape,
    decide,
)
from skyward.hub.schedule.room import Room
from skyward.hub.schedule.shares import charged

NODES, DEVICES = 64, 8
FLOOR = MachineSet(name="floor", nodes=NODES, devices=DEVICES, accelerator="A100")
PROJECTS = {"vision": 0.4, "speech": 0.33, "robots": 0.27}
"""Project -> part of the jobs."""
SIZES = {(1, 1): 50, (1, 2): 17, (1, 4): 13, (1, 8): 13, (2, 8): 5, (4, 8): 2, (8, 8): 0.8, (16, 8): 0.3, (32, 8): 0.1}
"""(nodes, devices on each) -> weight."""
LOAD = 1.1
GANG = 32
CHECKPOINT_S, SAVE_S = 600.0, 60.0
HALF_LIFE_S = 7 * 86_400.0
TARGETS = (
    ("utilisation, by EASY's", 0.98, math.inf),
    ("longest wait of a gang of 32 nodes, by best effort's", 0.0, 0.25),
    ("Jain's index of the projects' service", 0.95, math.inf),
    ("one decision, ms", 0.0, 50.0),
)
"""Figure, least and most."""


@dataclass
class SimJob:
    """A job of a trace: what the scheduler knows, and how long it really takes."""

    job: HubJob
    arrives_at: float
    left_s: float
    first_wait_s: float | None = None


@dataclass
class Run:
    """A simulated attempt."""

    sim: SimJob
    nodes: tuple[int, ...]
    began_at: float
    on_loan: bool = False
    waits_for: set[str] = field(default_factory=set)
    makes_way_at: float | None = None
    number: int = 0

    def attempt(self, now: float) -> JobAttempt:
        state = AttemptState.RUNNING
        if self.makes_way_at is not None:
            state = AttemptState.PREEMPTING
        elif self.waits_for:
            state = AttemptState.RESERVED
        return JobAttempt(
            job=self.sim.job,
            machines=FLOOR.name,
            nodes=self.nodes,
            state=state,
            began_at=self.began_at,
            saved_at=self.began_at + (now - self.began_at) // CHECKPOINT_S * CHECKPOINT_S,
            ends_by=self.makes_way_at or float("inf"),
            on_loan=self.on_loan,
            waits_for=frozenset(self.waits_for),
        )


Made = tuple[tuple[JobPlacement, ...], frozenset[str]]
"""Placements, and the jobs with a reservation."""
Scheduler = Callable[[JobsSnapshot, float], Made]


def skyward(snapshot: JobsSnapshot, now: float) -> Made:
    made = decide(snapshot, now)
    return made.placements, frozenset(reservation.job for reservation in made.reservations)


def easy(snapshot: JobsSnapshot, now: float) -> Made:
    return _in_order(snapshot, now, reserves=True)


def best_effort(snapshot: JobsSnapshot, now: float) -> Made:
    return _in_order(snapshot, now, reserves=False)


def _in_order(snapshot: JobsSnapshot, now: float, *, reserves: bool) -> Made:
    room, placements = Room(FLOOR, snapshot.attempts, now), []
    for job in sorted(snapshot.waiting, key=lambda job: job.order):
        if place := room.place(job):
            placements.append(JobPlacement(job=job.id, machines=FLOOR.name, nodes=place[0]))
        elif reserves and not room.reservations:
            room.reserve(job)
    return tuple(placements), frozenset()


def trace(seed: int, count: int, load: float) -> list[SimJob]:
    """Return the jobs of a trace by their arrival."""
    dice = random.Random(seed)
    jobs: list[SimJob] = []
    now, order = 0.0, 0
    shapes, weights = list(SIZES), list(SIZES.values())
    while len(jobs) < count:
        project = dice.choices(list(PROJECTS), list(PROJECTS.values()))[0]
        for _ in range(min(count - len(jobs), 1 + int(dice.expovariate(1 / 8)))):  # a burst of one project
            nodes, devices = dice.choices(shapes, weights)[0]
            took_s = min(86_400.0, max(60.0, dice.lognormvariate(8.0, 1.2)))
            order += 1
            job = HubJob(
                id=f"{order:05}",
                project=project,
                order=order,
                shape=Shape(nodes=nodes, devices=devices, accelerator="A100"),
                max_duration_s=took_s * dice.uniform(1, 3),
                is_preemptible=dice.random() < 0.2,
            )
            jobs.append(SimJob(job, now, took_s))
        now += dice.expovariate(1.0)
    work_s = sum(sim.left_s * devices_of(sim.job) for sim in jobs)
    stretch = work_s / (NODES * DEVICES * load) / now  # so that the trace offers the load
    for sim in jobs:
        sim.arrives_at *= stretch
    return jobs


def devices_of(job: HubJob) -> int:
    return job.shape.nodes * (job.shape.devices or DEVICES)


@dataclass
class Outcome:
    """Outcome of a trace."""

    utilisation: float
    gang_wait_s: float
    jain: float
    preemptions: int
    decisions: int
    slowest_ms: float


class Simulation:
    """A trace under one scheduler. `in_vain` counts preemptions whose beneficiary never began."""

    def __init__(self, jobs: Iterable[SimJob], schedule: Scheduler) -> None:
        self.jobs = {sim.job.id: replace(sim) for sim in jobs}
        self.schedule = schedule
        self.waiting: dict[str, SimJob] = {}
        self.reserved: frozenset[str] = frozenset()
        self.runs: dict[str, Run] = {}
        self.events: list[tuple[float, int, str, str, int]] = []
        self.ticket = itertools.count()
        self.used: dict[str, dict[str, float]] = {project: {} for project in PROJECTS}
        self.busy_s = self.now = 0.0
        self.service = dict.fromkeys(PROJECTS, 0.0)
        self.preemptions = self.decisions = 0
        self.slowest_ms = 0.0
        for sim in self.jobs.values():
            self._at(sim.arrives_at, "arrives", sim.job.id)
        self.last_arrival = max(sim.arrives_at for sim in self.jobs.values())

    def run(self) -> Outcome:
        while self.events:
            now = self.events[0][0]
            self._pass_time(now)
            while self.events and self.events[0][0] <= now:
                _, _, what, job, number = heapq.heappop(self.events)
                getattr(self, f"_{what}")(job, number)
            self._decide()
        waits = [sim.first_wait_s or 0.0 for sim in self.jobs.values() if sim.job.shape.nodes == GANG]
        service = list(self.service.values())
        return Outcome(
            utilisation=self.busy_s / (NODES * DEVICES * self.last_arrival),
            gang_wait_s=max(waits),
            jain=sum(service) ** 2 / (len(service) * sum(value**2 for value in service)),
            preemptions=self.preemptions,
            decisions=self.decisions,
            slowest_ms=self.slowest_ms,
        )

    def _at(self, when: float, what: str, job: str, number: int = 0) -> None:
        heapq.heappush(self.events, (when, next(self.ticket), what, job, number))

    def _pass_time(self, now: float) -> None:
        elapsed = now - self.now
        wanted = dict.fromkeys(PROJECTS, 0)
        for sim in self.waiting.values():
            wanted[sim.job.project] += devices_of(sim.job)
        contended = min(wanted.values()) >= NODES * DEVICES / len(PROJECTS)
        held = dict.fromkeys(PROJECTS, 0)
        for run in self.runs.values():
            if run.waits_for:
                continue
            devices = devices_of(run.sim.job)
            held[run.sim.job.project] += devices
            if now <= self.last_arrival and run.makes_way_at is None:
                self.busy_s += devices * elapsed
        for project, devices in held.items():
            self.used[project] = charged(self.used[project], "A100", devices, elapsed, HALF_LIFE_S)
            if contended:
                self.service[project] += devices * elapsed
        self.now = now

    def _decide(self) -> None:
        if not self.waiting:
            return
        snapshot = JobsSnapshot(
            machines=(FLOOR,),
            projects=tuple(ProjectState(name=name, used=used) for name, used in self.used.items()),
            waiting=tuple(sim.job for sim in self.waiting.values()),
            reserved=self.reserved,
            attempts=tuple(run.attempt(self.now) for run in self.runs.values()),
        )
        began = time.thread_time()
        placements, self.reserved = self.schedule(snapshot, self.now)
        self.slowest_ms = max(self.slowest_ms, 1000 * (time.thread_time() - began))
        self.decisions += 1
        for placement in placements:
            self._begin(placement)

    def _begin(self, placement: JobPlacement) -> None:
        sim = self.waiting.pop(placement.job)
        if sim.first_wait_s is None:
            sim.first_wait_s = self.now + SAVE_S * bool(placement.victims) - sim.arrives_at
        run = Run(sim, placement.nodes, self.now, placement.on_loan, set(placement.victims), number=next(self.ticket))
        self.runs[placement.job] = run
        for victim in placement.victims:
            self.preemptions += 1
            leaving = self.runs[victim]
            leaving.makes_way_at = self.now + SAVE_S
            leaving.sim.left_s -= self.now - leaving.began_at
            self._at(leaving.makes_way_at, "leaves", victim, leaving.number)
        if not run.waits_for:
            self._at(self.now + sim.left_s, "ends", placement.job, run.number)

    def _arrives(self, job: str, _number: int) -> None:
        self.waiting[job] = self.jobs[job]

    def _ends(self, job: str, number: int) -> None:
        run = self.runs.get(job)
        if run and run.number == number and run.makes_way_at is None:
            del self.runs[job]

    def _leaves(self, job: str, number: int) -> None:
        run = self.runs.pop(job)
        assert run.number == number
        assert run.makes_way_at is not None
        ran_s = run.makes_way_at - SAVE_S - run.began_at
        run.sim.job = replace(run.sim.job, max_duration_s=max(60.0, run.sim.job.max_duration_s - ran_s))
        if run.sim.left_s > 0:
            self.waiting[job] = run.sim
        for heir in self.runs.values():
            if job in heir.waits_for:
                heir.waits_for.discard(job)
                if not heir.waits_for:
                    heir.began_at = self.now
                    self._at(self.now + heir.sim.left_s, "ends", heir.sim.job.id, heir.number)


def one_decision_ms(waiting: int = 10_000, running: int = 1_000, rounds: int = 5) -> float:
    """Return the CPU time of a decision while everything is busy, in ms: the median of some rounds."""
    dice = random.Random(0)
    machines = MachineSet(name="floor", nodes=250, devices=8, accelerator="A100")
    shapes = [Shape(nodes=nodes, devices=devices, accelerator="A100") for nodes, devices in SIZES]

    def job(number: int, shape: Shape) -> HubJob:
        return HubJob(
            id=f"{number:05}",
            project=dice.choice(list(PROJECTS)),
            order=number,
            shape=shape,
            max_duration_s=dice.uniform(60.0, 86_400.0),
            is_preemptible=dice.random() < 0.2,
            priority=dice.choice(list(Priority)),
        )

    attempts = tuple(
        JobAttempt(job=job(number, shapes[1]), machines="floor", nodes=(number // 4,), began_at=-float(number))
        for number in range(running)
    )
    jobs = tuple(job(running + number, dice.choice(shapes)) for number in range(waiting))
    snapshot = JobsSnapshot(machines=(machines,), waiting=jobs, attempts=attempts)
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        decide(snapshot, 0.0)
        times.append(1000 * (time.thread_time() - began))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=5_000)
    parser.add_argument("--load", type=float, default=LOAD, help="work that arrives, by what the devices can do")
    options = parser.parse_args()
    schedulers: dict[str, Scheduler] = {"skyward": skyward, "EASY": easy, "best effort": best_effort}
    print(f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}")
    print(f"{'trace':>5} {'scheduler':>12} {'utilisation':>12} {'gang waits, h':>14} {'Jain':>6} {'preempted':>10}")
    worst: list[list[float]] = [[], [], []]
    for seed in range(options.traces):
        jobs = trace(seed, options.jobs, options.load)
        got = {name: Simulation(jobs, schedule).run() for name, schedule in schedulers.items()}
        for name, outcome in got.items():
            print(
                f"{seed:>5} {name:>12} {outcome.utilisation:>12.3f} {outcome.gang_wait_s / 3600:>14.1f} "
                f"{outcome.jain:>6.3f} {outcome.preemptions:>10}",
                flush=True,
            )
        ours, theirs = got["skyward"], got["EASY"]
        worst[0].append(ours.utilisation / theirs.utilisation)
        worst[1].append(ours.gang_wait_s / got["best effort"].gang_wait_s)
        worst[2].append(ours.jain)
    figures = (min(worst[0]), max(worst[1]), min(worst[2]), one_decision_ms())
    missed = False
    for (title, least, most), figure in zip(TARGETS, figures, strict=True):
        is_reached = least <= figure <= most
        missed |= not is_reached
        bound = f"at least {least:g}" if least else f"at most {most:g}"
        print(f"{title}: {figure:.3g} ({bound}: {'reached' if is_reached else 'missed'})")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
