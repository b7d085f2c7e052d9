"""Promises of the hub's scheduler over random histories, in injected time and against a model of the machines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.hub.schedule import (
    AttemptState,
    Decisions,
    HubJob,
    JobAttempt,
    JobQuota,
    JobsSnapshot,
    MachineSet,
    Policy,
    PolicyName,
    Priority,
    ProjectState,
    Shape,
    decide,
)

Row = TypeVar("Row")

SETS = (
    MachineSet(name="a", nodes=3, devices=4, accelerator="A100"),
    MachineSet(name="b", nodes=2, devices=2, accelerator="L4"),
)
QUOTAS = {
    "lends": JobQuota(devices={"A100": 8}),
    "strict": JobQuota(devices={"A100": 4, "L4": 2}, may_borrow=False, jobs=3),
    "free": JobQuota(),
}
STEP_S = 50.0
GRACE_S = 30.0

SHAPES = st.builds(
    Shape,
    nodes=st.integers(1, 3),
    devices=st.sampled_from([None, 1, 2, 3, 4]),
    accelerator=st.sampled_from(["", "A100", "L4"]),
)
JOBS = st.builds(
    HubJob,
    id=st.just(""),
    order=st.just(0),
    project=st.sampled_from(sorted(QUOTAS)),
    shape=SHAPES,
    max_duration_s=st.sampled_from([60.0, 200.0, 700.0]),
    priority=st.sampled_from(Priority),
    is_preemptible=st.booleans(),
)


@dataclass
class World:
    """Machines and jobs whose history follows the decisions. Each step checks the promises."""

    policy: PolicyName
    dice: random.Random
    now: float = 0.0
    waiting: dict[str, HubJob] = field(default_factory=dict)
    attempts: dict[str, JobAttempt] = field(default_factory=dict)
    left_s: dict[str, float] = field(default_factory=dict)
    reserved: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    orders: int = 0

    def submit(self, job: HubJob) -> None:
        self.orders += 1
        job = replace(job, id=f"{self.orders:03}", order=self.orders)
        self.waiting[job.id] = job
        self.left_s[job.id] = job.max_duration_s * self.dice.uniform(0.3, 1.0)

    def step(self) -> None:
        self.now += STEP_S
        self._end_what_is_over()
        snapshot = self._snapshot()
        made = decide(snapshot, self.now)
        assert made == decide(self._shuffled(snapshot), self.now), "the order of the rows counts"
        self._follow(made)
        self._check(made)

    def _snapshot(self) -> JobsSnapshot:
        return JobsSnapshot(
            machines=SETS,
            projects=tuple(ProjectState(name=name, quota=quota) for name, quota in QUOTAS.items()),
            waiting=tuple(self.waiting.values()),
            attempts=tuple(self.attempts.values()),
            reserved=frozenset(self.reserved),
            policy=Policy(name=self.policy, grace_s=GRACE_S),
        )

    def _shuffled(self, snapshot: JobsSnapshot) -> JobsSnapshot:
        def mixed(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            return tuple(self.dice.sample(rows, len(rows)))

        return replace(
            snapshot,
            machines=mixed(snapshot.machines),
            projects=mixed(snapshot.projects),
            waiting=mixed(snapshot.waiting),
            attempts=mixed(snapshot.attempts),
        )

    def _end_what_is_over(self) -> None:
        for job, attempt in list(self.attempts.items()):
            is_over = self.now >= attempt.began_at + self.left_s[job]
            if attempt.state is AttemptState.RUNNING and is_over:
                self._leave(job)
                self.ended.add(job)
            elif attempt.state is AttemptState.PREEMPTING and self.now >= attempt.ends_by:
                self._leave(job)
                self.orders += 1
                self.waiting[job] = replace(attempt.job, order=-self.orders)

    def _leave(self, job: str) -> None:
        del self.attempts[job]
        for other, heir in self.attempts.items():
            if job in heir.waits_for and not (rest := heir.waits_for - {job}):
                self.attempts[other] = replace(heir, waits_for=rest, state=AttemptState.RUNNING, began_at=self.now)
            elif job in heir.waits_for:
                self.attempts[other] = replace(heir, waits_for=heir.waits_for - {job})

    def _follow(self, made: Decisions) -> None:
        for placement in made.placements:
            job = self.waiting.pop(placement.job)
            assert len(set(placement.nodes)) == job.shape.nodes, "half a gang"
            for victim in placement.victims:
                lower = self.attempts[victim]
                assert lower.state is AttemptState.RUNNING
                assert lower.job.is_preemptible
                assert lower.job.priority <= job.priority, "a lower priority displaces a higher one"
                is_lower = lower.job.priority < job.priority
                assert is_lower or lower.on_loan or lower.job.project != job.project
                self.left_s[victim] -= self.now - lower.began_at
                self.attempts[victim] = replace(lower, state=AttemptState.PREEMPTING, ends_by=self.now + GRACE_S)
            self.attempts[job.id] = JobAttempt(
                job=job,
                machines=placement.machines,
                nodes=placement.nodes,
                state=AttemptState.RESERVED if placement.victims else AttemptState.RUNNING,
                began_at=self.now,
                on_loan=placement.on_loan,
                waits_for=frozenset(placement.victims),
            )
        self.reserved = {reservation.job: reservation.at for reservation in made.reservations}

    def _check(self, made: Decisions) -> None:
        sets = {machines.name: machines for machines in SETS}
        held = {(machines.name, node): 0 for machines in SETS for node in range(machines.nodes)}
        projects = {(project, kind): 0 for project in QUOTAS for kind in ("A100", "L4")}
        jobs = dict.fromkeys(QUOTAS, 0)
        for attempt in self.attempts.values():
            machines = sets[attempt.machines]
            assert machines.suits(attempt.job.shape, attempt.job.project)
            each = attempt.job.shape.on_each(machines)
            jobs[attempt.job.project] += 1
            projects[attempt.job.project, machines.device_kind] += each * len(attempt.nodes)
            if not attempt.waits_for:
                for node in attempt.nodes:
                    held[attempt.machines, node] += each
        assert all(count <= sets[name].devices for (name, _), count in held.items()), "more devices than there are"
        assert all(projects["strict", kind] <= own for kind, own in QUOTAS["strict"].devices.items())
        assert jobs["strict"] <= 3
        assert set(made.waiting) == {job.id for job in self.waiting.values()} | {
            attempt.job.id for attempt in self.attempts.values() if attempt.waits_for
        }
        assert all(reason.sentence() for reason in made.waiting.values())


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(PolicyName),
    seed=st.integers(0, 2**32),
    arrivals=st.lists(st.lists(JOBS, max_size=4), min_size=1, max_size=12),
)
def test_promises_hold_at_every_step_and_every_job_ends(
    policy: PolicyName, seed: int, arrivals: list[list[HubJob]]
) -> None:
    """No more devices than there are, no half gang, no displaced priority; and who can run at all, runs and ends."""
    world = World(policy, random.Random(seed))
    for jobs in arrivals:
        for job in jobs:
            world.submit(job)
        world.step()
    for _ in range(60 * (world.orders + 1)):
        if not world.attempts and not any(map(_can_run, world.waiting.values())):
            break
        world.step()
    assert not world.attempts
    assert not any(map(_can_run, world.waiting.values())), "a job waits for ever"


def _can_run(job: HubJob) -> bool:
    quota = QUOTAS[job.project]
    return any(
        machines.suits(job.shape, job.project)
        and (quota.may_borrow or job.shape.nodes * job.shape.on_each(machines) <= quota.devices[machines.device_kind])
        for machines in SETS
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), small=st.integers(1, 3), policy=st.sampled_from(PolicyName))
def test_a_gang_gets_its_machines_by_the_time_that_it_was_told(seed: int, small: int, policy: PolicyName) -> None:
    """A stream of small jobs that never ends cannot delay a gang beyond its first reservation."""
    dice = random.Random(seed)
    world = World(policy, dice)
    gang = HubJob(
        id="", project="free", order=0, shape=Shape(nodes=3, devices=4, accelerator="A100"), max_duration_s=60.0
    )
    told: float | None = None
    name = ""
    for step in range(200):
        for _ in range(3):
            world.submit(
                HubJob(
                    id="",
                    project=dice.choice(["free", "lends"]),
                    order=0,
                    shape=Shape(devices=small, accelerator="A100"),
                    max_duration_s=dice.choice([100.0, 300.0, 700.0]),
                    is_preemptible=dice.random() < 0.3,
                )
            )
        if step == 5:
            world.submit(gang)
            name = f"{world.orders:03}"
        world.step()
        if step >= 5 and told is None and name in world.reserved:
            told = world.reserved[name]
        if step >= 5 and name not in world.waiting:
            break
    assert step < 199, "the gang starves"
    assert told is None or world.now <= told + STEP_S
