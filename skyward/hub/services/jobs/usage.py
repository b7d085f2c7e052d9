"""Usage: devices and money of projects by month, and the counts of jobs that Prometheus asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from ...model.access import Actor, Right, Role
from ...model.jobs import JobPriority, JobState
from ...model.usage import DAY_MS, DayOfUse, JobCounts, MonthOfUse, parts_of_days
from ...store import attempts, identities, machine_sets, usage
from ...store.database import Database
from ...store.schema import ORGANIZATION
from ...store.transaction import ReadSnapshot
from ..calls import require_no_run_token
from .life import devices_of, machines_named


class Usage:
    """Reads what jobs used. Attempts that run count up to now."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def days(self, actor: Actor, days: int = 366) -> list[DayOfUse]:
        """Return the use by day: of all projects for owners, of the actor's own for everybody else.

        Args:
            actor: Who asks.
            days: Days back from today.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self._database.read(_days, actor, self._database.clock(), days)

    async def counts(self) -> JobCounts:
        """Count the jobs and devices of the whole hub. It is for the hub's own metrics, and asks for no right."""
        return await self._database.read(_counts)


def months_of(days: list[DayOfUse]) -> list[MonthOfUse]:
    """Add days up to months, the newest first."""
    sums: dict[tuple[str, str, str], tuple[float, float, int]] = {}
    for use in days:
        key = (month_of(use.day), use.project, use.kind)
        seconds, cost_usd, count = sums.get(key, (0.0, 0.0, 0))
        sums[key] = (seconds + use.seconds, cost_usd + use.cost_usd, count + use.attempts)
    ordered = sorted(sums, key=lambda key: key[1:])
    ordered.sort(key=lambda key: key[0], reverse=True)
    return [
        MonthOfUse(
            project=project,
            month=month,
            kind=kind,
            device_hours=sums[month, project, kind][0] / 3600,
            cost_usd=sums[month, project, kind][1],
            attempts=sums[month, project, kind][2],
        )
        for month, project, kind in ordered
    ]


def month_of(day: int) -> str:
    """Return the month of a day since 1970.

    Example:
        >>> month_of(0), month_of(20_783)
        ('1970-01', '2026-11')
    """
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m")


def _days(snapshot: ReadSnapshot, actor: Actor, now: int, days: int) -> list[DayOfUse]:
    names = _names(snapshot)
    if actor.role < Role.OWNER:
        names = {actor.project: names[actor.project]}
    first = now // DAY_MS - days
    ended = usage.days_of_use(snapshot, names, first)
    running = [use for use in _running(snapshot, names, now) if use.day >= first]
    return sorted([*ended, *running], key=lambda use: (use.day, use.project, use.kind))


def _names(snapshot: ReadSnapshot) -> dict[int, str]:
    return {project[0]: project[1] for project in identities.projects(snapshot, ORGANIZATION, None)}


def _running(snapshot: ReadSnapshot, names: Mapping[int, str], now: int) -> Iterator[DayOfUse]:
    for job, attempt in attempts.active_attempts(snapshot):
        if attempt.claimed_at is None or job.project not in names:
            continue
        kind, devices = devices_of(machines_named(snapshot, attempt.machines), job, attempt)
        for day, part in parts_of_days(attempt.claimed_at, now):
            yield DayOfUse(
                project=names[job.project],
                day=day,
                kind=kind,
                seconds=devices * max(0, now - attempt.claimed_at) / 1000 * part,
                cost_usd=attempt.cost * part,
                attempts=0,
            )


def _counts(snapshot: ReadSnapshot) -> JobCounts:
    names = _names(snapshot)
    running: Counter[tuple[str, str]] = Counter()
    waiting: Counter[tuple[str, str]] = Counter()
    for project, kind, priority, state, count in usage.count_unfinished(snapshot):
        if JobState(state).has_attempt:
            running[kind, names.get(project, "")] += count
        else:
            waiting[names.get(project, ""), JobPriority(priority).name.lower()] += count
    allocated: Counter[str] = Counter()
    total: Counter[str] = Counter()
    sets = {record.spec.name: record.spec for record in machine_sets.machine_sets(snapshot)}
    for spec in sets.values():
        total[spec.accelerator or "node"] += spec.nodes * spec.devices
    for job, attempt in attempts.active_attempts(snapshot):
        if not attempt.obstacles:
            kind, devices = devices_of(sets.get(attempt.machines), job, attempt)
            allocated[kind] += devices
    return JobCounts(
        ended=usage.ended_jobs(snapshot, names),
        uses=usage.device_seconds(snapshot, names),
        running=running,
        waiting=waiting,
        allocated={kind: allocated[kind] for kind in total | allocated},
        available={kind: max(0, total[kind] - allocated[kind]) for kind in total},
    )
