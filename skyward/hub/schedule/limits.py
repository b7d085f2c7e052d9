"""Limits of projects and users: quotas of devices, nodes, jobs and money."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from .values import (
    AttemptState,
    End,
    EndCause,
    HubJob,
    JobAttempt,
    JobQuota,
    JobsSnapshot,
    MachineSet,
    ProjectState,
    UserState,
)

MOST_DRIVERS = 64
"""Most jobs without nodes on one machine set. Each is a process beside a launcher, of about 100 MiB."""


class Holdings:
    """Machines and jobs that a project or a user holds, beside what it may hold.

    Args:
        name: Name for sentences, such as `"project research"`.
        quota: Its limits.
    """

    def __init__(self, name: str, quota: JobQuota) -> None:
        self.name, self.quota = name, quota
        self.devices: Counter[str] = Counter()
        self.nodes = self.jobs = 0

    def add(self, job: HubJob, machines: MachineSet, nodes: int) -> None:
        """Count a job that holds machines. One without nodes counts for nothing: others wait for it to submit them."""
        self.devices[machines.device_kind] += nodes * job.shape.on_each(machines)
        self.nodes += nodes
        self.jobs += nodes > 0

    def refusal(self, job: HubJob, machines: MachineSet) -> str:
        """Return why the job exceeds a limit on these machines; empty if it does not."""
        quota, kind = self.quota, machines.device_kind
        if quota.jobs is not None and self.jobs >= quota.jobs:
            return f"{self.name} runs {self.jobs} of {quota.jobs} jobs"
        if quota.nodes is not None and self.nodes + job.shape.nodes > quota.nodes:
            return f"{self.name} uses {self.nodes} of {quota.nodes} nodes"
        if not quota.may_borrow and self.excess(job, machines) > 0:
            return f"{self.name} uses {self.devices[kind]} of {quota.devices[kind]} {kind}"
        return ""

    def excess(self, job: HubJob, machines: MachineSet) -> int:
        """Return the devices that the project would hold beyond its own; 0 or less if the job stays within them."""
        kind = machines.device_kind
        if kind not in self.quota.devices:
            return 0
        wanted = job.shape.nodes * job.shape.on_each(machines)
        return self.devices[kind] + wanted - self.quota.devices[kind]


class JobLimits:
    """Limits that apply while a decision is made.

    Args:
        snapshot: Projects, users, and the attempts that hold machines.
        sets: Name of a set -> the set.
    """

    def __init__(self, snapshot: JobsSnapshot, sets: Mapping[str, MachineSet]) -> None:
        self.projects = {project.name: project for project in snapshot.projects}
        self._users = {user.name: user for user in snapshot.users}
        self._held: dict[tuple[str, str], Holdings] = {}
        self._drivers: Counter[str] = Counter()
        for attempt in snapshot.attempts:
            self.add(attempt.job, sets[attempt.machines], len(attempt.nodes))

    def project(self, name: str) -> ProjectState:
        """Return the project, also one without limits."""
        if name not in self.projects:
            self.projects[name] = ProjectState(name=name)
        return self.projects[name]

    def add(self, job: HubJob, machines: MachineSet, nodes: int) -> None:
        """Count a job that holds machines."""
        self._drivers[machines.name] += not nodes
        for holdings in self._of(job):
            holdings.add(job, machines, nodes)

    def refusal(self, job: HubJob, machines: MachineSet) -> str:
        """Return which limit the job exceeds on these machines; empty if none."""
        if not job.shape.nodes:
            count = self._drivers[machines.name]
            return f"machines {machines.name} have {count} jobs without nodes already" if count >= MOST_DRIVERS else ""
        return next((why for held in self._of(job) if (why := held.refusal(job, machines))), "")

    def money(self, job: HubJob) -> str:
        """Return which limit in money the job's project or user has reached; empty if none."""
        spenders: list[tuple[str, UserState]] = [("project", self.project(job.project))]
        if job.user in self._users:
            spenders.append(("user", self._users[job.user]))
        return next((why for what, spender in spenders if (why := _spent(what, spender))), "")

    def is_within_own(self, job: HubJob, machines: MachineSet) -> bool:
        """Return whether the project has a quota of such devices, and the job stays within it."""
        held = self._holdings("project", job.project)
        return machines.device_kind in held.quota.devices and held.excess(job, machines) <= 0

    def own_use(self, project: str, kind: str) -> tuple[int, int] | None:
        """Return the devices that the project holds and those that are its own; None without a quota of them."""
        held = self._holdings("project", project)
        return (held.devices[kind], held.quota.devices[kind]) if kind in held.quota.devices else None

    def _of(self, job: HubJob) -> tuple[Holdings, ...]:
        project = self._holdings("project", job.project)
        return (project, self._holdings("user", job.user)) if job.user in self._users else (project,)

    def _holdings(self, what: str, name: str) -> Holdings:
        key = (what, name)
        if key not in self._held:
            holder = self.project(name) if what == "project" else self._users[name]
            self._held[key] = Holdings(f"{what} {name}", holder.quota)
        return self._held[key]


def _spent(what: str, spender: UserState) -> str:
    limits = (
        (spender.spent_today_usd, spender.quota.usd_per_day, "today"),
        (spender.spent_month_usd, spender.quota.usd_per_month, "this month"),
    )
    for spent, limit, when in limits:
        if spent >= limit:
            return f"{what} {spender.name} has spent {spent:.2f} of {limit:.2f} USD {when}"
    return ""


def budget_spent(job: HubJob) -> str:
    """Return that the job's own budget is spent; empty if it is not."""
    return "" if job.spent_usd < job.budget_usd else f"its budget of {job.budget_usd:.2f} USD is spent"


def borrowers(attempts: Iterable[JobAttempt], limits: JobLimits, sets: Mapping[str, MachineSet]) -> frozenset[str]:
    """Return the ids of the jobs that hold devices beyond their project's own: those that began last."""
    held: Counter[tuple[str, str]] = Counter()
    borrowed: set[str] = set()
    for attempt in sorted(attempts, key=lambda attempt: (attempt.began_at, attempt.job.id)):
        machines, project = sets[attempt.machines], limits.project(attempt.job.project)
        kind = machines.device_kind
        own = project.quota.devices.get(kind)
        held[project.name, kind] += len(attempt.nodes) * attempt.job.shape.on_each(machines)
        if own is not None and held[project.name, kind] > own:
            borrowed.add(attempt.job.id)
    return frozenset(borrowed)


def overdue(snapshot: JobsSnapshot, limits: JobLimits, now: float) -> tuple[End, ...]:
    """Return the attempts that must end: their time, their budget or their project's money is used up."""
    ends: list[End] = []
    for attempt in snapshot.attempts:
        job = attempt.job
        if attempt.state is AttemptState.PREEMPTING:
            continue
        if now >= attempt.began_at + job.max_duration_s:
            ends.append(End(job=job.id, cause=EndCause.TIME))
        elif budget_spent(job):
            ends.append(End(job=job.id, cause=EndCause.BUDGET))
        elif limits.money(job):
            ends.append(End(job=job.id, cause=EndCause.QUOTA_MONEY))
    return tuple(ends)
